"""From the waiting room to a pair of workers: choose, reserve, and hold the reservation for as long as it is used."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from pdserve.errors import LegFailed, NoCapacity, Unavailable
from pdserve.request import Incarnation, WorkRequest
from router.affinity import Affinity, Prefix
from router.decode_client import HeldTicket
from router.directory import Directory
from router.peers import DecodePeer, PrefillPeer
from router.policy import Known, choose, open_prefills
from router.rank import Arrival, QueuedPrompt, Rank
from router.waiting_room import Seat, WaitingRoom

NO_WORKER_LIMIT_S = 30.0  # a restarted worker is back well before
BESIDE_TOKENS = 2**31  # what a worker counts as knowing that holds the prompt for another choice: more than any load


@dataclass(frozen=True)
class Wish:
    """What an attempt needs legs for."""

    work: WorkRequest
    resumes: bool  # an earlier attempt failed
    follows: bool = False  # another choice of the same request went ahead
    beside: Incarnation | None = None  # the decode worker that holds the prompt for that one


@dataclass(eq=False)
class Legs:
    """The workers of one attempt. Without a second token to make there is no decode leg."""

    prefill: PrefillPeer
    decode: DecodePeer | None
    ticket: HeldTicket | None
    queued: QueuedPrompt | None = None  # what counts as waiting on the prefill worker

    def occupy(self, prompt: QueuedPrompt) -> None:
        """Count the prompt as queued on the prefill worker."""
        self.queued = prompt
        self.prefill.client.queued.add(prompt)

    def vacate(self) -> None:
        """The prompt is computed, or given up; a second time is no error."""
        if self.queued is not None:
            self.prefill.client.queued.discard(self.queued)


class Dispatcher:
    """Finds legs for requests, in the order of the waiting room."""

    def __init__(self, directory: Directory, room: WaitingRoom, chunk_tokens: int) -> None:
        self._directory = directory
        self._room = room
        self._chunk_tokens = chunk_tokens
        self._affinity = Affinity()

    def arrive(self, work: WorkRequest, priority: int) -> Arrival:
        """A request comes for the first time; all its attempts are as old as this."""
        known = self._known(work)
        most = max((known(peer.info.incarnation) for peer in self._directory.prefills), default=0)
        return self._room.arrive(priority, _num_computed(work, most))

    @asynccontextmanager
    async def admit(self, wish: Wish, arrival: Arrival) -> AsyncIterator[Legs]:
        """Hold legs for the block. Raises QueueFull, Unavailable, InvalidRequest."""
        async with AsyncExitStack() as held:
            held.callback(self._room.poke)
            seat = self._room.enter(arrival, resumes=wish.resumes, follows=wish.follows)
            try:
                legs = await self._seize(seat, wish, held)
                self._note(legs, wish.work, seat.rank)
            finally:
                self._room.leave(seat)
            held.callback(legs.vacate)
            yield legs

    def computed(self, legs: Legs) -> None:
        """The prompt of these legs is computed: another one may go to the prefill worker."""
        legs.vacate()
        self._room.poke()

    async def _seize(self, seat: Seat, wish: Wish, held: AsyncExitStack) -> Legs:
        is_in = wish.follows and not wish.resumes  # the request has had its turn: its choices try once, all together
        while True:
            if not is_in:
                await self._turn(seat)
            is_in = False
            known = self._known(wish.work)
            prefills = open_prefills(self._directory.prefills, self._chunk_tokens, known, seat.rank)
            if wish.work.num_emitted + 1 >= wish.work.max_tokens:  # one token is prefill's own: it needs no decode leg
                if prefills:
                    return Legs(prefills[0], None, None)
            elif legs := await self._reserve(wish, prefills, known, held):
                return legs

    def _known(self, work: WorkRequest) -> Known:
        """What each worker has probably kept of the prompt."""
        if not self._directory.prefills:
            return lambda _: 0
        prefix = _prefix(work, self._directory.prefills[0])
        return lambda incarnation: self._affinity.known_tokens(prefix, incarnation)

    def _note(self, legs: Legs, work: WorkRequest, rank: Rank) -> None:
        """The prompt goes to these legs."""
        prefix = _prefix(work, legs.prefill)
        known_tokens = self._affinity.known_tokens(prefix, legs.prefill.info.incarnation)
        legs.occupy(QueuedPrompt(rank, _num_computed(work, known_tokens)))
        self._affinity.note(prefix, legs.prefill.info.incarnation)
        if legs.decode is not None:
            self._affinity.note(prefix, legs.decode.info.incarnation)

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

    async def _reserve(
        self, wish: Wish, prefills: list[PrefillPeer], known: Known, held: AsyncExitStack
    ) -> Legs | None:
        """Ask one decode worker after the other; None when all have refused for now."""
        refused: set[Incarnation] = set()
        while pair := choose(prefills, self._directory.decodes, _beside(wish, known), refused):
            prefill, decode = pair
            try:
                reservation = decode.client.reserve(wish.work, whole=wish.resumes)
                return Legs(prefill, decode, await held.enter_async_context(reservation))
            except (NoCapacity, LegFailed):
                refused.add(decode.info.incarnation)
        return None


def _beside(wish: Wish, known: Known) -> Known:
    return lambda incarnation: BESIDE_TOKENS if incarnation == wish.beside else known(incarnation)


def _prefix(work: WorkRequest, peer: PrefillPeer) -> Prefix:
    return Prefix(work.token_ids, peer.info.card.kv_layout.page_tokens)


def _num_computed(work: WorkRequest, known_tokens: int) -> int:
    """Tokens that a prefill worker computes which knows so many; all where they are to be scored."""
    return len(work.token_ids) - (0 if work.scores_prompt else known_tokens)
