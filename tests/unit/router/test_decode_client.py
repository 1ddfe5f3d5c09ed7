"""The router's side of the decode stream, against a real gRPC server that says what the test tells it to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdserve import rpc
from pdserve.errors import NoCapacity, ProtocolError, WorkerLost
from pdserve.internal.v1 import decode_pb2, decode_pb2_grpc, worker_pb2
from pdserve.request import Sampling, Token, WorkerId, WorkRequest
from router.decode_client import DecodeClient, HeldTicket

REQUEST = WorkRequest("label", (1, 2, 3), 3, Sampling(), max_tokens=8)


class Script(decode_pb2_grpc.DecodeServiceServicer):
    """Keeps what the router says; says what the test puts."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[decode_pb2.ConnectRequest] = asyncio.Queue()
        self.say: asyncio.Queue[decode_pb2.ConnectResponse | None] = asyncio.Queue()

    async def Connect(
        self, request_iterator: AsyncIterator[decode_pb2.ConnectRequest], context: object
    ) -> AsyncIterator[decode_pb2.ConnectResponse]:
        hearing = asyncio.create_task(self._hear(request_iterator))
        try:
            while (message := await self.say.get()) is not None:
                yield message
        finally:
            hearing.cancel()

    async def _hear(self, requests: AsyncIterator[decode_pb2.ConnectRequest]) -> None:
        async for request in requests:
            self.heard.put_nowait(request)

    async def grant(self, counter: int) -> None:
        reserve = (await self.heard.get()).reserve
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
