"""What a request has delivered, and whether it goes on after an attempt failed: resume is the only recovery.

    attempt ──LegFailed──> strikes counted ──back-off──> next attempt with prompt + emitted tokens
                                └── too many in a row: Unavailable, which says what happened

A strike is an attempt that failed before it had delivered much; a worker that died counts twice, because a request
that ends every worker it meets must not meet them all. An attempt that gets on wipes the slate.
"""

import asyncio

from pdserve.errors import LegFailed, PdserveError, ProtocolError, Unavailable, UnknownTicket, WorkerLost, WorkerSilent
from pdserve.request import Token, WorkRequest

RESUMABLE = (LegFailed, ProtocolError, UnknownTicket)  # faults of an attempt, not of the request
MAX_STRIKES = 8
GOOD_TOKENS = 16  # an attempt that has delivered so many was a good one
BACK_OFF_S = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)


class Recovery:
    """One request over all its attempts."""

    def __init__(self, work: WorkRequest) -> None:
        self._work = work
        self._emitted: list[int] = []
        self._num_before = 0  # tokens emitted before the present attempt
        self._strikes = 0
        self.num_resumes = 0
        self.is_finished = False  # the last token of the completion was taken

    def work(self) -> WorkRequest:
        """What the next attempt is to do."""
        return self._work.resumed(self._emitted) if self._emitted else self._work

    def take(self, token: Token) -> Token:
        """Note a token that goes to the client. Raises ProtocolError when it is not the next one."""
        expected = self._work.num_emitted + len(self._emitted)
        if token.number != expected or self.is_finished:
            raise ProtocolError(f"token {token.number} came, expected {expected}")
        self._emitted.append(token.token_id)
        self.is_finished = token.finish != ""
        return token

    async def resume(self, error: PdserveError) -> None:
        """Wait until it is time for the next attempt. Raises Unavailable when there shall be none."""
        if len(self._emitted) - self._num_before >= GOOD_TOKENS:
            self._strikes = 0
        self._num_before = len(self._emitted)
        self._strikes += 2 if isinstance(error, WorkerLost) and not isinstance(error, WorkerSilent) else 1
        self.num_resumes += 1
        if self._strikes > MAX_STRIKES:
            raise Unavailable(f"given up after {self.num_resumes} attempts, the last one ended with: {error}")
        await asyncio.sleep(BACK_OFF_S[min(self._strikes - 1, len(BACK_OFF_S) - 1)])
