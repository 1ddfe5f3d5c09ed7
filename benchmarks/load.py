"""A closed loop of identical requests against a router, and what it took. Times are of the client."""

import asyncio
import random
import time
from dataclasses import dataclass

import grpc.aio

from pdserve.v1 import generation_pb2 as pb
from pdserve.v1 import generation_pb2_grpc


@dataclass(frozen=True)
class Timed:
    """One answer: seconds from its start to the first token, per further token, and to its end."""

    ttft_s: float
    tpot_s: float
    num_tokens: int
    exposed_s: float  # from the first token to the second
    total_s: float
    usage: pb.Usage
    times_s: tuple[float, ...]  # when each token came, on the client's clock


def request(num_prompt: int, num_output: int, seed: int) -> pb.GenerateRequest:
    """Random token ids (never the same prompt twice), greedy, exactly `num_output` tokens."""
    draw = random.Random(seed)
    ids = [draw.randrange(100, 40_000) for _ in range(num_prompt)]
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))
    message.sampling.temperature = 0
    message.stopping.max_tokens = num_output
    message.stopping.ignore_eos = True
    return message


async def timed(stub: "generation_pb2_grpc.GenerationServiceAsyncStub", message: pb.GenerateRequest) -> Timed:
    """Send one request and time its tokens."""
    began, times, usage = time.perf_counter(), list[float](), pb.Usage()
    async for response in stub.Generate(message, timeout=600):
        times += [time.perf_counter()] * len(response.delta.token_ids)
        usage = response.finished.usage
    total_s = time.perf_counter() - began
    assert len(times) == message.stopping.max_tokens, f"{len(times)} tokens came"
    tpot_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
    exposed_s = times[1] - times[0] if len(times) > 1 else 0.0
    return Timed(times[0] - began, tpot_s, len(times), exposed_s, total_s, usage, tuple(times))


async def closed_loop(address: str, messages: list[pb.GenerateRequest], concurrency: int) -> tuple[list[Timed], float]:
    """All requests, `concurrency` at a time; and the seconds from the first start to the last end."""
    waiting = list(reversed(messages))
    answers: list[Timed] = []

    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def client() -> None:
            while waiting:
                answers.append(await timed(stub, waiting.pop()))

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(concurrency)))
        return answers, time.perf_counter() - began
