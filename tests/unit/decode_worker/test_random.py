"""Whatever is asked in whatever order: the ledger holds after every step, and at the end nothing is held."""

import itertools
import random
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from decode_worker.commands import Command, Decode, Drain, Expel, GaveUp, Release, Reserve, StepUpdate, StreamGone
from engine.batch import Chunk
from engine.load import Engine
from engine.runner import Runner
from pdserve.errors import InvalidRequest, LegFailed, NoCapacity, Preempted
from pdserve.request import Ticket, Token, WorkRequest
from tests.toy import toy_engine
from tests.unit.decode_worker.stage import Stage, work

POOLS = 8, 12  # pages: the oldest often sits out; the youngest often gives way
LENGTHS, MAX_TOKENS = (1, 1, 15, 16, 17, 33), (2, 20, 40, 100, 120, 150)
ORDERS = {
    "start": 20,
    "reserve": 4,
    "run": 20,
    "land": 8,
    "adopt": 4,
    "land again": 1,
    "release": 2,
    "give up": 1,
    "stream gone": 1,
}


@pytest.fixture(scope="module")
def engines(toy_folder: Path) -> list[Engine]:
    engines = [toy_engine(toy_folder, num_pages=num_pages) for num_pages in POOLS]
    return [replace(engine, runner=MarkingRunner(engine.runner.model, engine.cache)) for engine in engines]


class MarkingRunner(Runner):
    """Computes nothing, but writes where the model would: thousands of steps take seconds."""

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        for chunk in chunks:
            self._check(chunk)
            self.cache.pages[chunk.page_ids[chunk.start // 16]] += 1 + chunk.start
        return torch.zeros(len(chunks), self.model.config.vocab_size)


class Life:
    """A random life of a worker."""

    def __init__(self, engine: Engine, seed: int, reached: Counter[str]) -> None:
        self.stage = Stage(engine, max_batch=3)
        self._random = random.Random(seed)
        self._reached = reached
        self._tickets: list[tuple[Ticket, WorkRequest, bool, int]] = []
        self._known: dict[tuple[int, bytes], int] = {}  # published page and its hash: checksum

    def live(self) -> None:
        """One order after the other."""
        for order in self._random.choices(list(ORDERS), list(ORDERS.values()), k=60):
            self.obey(order)
        self.step(Drain(), Expel(LegFailed("over")))

    def step(self, *commands: Command) -> StepUpdate:
        """One step, and what must hold after it."""
        before = self.alive()
        update = self.stage.step(*commands)
        self._reached.update(type(failed.error).__name__ for failed in update.failed)
        whole = {ticket.counter for ticket, _, is_whole, _ in self._tickets if is_whole}
        preempted = {failed.counter for failed in update.failed if isinstance(failed.error, Preempted)}
        assert not preempted & whole
        assert not preempted & set(before[:1])
        assert sorted(ended.counter for ended in update.ended) == sorted(set(before) - set(self.alive()))
        self._check_published()
        return update

    def alive(self) -> list[int]:
        return [entry.number for entry in self.stage.worker.ledger().entries]

    def _check_published(self) -> None:
        """A page that others may find does not change."""
        pages, published = self.stage.engine.cache.pages, self.stage.worker._pool._hash_of.items()
        seen = {item: zlib.crc32(pages[item[0]].numpy().tobytes()) for item in published}
        assert all(self._known.get(item, crc) == crc for item, crc in seen.items())
        self._known = seen
        self._reached["sits out"] += any(entry.sits_out for entry in self.stage.worker._tickets.all())

    def obey(self, order: str) -> None:
        match order:
            case "reserve" | "start":
                ticket = self.reserve()
                if ticket and order == "start":
                    self.step(self.stage.rest(ticket), Decode(self._tickets[-1][-1], ticket, Token(0, 9)))
            case "run":
                for _ in range(self._random.randint(1, 40)):
                    self.step()
            case "stream gone":
                self.step(StreamGone(self._random.randrange(8)))
            case _ if self._tickets:
                self.on_ticket(order, *self._random.choice(self._tickets[-4:]))

    def reserve(self) -> Ticket | None:
        draw = self._random
        request = work(draw.choice(LENGTHS), draw.choice(MAX_TOKENS), start=3 + 100 * draw.randrange(4))
        whole, stream = draw.random() < 0.5, draw.randrange(8)
        outcome = self.step(Reserve(stream, 0, request, whole)).reserved[0].outcome
        if not isinstance(outcome, Ticket):
            assert isinstance(outcome, NoCapacity | InvalidRequest)
            return None
        self._reached["cached"] += outcome.cached_pages > 0
        self._tickets.append((outcome, request, whole, stream))
        return outcome

    def on_ticket(self, order: str, ticket: Ticket, request: WorkRequest, _: bool, stream: int) -> None:
        """Something happens to a ticket, which may be dead."""
        entry = self.stage.worker._tickets.find(ticket.counter)
        match order:
            case "land" if entry is not None and not entry.landing.is_complete:
                layers = range(2) if not entry.landing._block_layers else range(2, 3)
                self.step(self.stage.landed(ticket, entry.landing.num_landed, 1, layers))
            case "adopt":
                self.step(Decode(stream, ticket, Token(request.num_emitted, 9)))
            case "land again":
                self.step(self.stage.landed(ticket, 0, 1, range(3)))
            case "release":
                self.step(Release(stream, ticket))
            case "give up":
                self.step(GaveUp(ticket.counter, LegFailed("prefill gave up")))


def test_any_life(engines: list[Engine]) -> None:
    reached: Counter[str] = Counter()
    for seed, engine in itertools.product(range(6), engines):
        life = Life(engine, seed, reached)
        life.live()
        counts = life.stage.worker.page_counts()
        assert (counts.in_use, counts.promised, counts.free + counts.cached) == (0, 0, counts.total), f"seed {seed}"
        assert life.stage.worker.num_requests == 0
    wanted = ("Preempted", "ProtocolError", "UnknownTicket", "LegFailed", "sits out", "cached")
    assert all(reached[name] for name in wanted), f"these lives prove nothing: {reached}"


class Router:
    """Resumes what was pre-empted, before anything new."""

    def __init__(self, stage: Stage, requests: list[WorkRequest]) -> None:
        self._stage = stage
        self._new = requests
        self._resumed: list[WorkRequest] = []
        self._running: dict[int, tuple[WorkRequest, list[int], bool]] = {}
        self.num_left = len(requests)

    def step(self) -> None:
        """Start the first in line if it gets a ticket; one step of the worker."""
        waiting, whole = (self._resumed, True) if self._resumed else (self._new, False)
        if waiting and isinstance(ticket := self._stage.outcome(waiting[0], whole=whole), Ticket):
            request = waiting.pop(0)
            self._running[ticket.counter] = request, [9], whole
            self._stage.step(self._stage.rest(ticket), Decode(0, ticket, Token(request.num_emitted, 9)))
        self._stage.step()
        for update in self._stage.history:
            for emitted in update.emitted:
                self._running[emitted.counter][1].append(emitted.token.token_id)
                self.num_left -= bool(emitted.token.finish)
            for failed in update.failed:
                request, token_ids, was_whole = self._running.pop(failed.counter)
                assert isinstance(failed.error, Preempted)
                assert not was_whole
                self._resumed.append(request.resumed(token_ids))
        self._stage.history.clear()


@hypothesis.settings(max_examples=15)
@hypothesis.given(
    st.lists(
        st.tuples(st.sampled_from(LENGTHS), st.sampled_from([90, 120, 150]), st.integers(0, 3)), min_size=3, max_size=4
    )
)
def test_every_request_ends_however_little_room_there_is(
    engines: list[Engine], asked: list[tuple[int, int, int]]
) -> None:
    stage = Stage(engines[-1], max_batch=3)
    requests = [work(length, max_tokens, start=3 + 100 * start) for length, max_tokens, start in asked]
    router = Router(stage, [request for request in requests if request.max_length <= 16 * POOLS[-1]])
    for _ in range(500):
        router.step()
        if not router.num_left:
            break
    assert router.num_left == 0
    assert stage.worker.num_requests == 0
