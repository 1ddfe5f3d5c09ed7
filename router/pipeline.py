"""The life of one request: reserve, prefill, decode. Read this first.

    admit    a seat in the waiting room, then a prefill worker and a decode worker; decode promises room: a ticket
    prefill  the first token comes the moment it is sampled, while the last KV still moves; then "pushed"
    decode   adopts the pages and runs the token loop

Leaving the function for any reason (client gone, stop string, deadline, fault) closes both legs: the prefill call is
cancelled and the ticket released, in every state.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from pdserve.errors import Unavailable
from pdserve.request import Token, WorkRequest
from router.dispatch import Dispatcher, Legs
from router.prefill_client import Pushed, Sampled
from router.record import RequestRecord


class Pipeline:
    """Serves requests over the live workers."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._now = asyncio.get_running_loop().time
        self.num_running = 0

    async def generate(self, work: WorkRequest, priority: int, record: RequestRecord) -> AsyncGenerator[Token, None]:
        """Yield every token of the completion, numbered without a gap. Raises PdserveError."""
        async with self._dispatcher.admit(work, priority) as legs:
            self.num_running += 1
            try:
                self._chosen(legs, record)
                first: Token | None = None
                async with aclosing(self._prefill(work, legs, record)) as tokens:
                    async for first in tokens:
                        yield first
                if first is None:
                    raise Unavailable(f"{legs.prefill.info.id} ended the call without a token")
                async with aclosing(self._decode(legs, first, record)) as tokens:
                    async for token in tokens:
                        yield token
            finally:
                self.num_running -= 1

    def _chosen(self, legs: Legs, record: RequestRecord) -> None:
        record.chosen = self._now()
        record.prefill = legs.prefill.info
        record.decode = legs.decode.info if legs.decode else None

    async def _prefill(self, work: WorkRequest, legs: Legs, record: RequestRecord) -> AsyncGenerator[Token, None]:
        """Yield the first token; ends when decode has all the KV."""
        async with aclosing(legs.prefill.client.prefill(work, legs.ticket)) as events:
            async for event in events:
                match event:
                    case Sampled(token, computed, cached):
                        self._dispatcher.computed(legs)
                        record.computed_tokens += computed
                        record.cached_tokens += cached
                        record.add_token(self._now())
                        yield token
                    case Pushed(kv_bytes, _):
                        record.kv_bytes += kv_bytes
                        record.kv_arrived = self._now()

    async def _decode(self, legs: Legs, first: Token, record: RequestRecord) -> AsyncGenerator[Token, None]:
        if legs.decode is None or legs.ticket is None:
            return
        async with aclosing(legs.decode.client.decode(legs.ticket, first)) as steps:
            async for step in steps:
                record.decode_steps = step.num_steps
                record.add_token(self._now())
                yield step.token
