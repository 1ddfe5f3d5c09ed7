"""A client: sends one request, reads its tokens, goes on at another router when its router dies.

As the real one, it counts only what it has received: what the dead router had not delivered yet is generated again.
"""

import asyncio
from dataclasses import dataclass
from random import Random

from pdserve.errors import PdserveError
from pdserve.request import Token, WorkRequest
from router.call import closing
from router.record import RequestRecord
from tests.chaos.simulation.cluster import Cluster
from tests.chaos.simulation.nodes import RouterNode

RETRY_S = 0.05


@dataclass(frozen=True)
class Job:
    """One request, and how its client behaves."""

    number: int
    at_s: float
    work: WorkRequest
    answer: tuple[Token, ...]  # of the undisturbed run
    priority: int = 0
    leaves_after: int | None = None  # tokens: as with a stop string
    cancels_after_s: float | None = None  # since `at_s`
    deadline_s: float | None = None

    @property
    def patience_s(self) -> float | None:
        """Until the client leaves, whatever has come."""
        limits = [limit for limit in (self.cancels_after_s, self.deadline_s) if limit is not None]
        return min(limits, default=None)


class Client:
    """Runs one job; `error` says why it failed, `received` what came."""

    def __init__(self, cluster: Cluster, job: Job, random: Random) -> None:
        self.job = job
        self.received: list[Token] = []
        self.error: PdserveError | None = None
        self.has_left = False  # of its own will
        self.records: list[RequestRecord] = []
        self.ended_at: float | None = None
        self._cluster = cluster
        self._random = random

    @property
    def is_complete(self) -> bool:
        """Whether the last token is here."""
        return bool(self.received) and self.received[-1].finish != ""

    async def run(self) -> None:
        """From the first attempt to the end."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self.job.at_s - loop.time())
        try:
            async with asyncio.timeout(self.job.patience_s):
                while not (self.is_complete or self.has_left or self.error):
                    await self._attempt(await self._router())
        except TimeoutError:
            self.has_left = True
        self.ended_at = loop.time()
        ending = "left" if self.has_left else f"failed: {self.error}" if self.error else "complete"
        self._cluster.note(f"job {self.job.number} {ending} after {len(self.received)} tokens")

    async def _router(self) -> RouterNode:
        while not self._cluster.routers:
            await asyncio.sleep(RETRY_S)
        name = self._random.choice(sorted(self._cluster.routers))
        return self._cluster.routers[name]

    async def _attempt(self, router: RouterNode) -> None:
        stream = router.host.spawn(self._stream(router), f"{router.host.name}: job {self.job.number}")
        try:
            await asyncio.wait((stream,))
        except asyncio.CancelledError:
            stream.cancel()
            raise
        if stream.cancelled():
            self._lose_last()
        elif (error := stream.exception()) is not None:
            if not isinstance(error, PdserveError):
                raise error
            self.error = error

    def _lose_last(self) -> None:
        """The router died: its last words may not have come through."""
        num_lost = self._random.choice((0, 0, 1, 2))
        del self.received[max(0, len(self.received) - num_lost) :]

    async def _stream(self, router: RouterNode) -> None:
        record = RequestRecord(arrived=asyncio.get_running_loop().time())
        self.records.append(record)
        work = self.job.work.resumed([token.token_id for token in self.received])
        async with closing(router.pipeline.generate(work, self.job.priority, record)) as tokens:
            async for token in tokens:
                self.received.append(token)
                if len(self.received) == self.job.leaves_after:
                    self.has_left = True
                    return
