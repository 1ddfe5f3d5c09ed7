"""A ticket that ends early is told to prefill, once; draining and expelling end what they should."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc.aio
import pytest
import torch

from decode_worker.commands import Command, Decode, Drain, Ended, Expel, GaveUp, Landed, Release, Reserve, StreamGone
from decode_worker.service import DecodeServicer, Receiver
from pdserve import rpc
from pdserve.errors import Draining, LegFailed, LinkDown
from pdserve.handover import PageRun
from pdserve.internal.v1 import decode_pb2, decode_pb2_grpc
from pdserve.ledger import LedgerEntry
from pdserve.request import Token
from pdserve.wire import request_to_wire
from tests.unit.decode_worker.stage import Slot, Stage, failures, work

StageOf = Callable[[int], Stage]
ALL = range(3)


@pytest.fixture
def stage(stage_of: StageOf) -> Stage:
    return stage_of(64)


def test_a_ticket_that_lacks_pages_is_aborted_however_it_ends(stage: Stage) -> None:
    tickets = [stage.reserve(work(40, 10, start=3 + 50 * n), stream=n) for n in range(5)]
    stage.step(*(stage.landed(ticket, 0, 1, ALL) for ticket in tickets))
    gave_up = LegFailed("prefill gave up: cancelled")
    update = stage.step(
        Release(0, tickets[0]),
        StreamGone(1),
        GaveUp(tickets[2].counter, gave_up),
        stage.landed(tickets[3], 0, 1, ALL),  # again
        Decode(4, tickets[4], Token(5, 9)),  # not the first token
        Release(0, tickets[0]),
        StreamGone(1),
        GaveUp(tickets[2].counter, gave_up),
    )
    assert [ended.counter for ended in update.ended] == [ticket.counter for ticket in tickets]
    assert all(ended.aborted for ended in update.ended)
    assert update.ended[2].aborted == str(gave_up)
    assert [failed.stream for failed in update.failed] == [2, 3, 4]
    assert not stage.step()


def test_a_ticket_that_has_all_its_pages_is_not(stage: Stage) -> None:
    released, ended = stage.reserve(work(40, 10)), stage.start(work(20, 3, start=100))
    update = stage.step(stage.rest(released), Release(0, released))
    assert update.emitted[0].token.finish == "length"
    assert update.ended == [Ended(released.counter, ""), Ended(ended.counter, "")]


def test_a_ticket_that_has_all_its_pages_needs_no_prefill_any_more(stage: Stage) -> None:
    ticket = stage.start(work(40, 10))
    assert not stage.step(GaveUp(ticket.counter, LegFailed("prefill gave up: it drains"))).failed
    assert stage.worker.is_live(ticket.counter)


def test_layers_that_lack_make_a_page_lack(stage: Stage) -> None:
    ticket = stage.reserve(work(10, 10))
    assert stage.step(stage.landed(ticket, 0, 1, range(2)), Release(0, ticket)).ended[0].aborted


def test_a_draining_worker_ends_its_work_and_takes_none(stage: Stage) -> None:
    running, reserved = stage.start(work(20, 10)), stage.reserve(work(20, 10, start=100))
    stage.step(Drain())
    assert isinstance(stage.outcome(work(4, 4)), Draining)
    assert isinstance(stage.outcome(work(4, 4), whole=True), Draining)
    stage.finish(running)
    stage.finish(reserved, stage.rest(reserved), Decode(0, reserved, Token(0, 9)))


def test_expel_fails_all_that_is_left(stage: Stage) -> None:
    tickets = [stage.start(work(20, 10)), stage.reserve(work(20, 10, start=100), stream=1)]
    update = stage.step(Expel(Draining("the limit has passed")))
    assert failures(update) == [(ticket.counter, Draining) for ticket in tickets]
    assert [failed.stream for failed in update.failed] == [0, 1]
    assert [bool(ended.aborted) for ended in update.ended] == [False, True]
    assert stage.worker.page_counts().in_use == stage.worker.page_counts().promised == 0


def test_a_prompt_on_its_way_is_a_request_and_nothing_queued(stage: Stage) -> None:
    stage.reserve(work(40, 10))
    assert (stage.worker.num_requests, stage.worker.queued_tokens) == (1, 0)


def test_the_ledger_names_every_ticket(stage: Stage) -> None:
    stage.finish(stage.start(work(33, 4)))
    running, landing = stage.start(work(33, 30)), stage.reserve(work(33, 30, start=100))
    stage.reserve(work(34, 60, start=3), whole=True)
    stage.step(stage.landed(landing, 0, 1, ALL), Decode(0, landing, Token(0, 9)))
    assert stage.worker.ledger().entries == (
        LedgerEntry(running.counter, "r3", "running", 3, 1, "router-0"),
        LedgerEntry(landing.counter, "r100", "landing", 1, 3, "router-0"),
        LedgerEntry(landing.counter + 1, "r3", "reserved", 2, 4, "router-0"),
    )
    stage.entry(landing).num_promised += 1
    assert stage.worker.ledger().problems != ()


class FakeOffer:
    """A payload that prefill announced."""

    def __init__(self, counter: int, *, is_down: bool = False) -> None:
        self.meta = PageRun(counter, 0, 1, 0, 3).pack()
        self.num_bytes = 4
        self.landed: asyncio.Future[Slot | None] = asyncio.get_running_loop().create_future()
        self.said: list[str] = []
        self._is_down = is_down

    def land(self) -> None:
        self.said.append("land")
        if self._is_down:
            self.landed.set_exception(LinkDown("cut"))

    def scrap(self, reason: str) -> None:
        self.said.append(f"scrap: {reason}")

    def abort(self, reason: str) -> None:
        self.said.append(f"abort: {reason}")


class FakeLinks:
    """Offers as the test makes them."""

    def __init__(self) -> None:
        self.fatal: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.queue: asyncio.Queue[FakeOffer] = asyncio.Queue()
        self.queue_of_ends: asyncio.Queue[tuple[bytes, str]] = asyncio.Queue()

    async def offers(self) -> AsyncIterator[FakeOffer]:
        while True:
            yield await self.queue.get()

    async def ends(self) -> AsyncIterator[tuple[bytes, str]]:
        while True:
            yield await self.queue_of_ends.get()

    async def close(self) -> None:
        """Nothing to close."""


class Reception:
    """A receiver, with tickets 1 and 2 alive."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.live = {1, 2}
        self.links = FakeLinks()
        self.receiver = Receiver(self.commands.append, self.live.__contains__, self.links)

    async def offer(self, counter: int, *, is_down: bool = False) -> FakeOffer:
        offer = FakeOffer(counter, is_down=is_down)
        await self.links.queue.put(offer)
        await asyncio.sleep(0.01)
        return offer


@pytest.fixture
async def reception() -> AsyncIterator[Reception]:
    reception = Reception()
    task = asyncio.create_task(reception.receiver.run())
    yield reception
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_prefill_is_told_once_on_the_link_of_the_newest_offer(reception: Reception) -> None:
    first, second, other = [await reception.offer(counter) for counter in (1, 1, 2)]
    reception.receiver.end(Ended(1, "its router is gone"))
    reception.receiver.end(Ended(1, "its router is gone"))
    assert first.said == ["land"]
    assert second.said == ["land", "abort: its router is gone"]
    assert other.said == ["land"]


async def test_what_had_all_its_pages_is_not_aborted_and_nothing_is_remembered(reception: Reception) -> None:
    offers = [await reception.offer(counter) for counter in (1, 2)]
    for counter in (1, 2):
        reception.receiver.end(Ended(counter, ""))
    assert [offer.said for offer in offers] == [["land"], ["land"]]
    assert reception.receiver._offers == {}


async def test_an_offer_for_a_dead_ticket_is_scrapped_and_aborted(reception: Reception) -> None:
    offer = await reception.offer(3)
    assert offer.said == ["scrap: the ticket is dead", "abort: the ticket is dead"]
    assert reception.receiver._offers == {}


async def test_landed_payloads_go_to_the_engine_and_a_lost_one_ends_nothing(reception: Reception) -> None:
    await reception.offer(2, is_down=True)
    offer, slot = await reception.offer(1), Slot(torch.zeros(4, dtype=torch.uint8))
    offer.landed.set_result(slot)
    await asyncio.sleep(0.01)
    assert reception.commands == [Landed(PageRun(1, 0, 1, 0, 3), slot)]


async def test_what_prefill_gave_up_can_be_resumed(reception: Reception) -> None:
    for meta, aborted in ((PageRun.whole(1).pack(), "cancelled"), (PageRun.whole(2).pack(), ""), (b"?", "odd")):
        await reception.links.queue_of_ends.put((meta, aborted))
    await asyncio.sleep(0.01)
    (gave_up,) = reception.commands
    assert isinstance(gave_up, GaveUp)
    assert (gave_up.counter, type(gave_up.error), str(gave_up.error)) == (1, LegFailed, "prefill gave up: cancelled")


async def test_a_routers_stream_and_its_end_become_commands(stage: Stage, reception: Reception) -> None:
    servicer, server = DecodeServicer(reception.commands.append, reception.receiver), rpc.server()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server)
    port = rpc.listen(server, "127.0.0.1", 0)
    await server.start()
    request = work(4, 4)
    reserve = decode_pb2.Reserve(call=7, request=request_to_wire(request), whole=True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        call = stub.Connect(metadata=(("pdserve-router", "router-7"),))
        await call.write(decode_pb2.ConnectRequest(reserve=reserve))
        async with asyncio.timeout(5):
            while not reception.commands:
                await asyncio.sleep(0.01)
        assert reception.commands == [Reserve(0, 7, request, True, "router-7")]
        offer = await reception.offer(1)
        update = stage.step(Reserve(0, 7, request, True, "router-7"))
        update.ended.append(Ended(1, "expelled"))
        servicer.deliver(update)
        answer = await call.read()
        assert isinstance(answer, decode_pb2.ConnectResponse)
        assert answer.reserved[0].call == 7
        assert offer.said == ["land", "abort: expelled"]
        call.cancel()
        async with asyncio.timeout(5):
            while len(reception.commands) < 2:
                await asyncio.sleep(0.01)
    assert reception.commands[1] == StreamGone(0)
    await server.stop(0)
