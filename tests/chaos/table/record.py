"""What a client wrote down about one request, and how it differs from the undisturbed answer."""

import asyncio
import math
import time
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio

from cluster import resumable
from pdserve import rpc
from pdserve.errors import PdserveError
from pdserve.v1 import generation_pb2 as pb
from pdserve.v1.generation_pb2_grpc import GenerationServiceStub

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Received:
    """One token, as it came."""

    number: int
    token_id: int
    at: float  # of time.monotonic


@dataclass
class Record:
    """All that came for one request. Unlike `resumable`, it takes tokens twice, and with gaps."""

    label: str
    sent_at: float = math.inf
    tokens: list[Received] = field(default_factory=list)
    text: str = ""
    finished: pb.Finished | None = None
    error: str = ""

    def add(self, response: pb.GenerateResponse) -> None:
        """Take one message."""
        now, delta = time.monotonic(), response.delta
        self.tokens += [Received(delta.token_number + i, each, now) for i, each in enumerate(delta.token_ids)]
        self.text += delta.text
        if response.HasField("finished"):
            self.finished = response.finished

    def num_before(self, at: float) -> int:
        """Tokens received before."""
        return sum(token.at < at for token in self.tokens)

    def next_after(self, at: float) -> float | None:
        """When the first token after `at` came."""
        return next((token.at for token in self.tokens if token.at >= at), None)

    @property
    def resumes(self) -> int:
        """As the finished message counts them."""
        return self.finished.usage.resumes if self.finished else 0


@dataclass(frozen=True)
class Expected:
    """The undisturbed answer."""

    token_ids: tuple[int, ...]
    text: str
    ending: bytes  # finish reason and what matched

    @classmethod
    def of(cls, record: Record) -> "Expected":
        """Of a request that nothing disturbed. Raises RuntimeError if it failed all the same."""
        if record.finished is None:
            raise RuntimeError(f"undisturbed, and yet {record.label} failed: {record.error}")
        return cls(tuple(token.token_id for token in record.tokens), record.text, _ending(record.finished))


@dataclass(frozen=True)
class Verdict:
    """What is wrong with an answer: all 0 is right."""

    failed: int
    lost: int
    doubled: int
    changed: int

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.failed or self.lost or self.doubled or self.changed)


def judge(record: Record, expected: Expected) -> Verdict:
    """Compare an answer with the undisturbed one. What a failed request did not deliver is not lost, but failed."""
    if record.finished is None:
        return Verdict(1, 0, 0, 0)
    came = {token.number: token.token_id for token in reversed(record.tokens)}
    wanted = dict(enumerate(expected.token_ids))
    lost, doubled = len(wanted.keys() - came.keys()), len(record.tokens) - len(came)
    changed = sum(wanted.get(number) != token_id for number, token_id in came.items())
    if not (lost or doubled or changed):
        changed = int((record.text, _ending(record.finished)) != (expected.text, expected.ending))
    return Verdict(0, lost, doubled, changed)


def _ending(finished: pb.Finished) -> bytes:
    plain = pb.Finished(finish_reason=finished.finish_reason, stop_match=finished.stop_match)
    return plain.SerializeToString(deterministic=True)


async def follow(address: str, request: pb.GenerateRequest, record: Record, *, resumes: bool = False) -> None:
    """Fill in the record; an error is written down. With `resumes` the client survives its router."""
    record.sent_at = time.monotonic()
    try:
        async with asyncio.timeout(TIMEOUT_S), _responses(address, request, resumes) as responses:
            async for response in responses:
                record.add(response)
    except (grpc.aio.AioRpcError, PdserveError, TimeoutError) as error:
        details = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
        record.error = f"{type(error).__name__}: {details}"


@asynccontextmanager
async def _responses(
    address: str, request: pb.GenerateRequest, resumes: bool
) -> AsyncIterator[AsyncIterable[pb.GenerateResponse]]:
    if resumes:
        async with aclosing(resumable.generate(address, request, resumable.Limits(TIMEOUT_S, TIMEOUT_S))) as responses:
            yield responses
    else:
        async with rpc.client_channel(address) as channel:
            yield GenerationServiceStub(channel).Generate(request, timeout=TIMEOUT_S)
