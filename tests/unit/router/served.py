"""The generation service behind a real gRPC server and stub, over a pipeline that plays back what a test says."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_status import rpc_status

from pdserve import rpc
from pdserve.errors import AlreadyComplete, ModelNotFound, Unavailable
from pdserve.model_card import KvLayout, ModelCard
from pdserve.request import Candidate, Token, WorkRequest
from pdserve.v1 import generation_pb2 as pb
from pdserve.v1 import generation_pb2_grpc
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
        self.clean_up_s = 0.05  # takes its time, and must not be cut short
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
            for _ in range(5):
                await asyncio.sleep(self.clean_up_s / 5)
            self.closed.set()
            self.num_open -= 1
            if not self.num_open:
                self.clean.set()


class Served:
    """A running server, its stub and its pipeline."""

    def __init__(
        self, server: grpc.aio.Server, channel: grpc.aio.Channel, address: str, text: TextModel, pipeline: Playback
    ) -> None:
        self.server = server
        self.stub = generation_pb2_grpc.GenerationServiceStub(channel)
        self.address = address
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
        if finish == "grammar" and work.num_emitted == len(ids):
            raise AlreadyComplete("as a prefill worker says it")
        for number, token_id in list(enumerate(ids))[work.num_emitted :]:
            assert isinstance(token_id, int)
            candidates = (Candidate(token_id, -0.5),) * work.top_logprobs
            logprob = -0.5 if work.wants_logprobs else None
            yield Token(number, token_id, candidates, finish if number == len(ids) - 1 else "", logprob)

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
async def serving(folder: Path, port: int = 0) -> AsyncIterator[Served]:
    write_toy_tokenizer(folder)
    text, pipeline, server = TextModel.load(folder), Playback(), rpc.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(Models(text), pipeline), server)
    address = f"127.0.0.1:{rpc.listen(server, '127.0.0.1', port)}"
    await server.start()
    async with rpc.channel(address) as channel:
        yield Served(server, channel, address, text, pipeline)
    await server.stop(None)


def deltas(responses: Sequence[pb.GenerateResponse]) -> list[pb.Delta]:
    return [response.delta for response in responses if response.HasField("delta")]


def text_of(responses: Sequence[pb.GenerateResponse]) -> str:
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
