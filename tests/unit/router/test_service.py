"""The public services, through a real gRPC server and stub, over a pipeline that plays back what a test says."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pdserve import rpc
from pdserve.errors import ModelNotFound, QueueFull, Unavailable, WorkerLost
from pdserve.model_card import KvLayout, ModelCard
from pdserve.request import Candidate, Token, WorkRequest
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, generation_pb2_grpc
from pdserve.v1 import generation_pb2 as pb
from router.cluster_service import ClusterServicer
from router.record import RequestRecord
from router.service import GenerationServicer
from router.tokenizer import TextModel
from router.validation import ServedModel
from tests.toy_tokenizer import TOY_EOS_ID, TOY_VOCAB_SIZE, write_toy_tokenizer

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, page_tokens=16, dtype="float32", page_format="plain")
CARD = ModelCard("toy", TOY_VOCAB_SIZE, 64, (TOY_EOS_ID,), "f00d", LAYOUT, exact=True)

Script = Callable[[WorkRequest, RequestRecord], AsyncIterator[Token]]


class Models:
    """One model called toy."""

    def __init__(self, text: TextModel) -> None:
        self.model = ServedModel(CARD, text, max_request_tokens=1000)

    def find(self, name: str) -> ServedModel:
        if name == "early":
            raise Unavailable("no worker serves early yet")
        if name not in ("", "toy"):
            raise ModelNotFound(f"no model {name!r} here; there is toy")
        return self.model

    def all(self) -> Sequence[ServedModel]:
        return [self.model]


class Playback:
    """A pipeline that yields a script's tokens and notes how each request ended."""

    def __init__(self) -> None:
        self.script: Script = tokens_of("")
        self.work: list[WorkRequest] = []
        self.priorities: list[int] = []
        self.yielded = 0
        self.num_open = 0
        self.begun = asyncio.Event()
        self.clean = asyncio.Event()
        self.closed = asyncio.Event()

    async def generate(self, work: WorkRequest, priority: int, record: RequestRecord) -> AsyncGenerator[Token, None]:
        self.work.append(work)
        self.priorities.append(priority)
        self.num_open += 1
        self.begun.set()
        try:
            async for token in self.script(work, record):
                record.add_token(asyncio.get_running_loop().time())
                self.yielded += 1
                yield token
        finally:
            for _ in range(5):  # cleaning up takes its time, and must not be cut short
                await asyncio.sleep(0.01)
            self.closed.set()
            self.num_open -= 1
            if not self.num_open:
                self.clean.set()

    def status(self) -> cluster_pb2.GetStatusResponse:
        return cluster_pb2.GetStatusResponse(queued_requests=3)


class Served:
    """A running server, its stub and its pipeline."""

    def __init__(self, channel: grpc.aio.Channel, text: TextModel, pipeline: Playback) -> None:
        self.stub = generation_pb2_grpc.GenerationServiceStub(channel)
        self.cluster = cluster_pb2_grpc.ClusterServiceStub(channel)
        self.text = text
        self.pipeline = pipeline

    async def generate(self, **fields: Any) -> list[pb.GenerateResponse]:
        fields = fields if fields.keys() & {"text", "chat", "token_ids"} else {"text": "hello", **fields}
        return [response async for response in self.stub.Generate(pb.GenerateRequest(**fields), timeout=20)]

    def play(self, text: str, finish: str = "length", last: int | None = None) -> list[int]:
        """Let the pipeline yield `text`, then perhaps the token `last`."""
        ids = self.text.encode(text) + ([] if last is None else [last])
        self.pipeline.script = tokens_of(ids, finish)
        return ids


def tokens_of(ids: Sequence[int] | str, finish: str = "length") -> Script:
    async def script(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        for number, token_id in enumerate(ids):
            assert isinstance(token_id, int)
            candidates = (Candidate(token_id, -0.5),) * work.top_logprobs
            yield Token(number, token_id, candidates, finish if number == len(ids) - 1 else "")

    return script


async def endless(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
    for number in range(100_000):
        yield Token(number, 10)
        await asyncio.sleep(0.002)


def failing(error: Exception, after: int = 0) -> Script:
    async def script(work: WorkRequest, record: RequestRecord) -> AsyncIterator[Token]:
        for number in range(after):
            yield Token(number, 40)
        raise error

    return script


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Served]:
    write_toy_tokenizer(folder)
    text, pipeline, server = TextModel.load(folder), Playback(), rpc.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(Models(text), pipeline), server)
    cluster_pb2_grpc.add_ClusterServiceServicer_to_server(ClusterServicer(pipeline), server)
    port = rpc.listen(server, "127.0.0.1", 0)
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        yield Served(channel, text, pipeline)
    await server.stop(None)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path) as running:
        yield running


def deltas(responses: list[pb.GenerateResponse]) -> list[pb.Delta]:
    return [response.delta for response in responses if response.HasField("delta")]


def text_of(responses: list[pb.GenerateResponse]) -> str:
    return "".join(delta.text for delta in deltas(responses))


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def detail(error: grpc.aio.AioRpcError, kind: Any) -> Any:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # the stubs know only the synchronous call
    found = kind()
    assert any(packed.Unpack(found) for packed in status.details), f"{kind.__name__} is not among the details"
    return found


async def test_an_answer_from_start_to_finish(served: Served) -> None:
    ids = served.play("the café")
    responses = await served.generate(request_id="mine", sampling=pb.Sampling(seed=5), priority=-1)
    started, finished = responses[0].started, responses[-1].finished
    assert [response.WhichOneof("event") for response in responses] == ["started", *["delta"] * len(ids), "finished"]
    assert (started.request_id, started.model, started.seed) == ("mine", "toy", 5)
    assert (started.model_fingerprint, started.exact) == ("f00d", True)
    assert started.prompt_tokens == finished.usage.prompt_tokens == len(served.text.encode("hello"))
    assert text_of(responses) == "the café"
    assert [list(delta.token_ids) for delta in deltas(responses)] == [[token_id] for token_id in ids]
    assert [delta.token_number for delta in deltas(responses)] == list(range(len(ids)))
    assert finished.usage.completion_tokens == len(ids)
    assert finished.timings.total_ms >= finished.timings.ttft_ms
    assert served.pipeline.priorities == [-1]
    assert served.pipeline.closed.is_set()


async def test_half_characters_wait_and_the_last_delta_brings_them(served: Served) -> None:
    served.pipeline.script = tokens_of(served.text.encode("é👩")[:-1])
    assert [delta.text for delta in deltas(await served.generate())] == ["", "é", "", "", "\ufffd"]


@pytest.mark.parametrize(
    ("last", "finish", "stopping", "match", "reason"),
    [
        (TOY_EOS_ID, "stop_token", pb.Stopping(), pb.StopMatch(eos_token_id=TOY_EOS_ID), pb.FINISH_REASON_STOP),
        (
            TOY_EOS_ID,
            "stop_token",
            pb.Stopping(stop_token_ids=[TOY_EOS_ID], ignore_eos=True),
            pb.StopMatch(stop_token_id=TOY_EOS_ID),
            pb.FINISH_REASON_STOP,
        ),
        (9, "stop_token", pb.Stopping(stop_token_ids=[9]), pb.StopMatch(stop_token_id=9), pb.FINISH_REASON_STOP),
        (9, "length", pb.Stopping(max_tokens=3), pb.StopMatch(max_tokens=3), pb.FINISH_REASON_LENGTH),
        (9, "length", pb.Stopping(max_tokens=999), pb.StopMatch(context_window=64), pb.FINISH_REASON_LENGTH),
        (TOY_EOS_ID, "length", pb.Stopping(max_tokens=3), pb.StopMatch(max_tokens=3), pb.FINISH_REASON_LENGTH),
    ],
)
async def test_why_it_ended(
    served: Served, last: int, finish: str, stopping: pb.Stopping, match: pb.StopMatch, reason: int
) -> None:
    served.play("ab", finish, last)
    finished = (await served.generate(stopping=stopping))[-1].finished
    assert (finished.stop_match, finished.finish_reason) == (match, reason)


async def test_eos_has_an_id_and_no_text(served: Served) -> None:
    ids = served.play("ab", "stop_token", TOY_EOS_ID)
    responses = await served.generate()
    assert text_of(responses) == "ab"
    assert [delta.token_ids[0] for delta in deltas(responses)] == ids


async def test_a_stop_token_keeps_its_text(served: Served) -> None:
    newline = served.text.encode("\n")[0]
    served.play("ab", "stop_token", newline)
    assert text_of(await served.generate(stopping=pb.Stopping(stop_token_ids=[newline]))) == "ab\n"


async def test_a_stop_string_ends_the_work_and_hides_its_text(served: Served) -> None:
    ids = served.play("xay END more and more")
    responses = await served.generate(stopping=pb.Stopping(stop=["zzz", "y END"]))
    assert text_of(responses) == "xa"
    assert responses[-1].finished.stop_match == pb.StopMatch(stop_string="y END")
    assert responses[-1].finished.finish_reason == pb.FINISH_REASON_STOP
    sent = [delta.token_ids[0] for delta in deltas(responses)]
    assert served.text.decode(sent) == "xay END"
    assert len(sent) == served.pipeline.yielded == responses[-1].finished.usage.completion_tokens < len(ids)
    assert served.pipeline.closed.is_set()


async def test_text_withheld_for_a_stop_string_comes_at_the_end(served: Served) -> None:
    served.play("ab EN", "stop_token", TOY_EOS_ID)
    responses = await served.generate(stopping=pb.Stopping(stop=["b END"]))
    assert text_of(responses) == "ab EN"
    assert deltas(responses)[-1].text == "b EN"


async def test_a_stop_string_in_the_last_token_wins_over_length(served: Served) -> None:
    served.play("ab")
    assert (await served.generate(stopping=pb.Stopping(stop=["b"])))[-1].finished.stop_match.stop_string == "b"


async def test_candidates_come_with_their_text(served: Served) -> None:
    served.play("é")
    first = deltas(await served.generate(top_logprobs=2))[0].top_logprobs
    assert len(first) == 1
    assert [candidate.text for candidate in first[0].candidates] == ["\ufffd"] * 2
    assert first[0].candidates[0].logprob == -0.5
    assert not deltas(await served.generate())[0].top_logprobs


async def test_the_plan_reaches_the_workers(served: Served) -> None:
    served.play("a")
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    responses = await served.generate(chat=chat, stopping=pb.Stopping(max_tokens=7))
    work = served.pipeline.work[0]
    assert served.text.decode(work.token_ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
    assert (work.max_tokens, work.label) == (7, responses[0].started.request_id)
    assert work.label


async def test_a_long_prompt_is_tokenized_too(served: Served) -> None:
    served.play("a")
    responses = await served.generate(text="the " * 3000, truncate_prompt_tokens=5)
    assert responses[0].started.prompt_tokens == 5


async def test_a_bad_field_is_named_in_the_details(served: Served) -> None:
    error = await failure(served.generate(sampling=pb.Sampling(top_p=2)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    violation = detail(error, error_details_pb2.BadRequest).field_violations[0]
    assert (violation.field, "at most 1" in violation.description) == ("sampling.top_p", True)
    assert detail(error, error_details_pb2.ErrorInfo).reason == "InvalidRequest"
    assert served.pipeline.work == []


async def test_unknown_and_early_models(served: Served) -> None:
    assert (await failure(served.generate(model="gpt"))).code() is grpc.StatusCode.NOT_FOUND
    assert (await failure(served.generate(model="early"))).code() is grpc.StatusCode.UNAVAILABLE
    for call in (served.stub.GetModel(pb.GetModelRequest(model="gpt")),
                 served.stub.Tokenize(pb.TokenizeRequest(model="gpt", text="x")),
                 served.stub.Detokenize(pb.DetokenizeRequest(model="gpt"))):  # fmt: skip
        assert (await failure(call)).code() is grpc.StatusCode.NOT_FOUND


async def test_a_full_queue_says_when_to_come_back(served: Served) -> None:
    served.pipeline.script = failing(QueueFull("the queue is full", retry_after_s=1.5))
    error = await failure(served.generate())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 1500


async def test_a_worker_lost_midway(served: Served) -> None:
    served.pipeline.script = failing(WorkerLost("decode-0 died"), after=2)
    error = await failure(served.generate())
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "decode-0 died")
    assert detail(error, error_details_pb2.ErrorInfo).reason == "WorkerLost"
    assert served.pipeline.closed.is_set()


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
            yield Token(number, 40, wide)

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


async def test_models(served: Served) -> None:
    model = (await served.stub.GetModel(pb.GetModelRequest())).model
    assert (model.name, model.fingerprint, model.vocab_size, model.context_window) == ("toy", "f00d", 512, 64)
    assert (list(model.eos_token_ids), model.dtype, model.exact, model.has_chat_template) == (
        [2],
        "float32",
        True,
        True,
    )
    assert list((await served.stub.ListModels(pb.ListModelsRequest())).models) == [model]


async def test_tokenize_and_back(served: Served) -> None:
    text = "the café 👩"
    tokens = (await served.stub.Tokenize(pb.TokenizeRequest(text=text))).tokens
    assert b"".join(token.piece for token in tokens) == text.encode()
    assert all(text.encode()[token.start : token.end] == token.piece for token in tokens)
    ids = [token.id for token in tokens]
    assert (await served.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == text


async def test_tokenize_a_chat(served: Served) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    tokens = (await served.stub.Tokenize(pb.TokenizeRequest(chat=chat))).tokens
    request = pb.DetokenizeRequest(token_ids=[token.id for token in tokens])
    assert (await served.stub.Detokenize(request)).text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_bad_input_of_the_small_calls(served: Served) -> None:
    error = await failure(served.stub.Tokenize(pb.TokenizeRequest()))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = await failure(served.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, 600])))
    assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "token_ids[1]"


async def test_status(served: Served) -> None:
    assert (await served.cluster.GetStatus(cluster_pb2.GetStatusRequest())).queued_requests == 3
