"""Several choices of one request: told on one call, the first ahead of the others; one's error is the end of all."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2

from pdserve.errors import PdserveError, WorkerLost
from pdserve.request import Candidate, Scored, Token, WorkRequest
from pdserve.v1 import generation_pb2 as pb
from router.choices import seed_of
from router.record import RequestRecord
from tests.unit.router.served import Script, Served, detail, failing, failure, tokens_of
from tests.unit.router.test_service_ends import partial_output

SEED = 7
INDEX_OF = {SEED: 0} | {seed_of(SEED, index): index for index in range(1, 64)}
SAMPLING = pb.Sampling(seed=SEED)


def each(script: Callable[[int], Script]) -> Script:
    """Of each choice its own, known by its seed."""
    return lambda work, record: script(INDEX_OF[work.sampling.seed])(work, record)


def decoding(script: Script) -> Script:
    """As decode makes it: from the second token on."""

    async def steps(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        async for token in script(work, record):
            record.decode_steps = token.number
            yield token

    return steps


def text_of(responses: list[pb.GenerateResponse], index: int) -> str:
    return "".join(each.delta.text for each in responses if each.delta.index == index)


def indices(responses: list[pb.GenerateResponse], event: str) -> list[int]:
    return [getattr(each, event).index for each in responses if each.HasField(event)]  # type: ignore[arg-type]


async def test_each_choice_is_told_as_an_answer_of_its_own(served: Served) -> None:
    texts = ["the café", "x", "ab END"]
    served.pipeline.script = each(lambda index: decoding(tokens_of(served.text.encode(texts[index]))))
    stopping = pb.Stopping(stop=[" EN"], max_tokens=9)
    responses = await served.generate(n=3, sampling=SAMPLING, request_id="mine", stopping=stopping)
    assert indices(responses[:3], "started") == [0, 1, 2]
    assert [each.started.seed for each in responses[:3]] == [SEED, seed_of(SEED, 1), seed_of(SEED, 2)]
    assert {each.started.request_id for each in responses[:3]} == {"mine"}
    assert [text_of(responses, index) for index in range(3)] == ["the café", "x", "ab"]
    assert sorted(indices(responses, "finished")) == [0, 1, 2]
    finished = {each.finished.index: each.finished for each in responses if each.HasField("finished")}
    assert [finished[index].stop_match.WhichOneof("match") for index in range(3)] == [
        "max_tokens", "max_tokens", "stop_string",
    ]  # fmt: skip
    assert [finished[index].usage.completion_tokens for index in range(2)] == [
        len(served.text.encode(text)) for text in texts[:2]
    ]
    assert served.pipeline.num_open == 0


def test_the_seeds_formula_does_not_change() -> None:
    """Clients may have it built in: generation.proto says it."""
    assert [seed_of(7, 1), seed_of(2**64 - 1, 63)] == [14818979533484651488, 7109666355130649391]


async def test_the_others_wait_until_decode_has_the_prompt(served: Served) -> None:
    has_kv = asyncio.Event()

    async def script(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        yield Token(0, 40)
        yield Token(1, 40)  # a resume: prefill's again
        if record.lead is None:
            await has_kv.wait()
        record.decode_steps = 1
        yield Token(2, 40)
        yield Token(3, 40, finish="length")

    served.pipeline.script = script
    answer = aiter(served.stub.Generate(pb.GenerateRequest(text="x", n=3, sampling=SAMPLING)))
    begun = [await anext(answer) for _ in range(5)]
    assert len(served.pipeline.work) == 1
    has_kv.set()
    begun += [response async for response in answer]
    assert indices(begun, "started") == [0, 1, 2]
    assert sorted(indices(begun, "finished")) == [0, 1, 2]
    assert len(served.pipeline.work) == 3


async def test_a_first_choice_that_ends_at_its_first_token_lets_the_others_begin(served: Served) -> None:
    served.play("a")
    assert sorted(indices(await served.generate(n=4, stopping=pb.Stopping(max_tokens=1)), "finished")) == [0, 1, 2, 3]


async def test_the_prompt_is_scored_once(served: Served) -> None:
    async def script(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        record.prompt_scores = [Scored(Candidate(9, -1.5), ())] if work.scores_prompt else ()
        yield Token(0, 9, finish="length")

    served.pipeline.script = script
    events = [each.WhichOneof("event") for each in await served.generate(n=2, prompt_logprobs=0)]
    assert events[:3] == ["started", "started", "prompt_logprobs"]
    assert events.count("prompt_logprobs") == 1


async def test_times_count_from_the_requests_arrival(served: Served) -> None:
    async def script(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        await asyncio.sleep(0.05)
        record.chosen = asyncio.get_running_loop().time()
        yield Token(0, 9, finish="length")

    served.pipeline.script = script
    served.pipeline.clean_up_s = 0
    finished = [each.finished for each in await served.generate(n=2) if each.HasField("finished")]
    assert finished[1].timings.queue_ms >= 100 > finished[0].timings.queue_ms


@pytest.mark.parametrize("n", [0, -1, 65])
async def test_how_many(served: Served, n: int) -> None:
    error = await failure(served.generate(n=n))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == f"n: {n} is not allowed; must be 1 to 64"


async def test_a_resume_is_of_one_choice(served: Served) -> None:
    resume = pb.Resume(model_fingerprint="f00d", prompt_tokens=len(served.text.encode("hello")))
    assert "one request per unfinished choice" in str((await failure(served.generate(n=2, resume=resume))).details())
    served.play("a")
    assert len(await served.generate(n=1, resume=resume)) == 3


async def test_an_error_of_one_ends_all_and_says_what_was_delivered(served: Served) -> None:
    async def endless(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        record.decode_steps = 1
        for number in range(3):
            yield Token(number, 40)
        await asyncio.Event().wait()

    async def lost(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        async with asyncio.timeout(5):
            while served.pipeline.yielded < 9:  # all that the others have to say
                await asyncio.sleep(0.01)
        yield Token(0, 40)
        raise WorkerLost("decode-0 died")

    served.pipeline.script = each(lambda index: lost if index == 2 else endless)
    error = await failure(served.generate(n=4, sampling=SAMPLING))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert partial_output(error) == "10"
    assert len(served.pipeline.work) == 4
    assert served.pipeline.num_open == 0


async def test_an_error_of_the_first_before_its_first_token_is_the_requests(served: Served) -> None:
    served.pipeline.script = failing(PdserveError("no"))
    error = await failure(served.generate(n=4))
    assert (error.details(), partial_output(error), len(served.pipeline.work)) == ("no", None, 1)
    assert not detail(error, error_details_pb2.ErrorInfo).metadata.get("delivered_tokens")


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_client_that_leaves_and_a_deadline_end_all(served: Served, leaves: bool) -> None:
    async def endless(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        record.decode_steps = 1
        for number in range(100_000):
            yield Token(number, 10)
            await asyncio.sleep(0.002)

    served.pipeline.script = endless
    call = served.stub.Generate(pb.GenerateRequest(text="x", n=5), timeout=None if leaves else 0.4)

    async def read() -> None:
        async for _ in call:
            if leaves and len(served.pipeline.work) == 5:
                call.cancel()

    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await read()
    async with asyncio.timeout(5):
        await served.pipeline.clean.wait()
    assert len(served.pipeline.work) == 5


async def test_a_client_that_does_not_read_stops_the_pulling_of_all(served: Served) -> None:
    wide = (Candidate(40, -1.0),) * 4000

    async def broad(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        record.decode_steps = 1
        for number in range(20_000):
            yield Token(number, 40, wide, logprob=-1.0)

    served.pipeline.script = broad
    call = served.stub.Generate(pb.GenerateRequest(text="x", n=8, top_logprobs=20))
    await call.read()
    pulled = -1
    while pulled != served.pipeline.yielded:
        pulled = served.pipeline.yielded
        await asyncio.sleep(0.5)
    assert len(served.pipeline.work) <= pulled < 2_000
    call.cancel()
    async with asyncio.timeout(5):
        await served.pipeline.clean.wait()


async def test_an_error_while_the_client_does_not_read_is_told_when_it_does(served: Served) -> None:
    wide = (Candidate(40, -1.0),) * 4000
    may_fail = asyncio.Event()

    async def broad(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        record.decode_steps = 1
        for number in range(20_000):
            yield Token(number, 40, wide, logprob=-1.0)

    async def lost(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        await may_fail.wait()
        raise WorkerLost("decode-0 died")
        yield

    served.pipeline.script = each(lambda index: lost if index == 1 else broad)
    request = pb.GenerateRequest(text="x", n=3, sampling=SAMPLING, top_logprobs=20)
    call = served.stub.Generate(request, timeout=30)
    received, pulled = [await call.read()], -1
    while pulled != served.pipeline.yielded:
        pulled = served.pipeline.yielded
        await asyncio.sleep(0.3)
    may_fail.set()
    async with asyncio.timeout(5):
        await served.pipeline.clean.wait()

    async def read_on() -> None:
        while isinstance(message := await call.read(), pb.GenerateResponse):
            received.append(message)

    error = await failure(read_on())
    assert "decode-0 died" in str(error.details())
    told = sum(isinstance(each, pb.GenerateResponse) and each.HasField("delta") for each in received)
    assert told - 2 <= int(partial_output(error) or "") <= told
