"""The router's side of prefill calls, against a real gRPC server that says what the test tells it to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from pdserve import rpc
from pdserve.errors import LegFailed, LinkDown, NoCapacity, PdserveError, Preempted, Unavailable, WorkerLost
from pdserve.internal.v1 import prefill_pb2, prefill_pb2_grpc, worker_pb2
from pdserve.request import Candidate, Incarnation, Sampling, Scored, Ticket, Token, WorkerId, WorkRequest
from pdserve.wire import request_to_wire, scored_to_wire, ticket_to_wire
from router.decode_client import HeldTicket
from router.prefill_client import PrefillCall, PrefillClient, Sampled

REQUEST = WorkRequest("label", (1, 2, 3), 3, Sampling(seed=7), max_tokens=8)
TICKET = Ticket(WorkerId("decode-0"), Incarnation("inc"), 5, 2)
FIRST = prefill_pb2.Sampled(token=worker_pb2.Token(number=0, token_id=9, finish=""), computed_tokens=2, cached_tokens=1)
SAMPLED = prefill_pb2.PrefillResponse(sampled=FIRST)
SCORES = [Scored(Candidate(token_id, -0.5), (Candidate(4, -0.25),)) for token_id in (2, 3)]
PUSHED = prefill_pb2.PrefillResponse(pushed=prefill_pb2.Pushed(kv_bytes=77))


class Script(prefill_pb2_grpc.PrefillServiceServicer):
    """Keeps the calls; answers each with what the test puts, None ends it, an error fails it."""

    def __init__(self) -> None:
        self.heard: list[prefill_pb2.PrefillRequest] = []
        self.say: asyncio.Queue[prefill_pb2.PrefillResponse | PdserveError | None] = asyncio.Queue()
        self.left = asyncio.Event()

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        self.heard.append(request)
        try:
            while (message := await self.say.get()) is not None:
                if isinstance(message, PdserveError):
                    await rpc.abort(context, message)
                yield message
        finally:
            self.left.set()


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[PrefillClient, Script]]:
    script, server = Script(), rpc.server()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(script, server)
    port = rpc.listen(server, "127.0.0.1", 0)
    await server.start()
    async with asyncio.timeout(10), rpc.channel(f"127.0.0.1:{port}") as channel:
        yield PrefillClient(WorkerId("prefill-0"), channel), script
    await server.stop(0)


def held() -> HeldTicket:
    return HeldTicket(TICKET, "label", asyncio.get_running_loop().create_future(), asyncio.Queue())


async def until_pushed(call: PrefillCall) -> None:
    while call.pushed is None:
        await asyncio.sleep(0.005)


async def test_the_first_token_then_word_that_decode_has_it_all() -> None:
    async with connected() as (client, script):
        ticket, loop = held(), asyncio.get_running_loop()
        async with client.prefill(REQUEST, ticket, -3) as call:
            for scored in SCORES:
                scores = prefill_pb2.PromptScores(tokens=[scored_to_wire(scored)])
                script.say.put_nowait(prefill_pb2.PrefillResponse(scores=scores))
            script.say.put_nowait(SAMPLED)
            assert await call.sampled() == Sampled(Token(0, 9), computed_tokens=2, cached_tokens=1)
            assert call.scores == SCORES
            assert call.pushed is None
            before = loop.time()
            script.say.put_nowait(PUSHED)
            await until_pushed(call)
            assert call.pushed is not None
            assert call.pushed.kv_bytes == 77
            assert before <= call.pushed.at <= loop.time()
            script.say.put_nowait(None)
            await script.left.wait()
            await asyncio.sleep(0.02)
            assert not ticket.failed.done(), "the call has ended as it should"
        (heard,) = script.heard
        assert heard == prefill_pb2.PrefillRequest(
            request=request_to_wire(REQUEST), ticket=ticket_to_wire(TICKET), priority=-3
        )


async def test_without_a_second_token_there_is_no_ticket() -> None:
    async with connected() as (client, script), client.prefill(REQUEST, None) as call:
        script.say.put_nowait(SAMPLED)
        await call.sampled()
        script.say.put_nowait(None)
        await script.left.wait()
        assert not script.heard[0].HasField("ticket")


async def test_leaving_cancels_the_call() -> None:
    async with connected() as (client, script):
        async with client.prefill(REQUEST, None) as call:
            script.say.put_nowait(SAMPLED)
            await call.sampled()
            assert not script.left.is_set()
        await script.left.wait()


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        (NoCapacity("no pages"), NoCapacity, "no pages"),
        (Unavailable("not ready"), WorkerLost, "prefill-0: not ready"),
        (None, LegFailed, "prefill-0 ended the call early"),
    ],
)
async def test_a_call_that_ends_too_early_ends_the_ticket(
    said: PdserveError | None, kind: type[PdserveError], text: str
) -> None:
    async with connected() as (client, script):
        ticket = held()
        async with client.prefill(REQUEST, ticket) as call:
            script.say.put_nowait(said)
            with pytest.raises(kind, match=text):
                await call.sampled()
            error = await ticket.failed
            assert (type(error), ticket.items.get_nowait()) == (kind, error)


async def test_what_a_call_fails_with_later_is_no_loss_once_decode_has_the_kv() -> None:
    async with connected() as (client, script):
        tickets = held(), held()
        for ticket, is_decoding in zip(tickets, (False, True), strict=True):
            ticket.is_decoding = is_decoding
            async with client.prefill(REQUEST, ticket) as call:
                script.say.put_nowait(SAMPLED)
                await call.sampled()
                call.fail(LinkDown("cut"))
                assert (await call.sampled()).token.token_id == 9
            await script.left.wait()
            script.left.clear()
        assert [ticket.failed.done() for ticket in tickets] == [True, False]


async def test_what_ends_the_ticket_ends_the_call() -> None:
    async with connected() as (client, _):
        ticket = held()
        async with client.prefill(REQUEST, ticket) as call:
            ticket.fail(Preempted("gives way"))
            with pytest.raises(Preempted):
                await call.sampled()
        released = held()
        async with client.prefill(REQUEST, released) as call:
            released.failed.cancel()
            await asyncio.sleep(0.01)
            sampling = asyncio.ensure_future(call.sampled())
            await asyncio.sleep(0.01)
            assert not sampling.done(), "a release is no fault"
            sampling.cancel()


async def test_when_the_worker_is_lost_open_calls_fail_at_once_and_new_ones_are_refused() -> None:
    async with connected() as (client, _):
        async with client.prefill(REQUEST, None) as first, client.prefill(REQUEST, held()) as second:
            client.fail(WorkerLost("no beat"))
            for call in (first, second):
                with pytest.raises(WorkerLost, match="no beat"):
                    await call.sampled()
        with pytest.raises(WorkerLost, match="no beat"):
            async with client.prefill(REQUEST, None):
                pass


async def test_a_channel_that_is_closed_is_a_worker_lost() -> None:
    async with rpc.channel("127.0.0.1:1") as channel:
        client = PrefillClient(WorkerId("prefill-0"), channel)
    async with client.prefill(REQUEST, None) as call:
        with pytest.raises(WorkerLost, match="prefill-0"):
            await asyncio.wait_for(call.sampled(), 5)
