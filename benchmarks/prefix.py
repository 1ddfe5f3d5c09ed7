"""What a shared prompt and the next turns of a chat cost.

    python -m benchmarks.prefix [--shared 1000] [--requests 32]

Requests with one system prompt in common, one after the other: tokens computed, and time to first token of the later
ones beside the first. Then a chat of five turns: tokens computed and bytes pushed in each.
"""

import argparse
import asyncio
import random
import time
from dataclasses import dataclass
from statistics import median

import grpc.aio

from benchmarks.run import cluster, machine
from pdserve.v1 import generation_pb2 as pb
from pdserve.v1 import generation_pb2_grpc


@dataclass(frozen=True)
class Asked:
    """One answer."""

    ttft_s: float
    token_ids: list[int]
    finished: pb.Finished


def ids(count: int, seed: int) -> list[int]:
    """Random token ids."""
    return [random.Random(seed).randrange(100, 40_000) for _ in range(count)]


async def ask(stub: "generation_pb2_grpc.GenerationServiceAsyncStub", prompt: list[int], max_tokens: int) -> Asked:
    """One greedy request."""
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt))
    message.sampling.temperature = 0
    message.stopping.max_tokens = max_tokens
    message.stopping.ignore_eos = True
    began, first, token_ids, finished = time.perf_counter(), 0.0, list[int](), pb.Finished()
    async for response in stub.Generate(message, timeout=600):
        first = first or (time.perf_counter() if response.HasField("delta") else 0.0)
        token_ids += response.delta.token_ids
        finished = response.finished
    return Asked(first - began, token_ids, finished)


async def shared_prompt(address: str, num_shared: int, num_requests: int) -> str:
    """One system prompt, many questions."""
    system = ids(num_shared, 1)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        await ask(stub, ids(32, 2), 4)  # a cold cluster's first request pays for more than its prompt
        answers = [await ask(stub, [*system, *ids(20, 100 + number)], 4) for number in range(num_requests)]
    first, later = answers[0], answers[1:]
    usage = [answer.finished.usage for answer in answers]
    assert all(each.prompt_tokens == each.cached_tokens + each.prefill_tokens_computed for each in usage)
    ratio = median(answer.ttft_s for answer in later) / first.ttft_s
    computed = sum(each.prefill_tokens_computed for each in usage)
    return "\n".join(
        [
            f"{num_requests} prompts of {num_shared} shared + 20 own tokens: {computed} tokens computed,"
            f" {sum(each.cached_tokens for each in usage)} cached",
            f"TTFT of the first {1000 * first.ttft_s:.0f} ms, of the later ones median"
            f" {1000 * median(answer.ttft_s for answer in later):.0f} ms,"
            f" longest {1000 * max(answer.ttft_s for answer in later):.0f} ms: ratio {ratio:.3f} (limit 0.25)",
        ]
    )


async def chat(address: str, num_turns: int = 5) -> str:
    """Each turn sends all that was said before."""
    history = ids(200, 3)
    lines = ["turn  prompt  cached  computed  pushed"]
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for turn in range(num_turns):
            answer = await ask(stub, history, 60)
            usage, workers = answer.finished.usage, answer.finished.workers
            lines.append(
                f"{turn + 1:4}  {usage.prompt_tokens:6}  {usage.cached_tokens:6}  {usage.prefill_tokens_computed:8}"
                f"  {workers.transfer_bytes:,} bytes"
            )
            history += [*answer.token_ids, *ids(30, 10 + turn)]
    return "\n".join(lines)


def main() -> None:
    """Start, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    with cluster(["--model", "smollm2", "--dtype", arguments.dtype]) as (address, _):
        print(machine())
        print(asyncio.run(shared_prompt(address, arguments.shared, arguments.requests)))
        print(asyncio.run(chat(address)))


if __name__ == "__main__":
    main()
