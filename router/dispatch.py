"""From the waiting room to a pair of workers: choose, reserve, and hold the reservation for as long as it is used."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from pdserve.errors import NoCapacity, Unavailable, WorkerLost
from pdserve.request import Incarnation, WorkRequest
from router.decode_client import HeldTicket
from router.directory import Directory
from router.peers import DecodePeer, PrefillPeer
from router.policy import choose, open_prefills
from router.waiting_room import Seat, WaitingRoom

NO_WORKER_LIMIT_S = 30.0  # a restarted worker is back well before


@dataclass(eq=False)
class Legs:
    """The workers of one attempt. Without a second token to make there is no decode leg."""

    prefill: PrefillPeer
    decode: DecodePeer | None
    ticket: HeldTicket | None
    num_waiting: int = 0  # prompt tokens that count as queued on the prefill worker

    def occupy(self, num_tokens: int) -> None:
        """Count the prompt as queued on the prefill worker."""
        self.num_waiting = num_tokens
        self.prefill.client.queued_tokens += num_tokens

    def vacate(self) -> None:
        """The prompt is computed, or given up; a second time is no error."""
        self.prefill.client.queued_tokens -= self.num_waiting
        self.num_waiting = 0


class Dispatcher:
    """Finds legs for requests, first come, first served within a priority."""

    def __init__(self, directory: Directory, room: WaitingRoom, chunk_tokens: int) -> None:
        self._directory = directory
        self._room = room
        self._chunk_tokens = chunk_tokens

    @asynccontextmanager
    async def admit(self, work: WorkRequest, priority: int) -> AsyncIterator[Legs]:
        """Hold legs for the block. Raises QueueFull, Unavailable, InvalidRequest, WorkerLost."""
        async with AsyncExitStack() as held:
            held.callback(self._room.poke)
            seat = self._room.enter(priority)
            try:
                legs = await self._seize(seat, work, held)
                legs.occupy(len(work.token_ids))
            finally:
                self._room.leave(seat)
            held.callback(legs.vacate)
            yield legs

    def computed(self, legs: Legs) -> None:
        """The prompt of these legs is computed: another one may go to the prefill worker."""
        legs.vacate()
        self._room.poke()

    async def _seize(self, seat: Seat, work: WorkRequest, held: AsyncExitStack) -> Legs:
        while True:
            await self._turn(seat)
            if work.num_emitted + 1 >= work.max_tokens:  # one token is prefill's own: it needs no decode worker
                if prefills := open_prefills(self._directory.prefills, self._chunk_tokens):
                    return Legs(prefills[0], None, None)
            elif legs := await self._reserve(work, held):
                return legs

    async def _turn(self, seat: Seat) -> None:
        """Wait for something to change while the seat is first. Raises Unavailable when nobody serves for long."""
        has_turn = False
        while not has_turn:
            with suppress(TimeoutError):
                async with asyncio.timeout(NO_WORKER_LIMIT_S):
                    await self._room.turn(seat)
                    has_turn = True
            if self._directory.down_for_s() > NO_WORKER_LIMIT_S:
                raise Unavailable(f"no prefill worker has reached a decode worker for {NO_WORKER_LIMIT_S:g} s")

    async def _reserve(self, work: WorkRequest, held: AsyncExitStack) -> Legs | None:
        """Ask one decode worker after the other; None when all have refused for now."""
        refused: set[Incarnation] = set()
        while pair := choose(self._directory.prefills, self._directory.decodes, self._chunk_tokens, refused):
            prefill, decode = pair
            try:
                return Legs(prefill, decode, await held.enter_async_context(decode.client.reserve(work)))
            except (NoCapacity, WorkerLost):
                refused.add(decode.info.incarnation)
        return None
