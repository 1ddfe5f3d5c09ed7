"""A client that reconnects: against the real service, through a wire that can be cut."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from cluster.resumable import Limits, _Kept, generate
from pdserve.errors import PdserveError, QueueFull, Unavailable
from pdserve.request import Token, WorkRequest
from pdserve.v1 import generation_pb2 as pb
from router.record import RequestRecord
from tests.unit.router.served import Script, Served, deltas, failing, serving, text_of, tokens_of

TEXT = "the café 👩 and then END"
LIMITS = Limits(timeout_s=20)
REQUEST = pb.GenerateRequest(text="hello", stopping=pb.Stopping(stop=["n END"]))


class Wire:
    """A proxy in front of a server."""

    def __init__(self, behind: str) -> None:
        self.address = ""
        self._behind = behind
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection(*self._behind.split(":"))
        self._writers += [writer, back_writer]
        await asyncio.gather(_copy(reader, back_writer), _copy(back_reader, writer), return_exceptions=True)

    def cut(self) -> None:
        """End all connections; new ones may come."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)


@asynccontextmanager
async def wire_to(served: Served) -> AsyncIterator[Wire]:
    wire = Wire(served.address)
    server = await asyncio.start_server(wire.connect, "127.0.0.1", 0)
    wire.address = "127.0.0.1:" + str(server.sockets[0].getsockname()[1])
    yield wire
    wire.cut()
    server.close()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path) as running:
        running.pipeline.clean_up_s = 0
        yield running


@pytest.fixture
async def wire(served: Served) -> AsyncIterator[Wire]:
    async with wire_to(served) as running:
        yield running


async def read(
    address: str, limits: Limits = LIMITS, request: pb.GenerateRequest = REQUEST
) -> list[pb.GenerateResponse]:
    async with asyncio.timeout(15):
        return [response async for response in generate(address, request, limits)]


async def failure(address: str, limits: Limits = LIMITS, request: pb.GenerateRequest = REQUEST) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(address, limits, request)
    return caught.value.code()


def breaking(ids: Sequence[int], after: int, *breaks: Callable[[], None] | PdserveError) -> Script:
    """Each attempt but the last yields so many tokens, and then is cut off or raises."""
    left = list(breaks)

    async def script(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        async for token in tokens_of(ids)(work, record):
            if left and token.number - work.num_emitted >= after:
                fault = left.pop(0)
                if isinstance(fault, PdserveError):
                    raise fault
                asyncio.get_running_loop().call_later(0.05, fault)  # what was written has arrived
                await asyncio.Event().wait()
            yield token

    return script


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_a_stream_that_breaks_again_and_again_is_one_answer(served: Served, wire: Wire, after: int) -> None:
    ids = served.text.encode(TEXT)
    served.pipeline.script = breaking(ids, after, wire.cut, wire.cut, wire.cut)
    responses = await read(wire.address)
    assert [each.WhichOneof("event") for each in responses].count("started") == 1
    assert text_of(responses) == TEXT.removesuffix("n END")
    assert [token_id for delta in deltas(responses) for token_id in delta.token_ids] == ids
    assert responses[-1].finished.usage.resumes == (3 if after else 1)  # without a response between, it is one break
    first, *_, last = served.pipeline.work
    assert last.sampling.seed == responses[0].started.seed
    assert last.num_emitted == 3 * after
    assert (first.label == last.label) == bool(after)


async def test_a_server_that_is_started_again_on_its_port(tmp_path: Path) -> None:
    async def halting(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        async for token in tokens_of(ids[:8])(work, record):
            yield Token(token.number, token.token_id)
        await asyncio.Event().wait()

    async with serving(tmp_path) as served:
        ids, port = served.text.encode(TEXT), int(served.address.rpartition(":")[2])
        served.pipeline.script = halting
        answer = generate(served.address, REQUEST, LIMITS)
        responses = [await anext(answer) for _ in range(9)]
    async with serving(tmp_path, port) as again:
        again.pipeline.script = tokens_of(ids)
        responses += [response async for response in answer]
        assert again.pipeline.work[0].num_emitted == 8
    assert text_of(responses) == TEXT.removesuffix("n END")


async def test_a_router_that_says_it_is_shutting_down_is_a_break(tmp_path: Path) -> None:
    stop = asyncio.Event()

    async def stopped(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        yield Token(0, ids[0])
        await stop.wait()
        raise Unavailable("the router is shutting down, send the request again")

    async with serving(tmp_path) as served:
        ids, port = served.text.encode(TEXT), int(served.address.rpartition(":")[2])
        served.pipeline.script = stopped
        answer = generate(served.address, REQUEST, LIMITS)
        responses = [await anext(answer) for _ in range(2)]
        stopping = asyncio.create_task(served.server.stop(5))
        await asyncio.sleep(0.1)
        stop.set()
        rest = asyncio.create_task(_rest(answer))
        await stopping
    async with serving(tmp_path, port) as again:
        again.pipeline.script = tokens_of(ids)
        responses += await rest
    assert text_of(responses) == TEXT.removesuffix("n END")


async def _rest(answer: AsyncIterator[pb.GenerateResponse]) -> list[pb.GenerateResponse]:
    return [response async for response in answer]


async def test_nobody_there_is_no_break() -> None:
    assert await failure("127.0.0.1:1") is grpc.StatusCode.UNAVAILABLE


async def test_the_limits(served: Served, wire: Wire) -> None:
    served.pipeline.script = breaking([40, 41], 1, *[wire.cut] * 999)
    assert await failure(wire.address, Limits(resume_for_s=0)) is grpc.StatusCode.UNAVAILABLE
    served.pipeline.script = breaking([40, 41], 0, *[wire.cut] * 999)
    assert await failure(wire.address, Limits(resume_for_s=0.3)) is grpc.StatusCode.UNAVAILABLE
    assert await failure(wire.address, Limits(timeout_s=0.5)) is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_refusal_is_waited_out_only_after_a_break(served: Served, wire: Wire) -> None:
    refusals = [Unavailable("no worker serves toy yet"), QueueFull("full", 1.0)]
    served.pipeline.script = breaking([40, 41], 0, wire.cut, *refusals)
    assert len(deltas(await read(wire.address))) == 2
    for refusal in refusals:
        served.pipeline.script = failing(refusal)
        assert (await failure(wire.address)).name == refusal.status


async def test_a_router_that_gives_up_has_the_last_word(served: Served, wire: Wire) -> None:
    """A request that kills every worker it meets must not be sent again by its client."""
    served.pipeline.script = breaking([40] * 9, 2, wire.cut, Unavailable("given up after 8 attempts"))
    assert await failure(wire.address) is grpc.StatusCode.UNAVAILABLE
    assert len(served.pipeline.work) == 2


async def test_what_can_never_be_served_is_final(served: Served) -> None:
    request = pb.GenerateRequest(text="x", top_logprobs=99)
    assert await failure(served.address, request=request) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_resumed_request_can_break_too(served: Served, wire: Wire) -> None:
    ids, length = served.text.encode(TEXT), len(served.text.encode("hello"))
    request = pb.GenerateRequest()
    request.CopyFrom(REQUEST)
    request.resume.CopyFrom(pb.Resume(token_ids=ids[:3], seed=4, model_fingerprint="f00d", prompt_tokens=length))
    served.pipeline.script = breaking(ids, 2, wire.cut)
    assert text_of(await read(wire.address, request=request)) == TEXT.removesuffix("n END")
    assert [work.num_emitted for work in served.pipeline.work] == [3, 5]


def test_scores_of_the_prompt_that_come_again_are_told_once() -> None:
    kept = _Kept(REQUEST, pb.Started(seed=1))
    first, second = (pb.PromptLogprobs(first_position=at, tokens=[pb.TopLogprobs()] * 3) for at in (1, 4))
    started = pb.GenerateResponse(started=pb.Started(seed=1))
    told = [kept.add(each) for each in (started, pb.GenerateResponse(prompt_logprobs=first))]
    assert kept.request().HasField("resume")
    told += [kept.add(pb.GenerateResponse(prompt_logprobs=each)) for each in (first, second)]
    assert told == [False, True, False, True]
