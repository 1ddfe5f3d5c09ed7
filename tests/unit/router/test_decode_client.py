"""The router's side of the decode stream, against a real gRPC server that says what the test tells it to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio
import pytest

from pdserve import rpc
from pdserve.errors import LinkDown, NoCapacity, Preempted, ProtocolError, WorkerLost
from pdserve.internal.v1 import decode_pb2, decode_pb2_grpc, worker_pb2
from pdserve.request import Sampling, Token, WorkerId, WorkRequest
from pdserve.wire import request_to_wire
from router.decode_client import DecodeClient, HeldTicket

REQUEST = WorkRequest("label", (1, 2, 3), 3, Sampling(), max_tokens=8)


class Script(decode_pb2_grpc.DecodeServiceServicer):
    """Keeps what the router says; says what the test puts."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[decode_pb2.ConnectRequest] = asyncio.Queue()
        self.say: asyncio.Queue[decode_pb2.ConnectResponse | None] = asyncio.Queue()
        self.metadata: dict[str, object] = {}
        self.has_heard_all = asyncio.Event()

    async def Connect(
        self,
        request_iterator: AsyncIterator[decode_pb2.ConnectRequest],
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[decode_pb2.ConnectResponse]:
        self.metadata = dict(context.invocation_metadata() or ())
        hearing = asyncio.create_task(self._hear(request_iterator))
        try:
            while (message := await self.say.get()) is not None:
                yield message
        finally:
            hearing.cancel()

    async def _hear(self, requests: AsyncIterator[decode_pb2.ConnectRequest]) -> None:
        async for request in requests:
            self.heard.put_nowait(request)
        self.has_heard_all.set()

    async def grant(self, counter: int) -> None:
        self.answer((await self.heard.get()).reserve, counter)

    def answer(self, reserve: decode_pb2.Reserve, counter: int) -> None:
        ticket = worker_pb2.Ticket(worker="decode-0", incarnation="inc", counter=counter)
        self.say.put_nowait(
            decode_pb2.ConnectResponse(reserved=[decode_pb2.Reserved(call=reserve.call, ticket=ticket)])
        )

    def tokens(self, counter: int, *numbers: int, finish: str = "") -> None:
        tokens = [worker_pb2.Token(number=number, token_id=100 + number) for number in numbers]
        tokens[-1].finish = finish
        batch = decode_pb2.TicketTokens(counter=counter, tokens=tokens, decode_steps=len(tokens))
        self.say.put_nowait(decode_pb2.ConnectResponse(tokens=[batch]))


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[DecodeClient, Script]]:
    script, server = Script(), rpc.server()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(script, server)
    port = rpc.listen(server, "127.0.0.1", 0)
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        client = DecodeClient(WorkerId("decode-0"), "router-7", channel)
        running = asyncio.create_task(client.run())
        running.add_done_callback(
            lambda done: client.fail(WorkerLost(str(done.exception() if not done.cancelled() else "")))
        )
        try:
            yield client, script
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    await server.stop(0)


async def collect(client: DecodeClient, ticket: HeldTicket) -> list[int]:
    client.adopt(ticket, Token(0, 100))
    return [step.token.token_id async for step in client.tokens(ticket, Token(0, 100))]


async def test_reserve_decode_release_in_order() -> None:
    async with connected() as (client, script):
        granting = asyncio.create_task(script.grant(5))
        async with client.reserve(REQUEST, whole=False) as ticket:
            await granting
            assert (ticket.ticket.counter, ticket.ticket.incarnation) == (5, "inc")
            assert client.held_tickets() == [(ticket.ticket, "label")]
            script.tokens(5, 1, 2)
            script.tokens(5, 3, finish="length")
            assert await collect(client, ticket) == [101, 102, 103]
            assert client.held_tickets() == []  # the worker has ended it by itself
        assert (await script.heard.get()).decode.first.token_id == 100
        assert (await script.heard.get()).release.ticket.counter == 5
        assert client.num_tickets == 0


async def test_a_gap_in_the_token_numbers_is_an_error() -> None:
    async with connected() as (client, script):
        granting = asyncio.create_task(script.grant(5))
        async with client.reserve(REQUEST, whole=False) as ticket:
            await granting
            script.tokens(5, 1, 3)
            with pytest.raises(ProtocolError, match="token 3 came after token 1"):
                await collect(client, ticket)


async def test_a_refusal_is_the_workers_own_error() -> None:
    async with connected() as (client, script):

        async def refuse() -> None:
            call = (await script.heard.get()).reserve.call
            failure = worker_pb2.Failure(kind="NoCapacity", message="7 KV pages wanted")
            reserved = decode_pb2.Reserved(call=call, failure=failure)
            script.say.put_nowait(decode_pb2.ConnectResponse(reserved=[reserved]))

        refusing = asyncio.create_task(refuse())
        with pytest.raises(NoCapacity, match="7 KV pages"):
            async with client.reserve(REQUEST, whole=False):
                pass
        await refusing


async def test_when_the_stream_ends_everything_fails_at_once() -> None:
    async with connected() as (client, script):
        granting = asyncio.create_task(script.grant(5))
        async with client.reserve(REQUEST, whole=False) as ticket:
            await granting
            decoding = asyncio.create_task(collect(client, ticket))
            reserving = asyncio.create_task(client.reserve(REQUEST, whole=False).__aenter__())
            await asyncio.sleep(0.05)
            script.say.put_nowait(None)
            for task in (decoding, reserving):
                with pytest.raises(WorkerLost):
                    await asyncio.wait_for(task, 2)
        with pytest.raises(WorkerLost):
            async with client.reserve(REQUEST, whole=False):
                pass


async def test_a_ticket_granted_to_somebody_who_left_is_released() -> None:
    async with connected() as (client, script):
        reserving = asyncio.create_task(client.reserve(REQUEST, whole=False).__aenter__())
        reserve = await script.heard.get()
        reserving.cancel()
        await asyncio.gather(reserving, return_exceptions=True)
        ticket = worker_pb2.Ticket(worker="decode-0", incarnation="inc", counter=9)
        reserved = decode_pb2.Reserved(call=reserve.reserve.call, ticket=ticket)
        script.say.put_nowait(decode_pb2.ConnectResponse(reserved=[reserved]))
        assert (await asyncio.wait_for(script.heard.get(), 2)).release.ticket.counter == 9


async def test_what_a_worker_hears_of_a_reservation() -> None:
    async with connected() as (client, script), AsyncExitStack() as stack:
        reservations = [client.reserve(REQUEST, whole=whole) for whole in (False, True)]
        asking = [asyncio.create_task(stack.enter_async_context(each)) for each in reservations]
        first, second = [(await script.heard.get()).reserve for _ in asking]
        assert (first.whole, second.whole) == (False, True)
        assert first.request == second.request == request_to_wire(REQUEST)
        assert client.num_tickets == 2
        script.answer(second, 8)
        script.answer(first, 6)
        assert [(await task).ticket.counter for task in asking] == [6, 8], "whoever asked gets the answer"
        assert client.num_tickets == 2
        assert script.metadata["pdserve-router"] == "router-7"


async def test_a_ticket_that_fails_ends_with_the_workers_own_error_and_no_other() -> None:
    async with connected() as (client, script):
        granting = asyncio.gather(script.grant(5), script.grant(6))
        async with client.reserve(REQUEST, whole=False) as failed, client.reserve(REQUEST, whole=False) as other:
            await granting
            failure = worker_pb2.Failure(kind="Preempted", message="gives way")
            failures = [decode_pb2.TicketFailure(counter=counter, failure=failure) for counter in (77, 5)]
            script.say.put_nowait(decode_pb2.ConnectResponse(failures=failures))
            with pytest.raises(Preempted, match="gives way"):
                await collect(client, failed)
            assert client.held_tickets() == [(other.ticket, "label")]
            script.tokens(77, 1)  # of a ticket that is released
            script.tokens(6, 1, 2, finish="length")
            steps = [step.num_steps async for step in client.tokens(other, Token(0, 100))]
            assert steps == [2, 2]
            assert (other.is_decoding, other.is_finished, failed.is_decoding) == (True, True, False)
        assert failed.failed.result().args == ("gives way",)
        assert other.failed.cancelled()


async def test_a_ticket_granted_just_as_its_owner_leaves_is_released() -> None:
    async with connected() as (client, script):
        reserving = asyncio.create_task(client.reserve(REQUEST, whole=False).__aenter__())
        await script.grant(9)
        while client.held_tickets() == []:
            await asyncio.sleep(0)
        reserving.cancel()  # it has its answer, but has not run since
        await asyncio.gather(reserving, return_exceptions=True)
        assert (await asyncio.wait_for(script.heard.get(), 2)).release.ticket.counter == 9
        assert client.num_tickets == 0


async def test_a_lost_worker_hears_nothing_more() -> None:
    async with connected() as (client, script):
        granting = asyncio.create_task(script.grant(5))
        async with client.reserve(REQUEST, whole=False) as ticket:
            await granting
            ticket.lose_prefill(LinkDown("the first error stays"))
            client.fail(WorkerLost("no beat"))
            assert isinstance(await ticket.failed, LinkDown)
            assert ticket.items.qsize() == 1
            assert client.held_tickets() == []
            await asyncio.wait_for(script.has_heard_all.wait(), 2)
