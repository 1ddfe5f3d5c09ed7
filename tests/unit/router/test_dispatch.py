"""How an attempt gets its legs: real room, policy and affinity, over workers that only say yes or no."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from pdserve.errors import InvalidRequest, LinkDown, NoCapacity, PdserveError, Unavailable
from pdserve.internal.v1 import worker_pb2
from pdserve.membership import Role, WorkerInfo
from pdserve.model_card import KvLayout, ModelCard
from pdserve.request import Incarnation, Sampling, WorkerId, WorkRequest
from router import dispatch
from router.dispatch import Dispatcher, Legs, Wish
from router.peers import DecodePeer, PrefillPeer
from router.rank import QueuedPrompt, QueuedPrompts, Rank
from router.waiting_room import WaitingRoom

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, page_tokens=16, dtype="float32", page_format="toy")


def info(id: str, role: Role) -> WorkerInfo:
    card = ModelCard("toy", 512, 512, (2,), "f", LAYOUT, exact=True)
    return WorkerInfo(WorkerId(id), role, Incarnation(f"{id}!"), "", 1, card)


class Client:
    """Of a worker of either role; as decode it answers `refusal`, or grants as many reservations as it has `room`."""

    def __init__(self) -> None:
        self.queued = QueuedPrompts()
        self.num_tickets = 0
        self.room = 10
        self.refusal: PdserveError = NoCapacity("full")
        self.asked: list[bool] = []  # whether for the whole
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    @asynccontextmanager
    async def reserve(self, request: WorkRequest, *, whole: bool) -> AsyncIterator[str]:
        self.asked.append(whole)
        await self.may_answer.wait()
        if self.num_tickets >= self.room:
            raise self.refusal
        self.num_tickets += 1
        try:
            yield "a ticket"
        finally:
            self.num_tickets -= 1


class Workers:
    """What a dispatcher reads of the directory: two of each role, all linked."""

    def __init__(self) -> None:
        self.clients = {id: Client() for id in ("p0", "p1", "d0", "d1")}
        beat = worker_pb2.WatchResponse(linked=["d0!", "d1!"])
        self.prefills = [PrefillPeer(info(id, "prefill"), self.clients[id], beat) for id in ("p0", "p1")]  # type: ignore[arg-type]
        self.decodes = [DecodePeer(info(id, "decode"), self.clients[id], beat) for id in ("d0", "d1")]  # type: ignore[arg-type]
        self.down_s = 0.0
        self.room = WaitingRoom(10)
        self.dispatcher = Dispatcher(self, self.room, chunk_tokens=64)  # type: ignore[arg-type]

    def down_for_s(self) -> float:
        return self.down_s

    async def admit(self, work: WorkRequest, priority: int = 0, *, beside: str = "") -> tuple[str, str]:
        async with self.admitted(work, priority, beside=beside) as legs:
            return ids(legs)

    @asynccontextmanager
    async def admitted(
        self, work: WorkRequest, priority: int = 0, *, resumes: bool = False, beside: str = ""
    ) -> AsyncIterator[Legs]:
        arrival = self.dispatcher.arrive(work, priority)
        wish = Wish(work, resumes, bool(beside), Incarnation(f"{beside}!"))
        async with asyncio.timeout(2), self.dispatcher.admit(wish, arrival) as legs:
            yield legs


def request(length: int = 40, max_tokens: int = 10, start: int = 0, emitted: int = 0) -> WorkRequest:
    return WorkRequest("", tuple(range(start, start + length + emitted)), length, Sampling(), max_tokens)


def ids(legs: Legs) -> tuple[str, str]:
    return legs.prefill.info.id, legs.decode.info.id if legs.decode else ""


@pytest.mark.parametrize(("max_tokens", "emitted"), [(1, 0), (5, 4)])
async def test_one_token_is_prefills_own(max_tokens: int, emitted: int) -> None:
    workers = Workers()
    async with workers.admitted(request(40, max_tokens, emitted=emitted)) as legs:
        assert ids(legs) == ("p0", "")
        assert legs.ticket is None
    assert workers.clients["d0"].asked == workers.clients["d1"].asked == []


@pytest.mark.parametrize("resumes", [False, True])
async def test_what_is_resumed_is_promised_the_whole(resumes: bool) -> None:
    workers = Workers()
    async with workers.admitted(request(40, 2), resumes=resumes) as legs:
        assert ids(legs) == ("p0", "d0")
        assert legs.ticket is not None
    assert workers.clients["d0"].asked == [resumes]


@pytest.mark.parametrize("refusal", [NoCapacity("full"), LinkDown("cut")])
async def test_who_refuses_is_not_asked_again_and_the_next_one_is(refusal: PdserveError) -> None:
    workers = Workers()
    workers.clients["d0"].room, workers.clients["d0"].refusal = 0, refusal
    async with workers.admitted(request()) as legs:
        assert ids(legs) == ("p0", "d1")
    assert [len(workers.clients[id].asked) for id in ("d0", "d1")] == [1, 1]


async def test_what_is_wrong_with_the_request_ends_the_wait() -> None:
    workers = Workers()
    workers.clients["d0"].room, workers.clients["d0"].refusal = 0, InvalidRequest("prompt", "too long")
    with pytest.raises(InvalidRequest):
        async with workers.admitted(request()):
            pass
    assert len(workers.room) == 0


async def test_where_all_are_full_it_waits_until_one_leaves() -> None:
    workers = Workers()
    workers.clients["d0"].room, workers.clients["d1"].room = 1, 0
    async with AsyncExitStack() as first:
        await first.enter_async_context(workers.admitted(request()))
        waiting = asyncio.create_task(workers.admit(request(start=100)))
        await asyncio.sleep(0.01)
        assert (waiting.done(), len(workers.room)) == (False, 1)
        assert [len(workers.clients[id].asked) for id in ("d0", "d1")] == [2, 1], "once in a turn"
        await first.aclose()
        assert await waiting == ("p0", "d0")
        assert len(workers.room) == 0


async def test_a_prompt_counts_as_queued_until_it_is_computed_or_given_up() -> None:
    workers = Workers()
    workers.prefills.pop()
    client = workers.clients["p0"]
    async with workers.admitted(request(40), resumes=True) as first:
        assert (client.queued.num_tokens, client.queued.num_resuming) == (40, 1)
        async with workers.admitted(request(50, start=100), resumes=True) as second:
            assert (client.queued.num_tokens, client.queued.num_resuming) == (90, 2)
            for _ in range(2):
                workers.dispatcher.computed(second)
                assert (client.queued.num_tokens, client.queued.num_resuming) == (40, 1)
        async with workers.admitted(request(7, start=200)):
            assert (client.queued.num_tokens, client.queued.num_resuming) == (47, 1)
        assert (client.queued.num_tokens, client.queued.num_resuming) == (40, 1)
        assert first.queued is not None
    assert (client.queued.num_tokens, client.queued.num_resuming) == (0, 0)


async def test_a_computed_prompt_lets_the_next_one_in() -> None:
    workers = Workers()
    workers.prefills.pop()
    async with workers.admitted(request(200)) as legs:
        waiting = asyncio.create_task(workers.admit(request(200, start=300)))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        workers.dispatcher.computed(legs)
        await waiting


async def test_a_short_or_urgent_prompt_is_not_stuck_behind_a_long_one_and_takes_no_pages_before_its_turn() -> None:
    workers = Workers()
    workers.prefills.pop()
    async with workers.admitted(request(200)):
        twin = asyncio.create_task(workers.admit(request(200, start=300)))
        await asyncio.sleep(0.01)
        assert not twin.done()
        assert await workers.admit(request(20, start=600)) == ("p0", "d1")
        assert await workers.admit(request(200, start=700), priority=-1) == ("p0", "d1")
        later = asyncio.create_task(workers.admit(request(20, start=800), priority=1))
        await asyncio.sleep(0.01)
        assert (twin.done(), later.done()) == (False, False)
        assert [len(workers.clients[id].asked) for id in ("d0", "d1")] == [1, 2]
    await asyncio.gather(twin, later)


async def test_what_is_known_of_a_prompt_makes_it_short() -> None:
    workers = Workers()
    workers.prefills.pop()
    async with workers.admitted(request(200)):
        pass
    async with workers.admitted(request(150, start=300)):
        assert await workers.admit(request(210)) == ("p0", "d1")


async def test_a_prompt_goes_where_its_beginning_is_known_and_counts_less_there() -> None:
    workers = Workers()
    nine = QueuedPrompt(Rank(0, True, 0, 0), 9)
    workers.clients["p0"].queued.add(nine)
    workers.clients["d0"].num_tickets = 9
    async with workers.admitted(request(40)) as legs:
        assert ids(legs) == ("p1", "d1")
    workers.clients["p0"].queued.discard(nine)
    workers.clients["d0"].num_tickets = 0
    async with workers.admitted(request(50)) as legs:
        assert ids(legs) == ("p1", "d1")
        assert workers.clients["p1"].queued.num_tokens == 50 - 32, "two whole pages of the first prompt are known"
    async with workers.admitted(replace(request(50), prompt_logprobs=0)):
        assert workers.clients["p1"].queued.num_tokens == 50, "a prompt that is scored is computed as a whole"
    async with workers.admitted(request(50, start=100)) as legs:
        assert ids(legs) == ("p0", "d0")


async def test_a_further_choice_goes_where_the_first_one_is_unless_there_is_no_room() -> None:
    workers = Workers()
    workers.clients["d1"].num_tickets = workers.clients["d1"].room = 9
    async with workers.admitted(request(), beside="d0") as legs:
        assert ids(legs) == ("p0", "d0")
    async with workers.admitted(request(), beside="d1") as legs:
        assert ids(legs) == ("p0", "d0")
    assert len(workers.clients["d1"].asked) == 1
    workers.clients["d1"].room = 10
    async with workers.admitted(request(), beside="d1") as legs:
        assert ids(legs) == ("p0", "d1")
    async with workers.admitted(request(), beside="gone") as legs:
        assert ids(legs) == ("p0", "d0")


@pytest.mark.parametrize("beside", ["", "d0"])
async def test_further_choices_ask_all_together_and_only_once_out_of_turn(beside: str) -> None:
    workers = Workers()
    client = workers.clients["d0"]
    client.may_answer.clear()
    workers.clients["d1"].room = client.room = 0
    asking = [asyncio.create_task(workers.admit(request(), beside=beside)) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert len(client.asked) == (3 if beside else 1)
    client.may_answer.set()
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in asking)
    assert len(client.asked) < 6, "then in turn"
    client.room = 1
    workers.room.poke()
    assert await asyncio.gather(*asking) == [("p0", "d0")] * 3


async def test_without_workers_waiting_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "NO_WORKER_LIMIT_S", 0.02)
    workers = Workers()
    workers.prefills.clear()
    waiting = asyncio.create_task(workers.admit(request()))
    await asyncio.sleep(0.1)
    assert not waiting.done(), "somebody serves, though nobody has room"
    workers.down_s = 0.03
    with pytest.raises(Unavailable, match=r"for 0\.02 s"):
        await waiting
    assert len(workers.room) == 0
