"""The life of one request. Read this first.

    admit    a seat in the waiting room, then a prefill worker and a decode worker; decode promises room: a ticket
    prefill  the first token goes to the client the moment it is sampled, while the last KV still moves
    decode   adopts the ticket with that token, and runs the token loop as soon as it has all the KV

Leaving an attempt for any reason (client gone, stop string, deadline, fault) closes both legs: the prefill call is
cancelled and the ticket released, in every state. When it was the fault of a leg, the request resumes: a new attempt,
with the tokens emitted so far behind the prompt, goes on at the next token number.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from pdserve.errors import LegFailed
from pdserve.request import Token, WorkRequest
from router.decode_client import HeldTicket
from router.dispatch import Dispatcher, Legs, Wish
from router.prefill_client import PrefillCall
from router.rank import Arrival
from router.record import RequestRecord
from router.recovery import RESUMABLE, Recovery


class Pipeline:
    """Serves requests over the live workers."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._now = asyncio.get_running_loop().time
        self.num_running = 0

    async def generate(self, work: WorkRequest, priority: int, record: RequestRecord) -> AsyncGenerator[Token, None]:
        """Yield every token of the completion, numbered without a gap. Raises PdserveError."""
        arrival, recovery = self._dispatcher.arrive(work, priority), Recovery(work)
        while not recovery.is_finished:
            wish = _wish(recovery, record)
            try:
                async with aclosing(self._attempt(wish, arrival, record)) as tokens:
                    async for token in tokens:
                        recovery.take(token)
                        record.add_token(self._now())
                        yield token
            except RESUMABLE as error:
                await recovery.resume(error)
                record.resumes = recovery.num_resumes

    async def _attempt(self, wish: Wish, arrival: Arrival, record: RequestRecord) -> AsyncGenerator[Token, None]:
        """Yield tokens up to the last one."""
        async with (
            self._legs(wish, arrival, record) as legs,
            legs.prefill.client.prefill(wish.work, legs.ticket, arrival.priority) as call,
        ):
            first = await self._first(call, legs, wish.work, record)
            yield first
            if first.finish:
                return
            if legs.decode is None or legs.ticket is None:
                raise LegFailed(f"{legs.prefill.info.id} went on after {first}, which was to be the last token")
            steps_before = record.decode_steps
            try:
                async with aclosing(legs.decode.client.tokens(legs.ticket, first)) as steps:
                    async for step in steps:
                        record.decode_steps = steps_before + step.num_steps
                        yield step.token
            finally:
                self._note_kv(call, legs.ticket, wish.work, record)

    @asynccontextmanager
    async def _legs(self, wish: Wish, arrival: Arrival, record: RequestRecord) -> AsyncIterator[Legs]:
        async with self._dispatcher.admit(wish, arrival) as legs:
            record.chosen = record.chosen or self._now()
            record.prefill = legs.prefill.info
            record.decode = legs.decode.info if legs.decode else None
            self.num_running += 1
            try:
                yield legs
            finally:
                self.num_running -= 1

    async def _first(self, call: PrefillCall, legs: Legs, work: WorkRequest, record: RequestRecord) -> Token:
        """The first token of the attempt; decode may go on from it at once."""
        sampled = await call.sampled()
        self._dispatcher.computed(legs)
        if legs.decode is not None and legs.ticket is not None and not sampled.token.finish:
            legs.decode.client.adopt(legs.ticket, sampled.token)
        record.computed_tokens += sampled.computed_tokens
        if record.first_token is None:  # of the prompt alone: who resumes finds the tokens so far cached as well
            record.prompt_scores = call.scores
            record.cached_tokens = min(sampled.cached_tokens, work.prompt_length)
        return sampled.token

    def _note_kv(self, call: PrefillCall, held: HeldTicket, work: WorkRequest, record: RequestRecord) -> None:
        """What crossed the link; when decode was faster than prefill's word of it, what had to cross."""
        if call.pushed is not None:
            record.kv_bytes += call.pushed.kv_bytes
            record.kv_arrived = record.kv_arrived or call.pushed.at
        elif held.is_decoding and record.prefill is not None:
            layout = record.prefill.card.kv_layout
            record.kv_bytes += (layout.pages_for(len(work.token_ids)) - held.ticket.cached_pages) * layout.page_bytes
            record.kv_arrived = record.kv_arrived or record.second_token


def _wish(recovery: Recovery, record: RequestRecord) -> Wish:
    lead = record.lead
    beside = lead.decode.incarnation if lead and lead.decode else None
    return Wish(recovery.work(), resumes=recovery.num_resumes > 0, follows=lead is not None, beside=beside)
