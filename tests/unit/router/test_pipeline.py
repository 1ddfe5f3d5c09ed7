"""What the pipeline hands on and writes down, over legs that play back what a test says."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from pdserve.errors import LinkDown, PdserveError, Unavailable, WorkerLost
from pdserve.internal.v1 import worker_pb2
from pdserve.membership import Role, WorkerInfo
from pdserve.model_card import KvLayout, ModelCard
from pdserve.request import Candidate, Incarnation, Sampling, Scored, Ticket, Token, WorkerId, WorkRequest
from router.decode_client import Decoded, HeldTicket
from router.dispatch import Legs, Wish
from router.peers import DecodePeer, PrefillPeer
from router.pipeline import Pipeline
from router.prefill_client import Pushed, Sampled
from router.rank import Arrival
from router.record import RequestRecord

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, page_tokens=16, dtype="float32", page_format="toy")
WORK = WorkRequest("label", tuple(range(33)), 33, Sampling(seed=7), max_tokens=100)


def info(role: Role) -> WorkerInfo:
    card = ModelCard("toy", 512, 512, (2,), "f", LAYOUT, exact=True)
    return WorkerInfo(WorkerId(f"{role}-0"), role, Incarnation(role), "", 1, card)


@dataclass(frozen=True)
class Play:
    """One attempt: what prefill samples, what decode goes on with, and how it ends."""

    sampled: Sampled
    tokens: Sequence[Token] = ()
    error: PdserveError | None = None
    pushed: Pushed | None = None
    is_decoding: bool = True
    has_decode: bool = True
    scores: Sequence[Scored] = ()


class Player:
    """The dispatcher, and for each attempt its legs, their clients and the prefill call."""

    def __init__(self, *plays: Play) -> None:
        self._plays = list(plays)
        self.admitted: list[tuple[Wish, Arrival]] = []
        self.adopted: list[int] = []
        self.priorities: list[int] = []
        self.num_computed = 0

    def arrive(self, work: WorkRequest, priority: int) -> Arrival:
        return Arrival(priority, due=len(work.token_ids), place=5)

    @asynccontextmanager
    async def admit(self, wish: Wish, arrival: Arrival) -> AsyncIterator[Legs]:
        self.admitted.append((wish, arrival))
        self.play, beat = self._plays.pop(0), worker_pb2.WatchResponse()
        prefill = PrefillPeer(info("prefill"), self, beat)  # type: ignore[arg-type]
        if not self.play.has_decode:
            yield Legs(prefill, None, None)
            return
        ticket = Ticket(WorkerId("decode-0"), Incarnation("decode"), 1, cached_pages=1)
        failed = asyncio.get_running_loop().create_future()
        held = HeldTicket(ticket, "label", failed, asyncio.Queue(), self.play.is_decoding)
        yield Legs(prefill, DecodePeer(info("decode"), self, beat), held)  # type: ignore[arg-type]

    def computed(self, legs: Legs) -> None:
        self.num_computed += 1

    @asynccontextmanager
    async def prefill(self, work: WorkRequest, held: HeldTicket | None, priority: int) -> AsyncIterator["Player"]:
        self.priorities.append(priority)
        yield self

    @property
    def pushed(self) -> Pushed | None:
        return self.play.pushed

    @property
    def scores(self) -> Sequence[Scored]:
        return self.play.scores

    async def sampled(self) -> Sampled:
        return self.play.sampled

    def adopt(self, held: HeldTicket, first: Token) -> None:
        self.adopted.append(first.number)

    async def tokens(self, held: HeldTicket, first: Token) -> AsyncGenerator[Decoded, None]:
        for token in self.play.tokens:
            yield Decoded(token, token.number - first.number)
        if self.play.error:
            raise self.play.error


async def run(player: Player, work: WorkRequest = WORK) -> RequestRecord:
    """The request over all its attempts; every token comes once and in order."""
    record, pipeline = RequestRecord(arrived=0.0), Pipeline(player)  # type: ignore[arg-type]
    numbers = [token.number async for token in pipeline.generate(work, 3, record)]
    assert numbers == list(range(work.num_emitted, work.num_emitted + len(numbers)))
    assert pipeline.num_running == 0
    return record


def token(number: int, finish: str = "") -> Token:
    return Token(number, 50 + number, finish=finish)


async def test_attempts_add_up_and_the_first_one_counts() -> None:
    scores = [Scored(Candidate(7, -0.5), ())]
    player = Player(
        Play(Sampled(token(0), 17, 16), [token(1), token(2)], LinkDown("cut"), Pushed(1000, at=5.0), scores=scores),
        Play(Sampled(token(3), 4, 32), [token(4), token(5, "length")], pushed=Pushed(300, at=6.0)),
    )
    record = await run(player)
    assert (record.completion_tokens, record.resumes) == (6, 1)
    assert (record.computed_tokens, record.cached_tokens) == (21, 16)
    assert record.prompt_scores is scores
    assert (record.kv_bytes, record.kv_arrived, record.decode_steps) == (1300, 5.0, 4)
    assert (record.prefill, record.decode) == (info("prefill"), info("decode"))
    assert record.chosen is not None
    assert record.first_token is not None
    assert record.chosen <= record.first_token, "the first attempt's"
    assert [(len(wish.work.token_ids), wish.resumes) for wish, _ in player.admitted] == [(33, False), (36, True)]
    assert [arrival for _, arrival in player.admitted] == [Arrival(3, 33, 5)] * 2
    assert player.priorities == [3, 3]
    assert (player.adopted, player.num_computed) == ([0, 3], 2)


async def test_before_prefills_word_the_kv_that_had_to_cross_is_counted_once_decode_runs() -> None:
    player = Player(
        Play(Sampled(token(0), 33, 0), error=LinkDown("cut"), is_decoding=False),
        Play(Sampled(token(1), 34, 0), [token(2)], LinkDown("cut")),
        Play(Sampled(token(3), 36, 0), [token(4, "length")]),
    )
    record = await run(player)
    assert record.kv_bytes == (0 + 2 + 2) * LAYOUT.page_bytes  # three pages each, of which decode had one
    assert record.kv_arrived is not None
    assert record.kv_arrived == record.second_token


async def test_of_what_a_client_brings_along_only_the_prompt_counts_as_cached() -> None:
    work = WORK.resumed(range(20))
    record = await run(Player(Play(Sampled(token(20, "length"), 5, 48), has_decode=False)), work)
    assert (record.computed_tokens, record.cached_tokens, record.kv_bytes) == (5, 33, 0)
    assert record.decode is None


async def test_a_prefill_worker_that_goes_on_where_nobody_decodes_is_a_fault_of_the_attempt() -> None:
    record = await run(
        Player(
            Play(Sampled(token(0), 33, 0), has_decode=False),
            Play(Sampled(token(1, "length"), 1, 33), has_decode=False),
        )
    )
    assert (record.completion_tokens, record.resumes) == (2, 1)


async def test_a_further_choice_asks_to_be_where_the_first_one_is_now() -> None:
    lead = await run(Player(Play(Sampled(token(0), 33, 0), [token(1, "length")])))
    player = Player(Play(Sampled(token(0, "length"), 1, 32)))
    async for _ in Pipeline(player).generate(WORK, 3, RequestRecord(0.0, lead)):  # type: ignore[arg-type]
        pass
    assert [(wish.beside, wish.follows) for wish, _ in player.admitted] == [("decode", True)]


async def test_the_first_token_that_finishes_is_not_adopted() -> None:
    player = Player(Play(Sampled(token(0, "stop_token"), 33, 0), [token(1)]))
    record = await run(player)
    assert (record.completion_tokens, player.adopted) == (1, [])


async def test_what_failed_decides_how_often_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.recovery.BACK_OFF_S", (0.0,))
    player = Player(*(Play(Sampled(token(number), 1, 0), error=WorkerLost("gone")) for number in range(9)))
    with pytest.raises(Unavailable, match="after 5 attempts, the last one ended with: gone"):
        await run(player)
