"""`make bench-scheduling`: who waits for whom at a prefill worker: one prefill and one decode worker, real prompts.

    python -m benchmarks.scheduling [--parts waves priorities stream] [--repeats 1] [--out FILE.json]

waves       five prompts of 2000 tokens, then twenty of 50 right behind: first come, first served beside shortest first
priorities  ten prompts of 500 tokens and priority 0, then five more urgent ones and five less urgent ones right behind
stream      one prompt of 2000 tokens among short ones that never cease: how many tokens overtake it

Times are of the client, in seconds. Nothing here is a test: noisy machines give noisy figures.
"""

import argparse
import asyncio
import itertools
import json
import math
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import grpc.aio

from benchmarks.load import request, timed
from benchmarks.run import cluster, machine
from pdserve.due import PATIENCE
from pdserve.v1 import generation_pb2 as pb
from pdserve.v1 import generation_pb2_grpc

LONG, SHORT, MIDDLE = 2000, 50, 500  # prompt tokens
RATIO_LIMIT = 0.3
BEHIND_S = 0.05  # by then the router has all that came before
STREAMS = 16  # clients of the steady stream
Stub: TypeAlias = "generation_pb2_grpc.GenerationServiceAsyncStub"


class Prompts:
    """Never the same one twice: nothing is found in a cache."""

    def __init__(self) -> None:
        self._seeds = itertools.count()

    def make(self, num_tokens: int, priority: int = 0, num_output: int = 8) -> pb.GenerateRequest:
        """The next one."""
        message = request(num_tokens, num_output, next(self._seeds))
        message.priority = priority
        return message


async def ttfts(stub: Stub, messages: Sequence[pb.GenerateRequest]) -> list[float]:
    """Of requests that are sent at once, in this order."""
    return [answer.ttft_s for answer in await asyncio.gather(*(timed(stub, message) for message in messages))]


async def behind(stub: Stub, first: list[pb.GenerateRequest], then: list[pb.GenerateRequest]) -> list[list[float]]:
    """TTFTs of both lots, the second one sent right behind the first."""
    waiting = asyncio.create_task(ttfts(stub, first))
    await asyncio.sleep(BEHIND_S)
    later = await ttfts(stub, then)
    return [await waiting, later]


async def waves(stub: Stub, prompts: Prompts, repeats: int) -> dict[str, list[float]]:
    """Twenty short ones behind five long ones, several times."""
    found: dict[str, list[float]] = {"long": [], "short": []}
    for _ in range(repeats):
        lots = [prompts.make(LONG) for _ in range(5)], [prompts.make(SHORT) for _ in range(20)]
        long, short = await behind(stub, *lots)
        found["long"] += long
        found["short"] += short
    return found


async def priorities(stub: Stub, prompts: Prompts) -> dict[str, list[float]]:
    """The most urgent ones come last, of the same length as the others."""
    usual = [prompts.make(MIDDLE) for _ in range(10)]
    others = [prompts.make(MIDDLE, priority) for priority in (1, -1) for _ in range(5)]
    found = await behind(stub, usual, others)
    return {"0": found[0], "1": found[1][:5], "-1": found[1][5:]}


async def stream(stub: Stub, prompts: Prompts) -> dict[str, float]:
    """A long one while short ones never cease."""
    alone_s = (await ttfts(stub, [prompts.make(LONG)]))[0]
    came: list[float] = []  # when a short one had its token

    async def client() -> None:
        while True:
            await timed(stub, prompts.make(SHORT, num_output=1))
            came.append(time.perf_counter())

    clients = [asyncio.create_task(client()) for _ in range(STREAMS)]
    await asyncio.sleep(1.0)  # the stream runs
    began, num_before = time.perf_counter(), len(came)
    (ttft_s,) = await ttfts(stub, [prompts.make(LONG)])
    overtaken = SHORT * (len(came) - num_before)
    for each in clients:
        each.cancel()
    assert came[-1] > began, "the stream has dried up"
    # what was there before it, what may overtake it, and what was in the pass beside its last chunk
    bound = SHORT * STREAMS + PATIENCE * LONG + 256
    return {"alone_s": alone_s, "ttft_s": ttft_s, "short_tokens": overtaken, "bound_tokens": bound}


@contextmanager
def served(patience: int) -> Iterator[str]:
    """A cluster's address."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "cluster.yaml"
        config.write_text(f"model: smollm2\npatience: {patience}\n")
        with cluster(["--config", str(config)]) as (address, _):
            yield address


def measured(address: str, prompts: Prompts, work: Callable[[Stub, Prompts], Awaitable[Any]]) -> Any:
    """Connect, warm up, measure."""

    async def run() -> Any:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            await ttfts(stub, [prompts.make(SHORT)])  # a cold cluster's first request pays for more than its prompt
            return await work(stub, prompts)

    return asyncio.run(run())


def measure(parts: Sequence[str], repeats: int) -> dict[str, Any]:
    """The parts asked for."""
    found: dict[str, Any] = {"machine": machine(), "patience": PATIENCE}
    several, prompts = partial(waves, repeats=repeats), Prompts()
    if "waves" in parts:
        with served(0) as address:
            found["first_come"] = measured(address, prompts, several)
    with served(PATIENCE) as address:
        if "waves" in parts:
            found["shortest"] = measured(address, prompts, several)
        if "priorities" in parts:
            found["priorities"] = measured(address, prompts, priorities)
        if "stream" in parts:
            found["stream"] = measured(address, prompts, stream)
    return found


def p99(values: Sequence[float]) -> float:
    """The least value that 99 of 100 do not exceed."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def report(found: dict[str, Any]) -> Iterator[str]:
    """The figures for a person."""
    yield f"{found['machine']}; smollm2, 1 prefill + 1 decode worker, patience {found['patience']}"
    if "shortest" in found:
        yield from _waves(found["first_come"], found["shortest"])
    if "priorities" in found:
        yield from _priorities(found["priorities"])
    if "stream" in found:
        yield from _stream(found["stream"])


def _waves(first_come: dict[str, list[float]], shortest: dict[str, list[float]]) -> Iterator[str]:
    yield from ("", "| TTFT | first come, first served | shortest first |", "|---|---|---|")
    for kind, name in (("short", f"{SHORT} tokens"), ("long", f"{LONG} tokens")):
        for what, of in (("p50", median), ("p99", p99), ("max", max)):
            yield f"| {name}, {what} | {of(first_come[kind]):.2f} s | {of(shortest[kind]):.2f} s |"
    ratio = p99(shortest["short"]) / p99(first_come["short"])
    yield from ("", f"p99 of the short ones: {ratio:.3f} of first come, first served (limit {RATIO_LIMIT})")


def _priorities(found: dict[str, list[float]]) -> Iterator[str]:
    yield from ("", f"| TTFT, {MIDDLE} tokens | median | max |", "|---|---|---|")
    for priority in ("-1", "0", "1"):
        yield f"| priority {priority} | {median(found[priority]):.2f} s | {max(found[priority]):.2f} s |"


def _stream(found: dict[str, float]) -> Iterator[str]:
    yield ""
    yield (
        f"{LONG} tokens in a stream of short prompts: TTFT {found['ttft_s']:.2f} s (alone {found['alone_s']:.2f} s);"
        f" {found['short_tokens']} tokens of others came to their end meanwhile (bound {found['bound_tokens']})"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("waves", "priorities", "stream")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.parts, arguments.repeats)
    print("\n".join(report(found)))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
