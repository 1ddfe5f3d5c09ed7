"""Answers that end early: errors, deadlines, clients that leave, and clients that do not read."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pdserve import rpc
from pdserve.errors import QueueFull, WorkerLost
from pdserve.request import Candidate, Token, WorkRequest
from pdserve.v1 import generation_pb2 as pb
from router.record import RequestRecord
from tests.unit.router.served import Served, detail, endless, failing, failure


def partial_output(error: grpc.aio.AioRpcError) -> str | None:
    """`delivered_tokens` of the detail that says so."""
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # the stubs know only the synchronous call
    for each in status.details:
        if each.Unpack(info) and info.reason == "PARTIAL_OUTPUT":
            return str(info.metadata["delivered_tokens"])
    return None


async def test_a_full_queue_says_when_to_come_back(served: Served) -> None:
    served.pipeline.script = failing(QueueFull("the queue is full", retry_after_s=1.5))
    error = await failure(served.generate())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 1500


async def test_a_worker_lost_midway(served: Served) -> None:
    served.pipeline.script = failing(WorkerLost("decode-0 died"), after=2)
    error = await failure(served.generate())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert error.details() == "decode-0 died; 2 tokens were delivered: `resume` goes on from there"
    assert isinstance(rpc.error_of(error), WorkerLost)
    assert partial_output(error) == "2"
    assert dict(error.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "-1"
    assert served.pipeline.closed.is_set()


async def test_before_the_first_delta_an_error_may_be_retried(served: Served) -> None:
    served.pipeline.script = failing(WorkerLost("decode-0 died"))
    error = await failure(served.generate())
    assert error.details() == "decode-0 died"
    assert partial_output(error) is None
    assert "grpc-retry-pushback-ms" not in dict(error.trailing_metadata() or ())


async def test_tokens_that_the_client_brought_along_count_as_delivered(served: Served) -> None:
    async def two_more(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        for number in range(work.num_emitted, work.num_emitted + 2):
            yield Token(number, 40)
        raise WorkerLost("decode-0 died")

    served.pipeline.script = two_more
    resume = pb.Resume(token_ids=[40] * 3, model_fingerprint="f00d", prompt_tokens=len(served.text.encode("hello")))
    assert partial_output(await failure(served.generate(resume=resume))) == "5"


async def test_an_unforeseen_error_is_internal_and_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    served.pipeline.script = failing(ZeroDivisionError("secret"), after=1)
    with caplog.at_level(logging.ERROR, logger="router.service"):
        error = await failure(served.generate(request_id="mine"))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(error.details())
    assert "mine" in str(error.details())
    assert any("mine" in record.getMessage() and record.exc_info for record in caplog.records)


async def test_tokens_that_end_without_a_reason_are_internal(served: Served) -> None:
    served.play("ab", finish="")
    assert (await failure(served.generate())).code() is grpc.StatusCode.INTERNAL


async def test_a_deadline_closes_the_pipeline(served: Served) -> None:
    served.pipeline.script = endless
    call = served.stub.Generate(pb.GenerateRequest(text="x", stopping=pb.Stopping(max_tokens=50)), timeout=0.3)

    async def read() -> None:
        async for _ in call:
            pass

    assert (await failure(read())).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(served.pipeline.closed.wait(), 5)


async def test_cancelling_closes_the_pipeline(served: Served) -> None:
    served.pipeline.script = endless
    call = served.stub.Generate(pb.GenerateRequest(text="x"))
    async for response in call:
        if response.HasField("delta"):
            break
    call.cancel()
    await asyncio.wait_for(served.pipeline.closed.wait(), 5)


async def test_cancelling_before_the_first_token(served: Served) -> None:
    async def silent(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        await asyncio.Event().wait()
        yield Token(0, 0)

    served.pipeline.script = silent
    call = served.stub.Generate(pb.GenerateRequest(text="x"))
    reading = asyncio.ensure_future(call.read())
    await served.pipeline.begun.wait()
    call.cancel()
    await asyncio.wait_for(served.pipeline.closed.wait(), 5)
    reading.cancel()


async def test_a_client_that_does_not_read_stops_the_pulling(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    wide = (Candidate(40, -1.0),) * 4000

    async def broad(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        for number in range(20_000):
            yield Token(number, 40, wide, logprob=-1.0)

    served.pipeline.script = broad
    call = served.stub.Generate(pb.GenerateRequest(text="x", top_logprobs=20))
    await call.read()
    pulled = -1
    while pulled != served.pipeline.yielded:
        pulled = served.pipeline.yielded
        await asyncio.sleep(0.5)
    assert pulled < 20_000
    call.cancel()  # the blocked write fails, and then the handler is cancelled
    await asyncio.wait_for(served.pipeline.closed.wait(), 5)
    assert not caplog.records


async def test_deadlines_and_cancels_at_once_leave_nothing_open(served: Served) -> None:
    served.pipeline.script = endless

    async def one(index: int) -> None:
        call = served.stub.Generate(pb.GenerateRequest(text="x"), timeout=0.05 + index * 0.003)
        if index % 2:
            asyncio.get_running_loop().call_later(0.05 + index * 0.003, call.cancel)
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            async for _ in call:
                pass

    await asyncio.gather(*map(one, range(40)))
    await asyncio.wait_for(served.pipeline.clean.wait(), 5)
    assert served.pipeline.num_open == 0


async def test_deadlines_that_cut_answers_off_anywhere_are_no_errors_of_ours(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    served.pipeline.script = endless
    served.pipeline.clean_up_s = 0.0

    async def one(index: int) -> grpc.StatusCode:
        call = served.stub.Generate(pb.GenerateRequest(text="x"), timeout=0.001 + 0.049 * index / 400)
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        return await call.code()

    for start in range(20):
        codes = await asyncio.gather(*map(one, range(start, 400, 20)))
        assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}
    async with asyncio.timeout(5):
        while served.pipeline.num_open:  # on a busy machine none may have begun
            await asyncio.sleep(0.01)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
