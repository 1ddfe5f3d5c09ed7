"""A client that reconnects: against the real service, over pipelines and servers that break."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import grpc.aio
import pytest

from cluster.resumable import Limits, generate
from pdserve.errors import PdserveError, QueueFull, WorkerLost
from pdserve.request import Token, WorkRequest
from pdserve.v1 import generation_pb2 as pb
from router.record import RequestRecord
from tests.unit.router.served import Script, Served, deltas, serving, text_of, tokens_of

TEXT = "the café 👩 and then END"
LIMITS = Limits(timeout_s=20)
REQUEST = pb.GenerateRequest(text="hello", stopping=pb.Stopping(stop=["n END"]))


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path) as running:
        running.pipeline.clean_up_s = 0
        yield running


async def read(
    served: Served, limits: Limits = LIMITS, request: pb.GenerateRequest = REQUEST
) -> list[pb.GenerateResponse]:
    return [response async for response in generate(served.address, request, limits)]


async def failure(served: Served, limits: Limits = LIMITS) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(served, limits)
    return caught.value.code()


def breaking(ids: Sequence[int], after: int, *errors: PdserveError) -> Script:
    """Each attempt but the last yields so many tokens, and then raises the next error."""
    left = list(errors)

    async def script(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        async for token in tokens_of(ids)(work, record):
            if left and token.number - work.num_emitted >= after:
                raise left.pop(0)
            yield token

    return script


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_a_stream_that_breaks_again_and_again_is_one_answer(served: Served, after: int) -> None:
    ids = served.text.encode(TEXT)
    served.pipeline.script = breaking(ids, after, *[WorkerLost("decode-0 died")] * 3)
    responses = await read(served)
    assert [each.WhichOneof("event") for each in responses].count("started") == 1
    assert text_of(responses) == TEXT.removesuffix("n END")
    assert [token_id for delta in deltas(responses) for token_id in delta.token_ids] == ids
    assert responses[-1].finished.usage.resumes == (3 if after else 1)  # in a row, they are one break
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


async def test_nobody_there_is_no_break(served: Served) -> None:
    async with asyncio.timeout(5):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [response async for response in generate("127.0.0.1:1", REQUEST, LIMITS)]
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_limits(served: Served) -> None:
    served.pipeline.script = breaking([40, 41], 1, *[WorkerLost("decode-0 died")] * 999)
    assert await failure(served, Limits(resume_for_s=0)) is grpc.StatusCode.UNAVAILABLE
    served.pipeline.script = breaking([40, 41], 0, *[WorkerLost("decode-0 died")] * 999)
    async with asyncio.timeout(5):
        assert await failure(served, Limits(resume_for_s=0.3)) is grpc.StatusCode.UNAVAILABLE
    async with asyncio.timeout(5):
        assert await failure(served, Limits(timeout_s=0.5)) is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_full_queue_is_waited_for_only_by_who_was_in_already(served: Served) -> None:
    full = QueueFull("full", 1.0)
    served.pipeline.script = breaking([40, 41], 0, full)
    assert await failure(served) is grpc.StatusCode.RESOURCE_EXHAUSTED
    served.pipeline.script = breaking([40, 41], 0, WorkerLost("decode-0 died"), full, full)
    assert len(deltas(await read(served))) == 2


async def test_what_can_never_be_served_is_final(served: Served) -> None:
    request = pb.GenerateRequest(text="x", top_logprobs=99)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(served, request=request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_resumed_request_can_break_too(served: Served) -> None:
    ids = served.text.encode(TEXT)
    length = len(served.text.encode("hello"))
    request = pb.GenerateRequest()
    request.CopyFrom(REQUEST)
    request.resume.CopyFrom(pb.Resume(token_ids=ids[:3], seed=4, model_fingerprint="f00d", prompt_tokens=length))
    served.pipeline.script = breaking(ids, 2, WorkerLost("decode-0 died"))
    assert text_of(await read(served, request=request)) == TEXT.removesuffix("n END")
    assert [work.num_emitted for work in served.pipeline.work] == [3, 5]
