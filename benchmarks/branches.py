"""`make bench-branches`: what n completions of one prompt cost, beside one and beside n requests of their own.

    python -m benchmarks.branches [--n 8] [--prompt 1000] [--tokens 32] [--rounds 3]

Every round has prompts that no worker has seen. TTFT is until the first token of the first completion; the total until
the last token of the last one. n requests of their own: one after the other, and all at once.
"""

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field
from statistics import median

import grpc.aio

from benchmarks.run import cluster, machine, spread
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, generation_pb2_grpc
from pdserve.v1 import generation_pb2 as pb


@dataclass
class Asked:
    """One call."""

    ttft_s: float = 0.0
    begun: set[int] = field(default_factory=set)  # choices that have a token
    usages: list[pb.Usage] = field(default_factory=list)
    pages: str = ""  # as the ledger has them when every choice has begun


@dataclass
class Run:
    """All ways to n completions, of one round."""

    alone: Asked
    together: Asked
    together_s: float
    one_by_one_s: float
    at_once_s: float


class Bench:
    """One connection to the router."""

    def __init__(self, channel: grpc.aio.Channel, arguments: argparse.Namespace) -> None:
        self._stub = generation_pb2_grpc.GenerationServiceStub(channel)
        self._cluster = cluster_pb2_grpc.ClusterServiceStub(channel)
        self._arguments = arguments

    def _request(self, seed: int, n: int = 1) -> pb.GenerateRequest:
        ids = [random.Random(seed).randrange(100, 40_000) for _ in range(self._arguments.prompt)]
        stopping = pb.Stopping(max_tokens=self._arguments.tokens, ignore_eos=True)
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), stopping=stopping, n=n)

    async def ask(self, request: pb.GenerateRequest) -> Asked:
        """The whole answer."""
        asked, began = Asked(), time.perf_counter()
        async for response in self._stub.Generate(request, timeout=600):
            if response.HasField("delta"):
                asked.ttft_s = asked.ttft_s or time.perf_counter() - began
                asked.begun.add(response.delta.index)
                if len(asked.begun) == request.n > 1 and not asked.pages:
                    asked.pages = await self._shared()
            elif response.HasField("finished"):
                asked.usages.append(response.finished.usage)
        return asked

    async def _shared(self) -> str:
        ledger = await self._cluster.GetLedger(cluster_pb2.GetLedgerRequest(), timeout=5)
        (worker,) = (each for each in ledger.workers if each.role == "decode")
        held = sum(each.pages for each in worker.entries)
        return f"{len(worker.entries)} tickets hold {held} pages in {worker.pages.in_use} of memory"

    async def round(self, number: int) -> Run:
        """Each way once."""
        n = self._arguments.n
        alone = await self.ask(self._request(4 * number))
        began = time.perf_counter()
        together = await self.ask(self._request(4 * number + 1, n))
        together_s, began = time.perf_counter() - began, time.perf_counter()
        for _ in range(n):
            await self.ask(self._request(4 * number + 2))
        one_by_one_s, began = time.perf_counter() - began, time.perf_counter()
        await asyncio.gather(*(self.ask(self._request(4 * number + 3)) for _ in range(n)))
        return Run(alone, together, together_s, one_by_one_s, time.perf_counter() - began)


async def measure(address: str, arguments: argparse.Namespace) -> list[Run]:
    """All rounds; a cold cluster's first request pays for more than its prompt."""
    async with grpc.aio.insecure_channel(address) as channel:
        bench = Bench(channel, arguments)
        await bench.ask(pb.GenerateRequest(text="Once", stopping=pb.Stopping(max_tokens=4), n=1))
        return [await bench.round(number) for number in range(arguments.rounds)]


def table(runs: list[Run], n: int) -> str:
    """The figures for a person."""
    usages = runs[0].together.usages
    rows = {
        "TTFT, n = 1": [run.alone.ttft_s for run in runs],
        f"TTFT, n = {n}": [run.together.ttft_s for run in runs],
        f"total, n = {n}": [run.together_s for run in runs],
        f"total, {n} requests of their own, one by one": [run.one_by_one_s for run in runs],
        f"total, {n} requests of their own, all at once": [run.at_once_s for run in runs],
    }
    ratio = median(run.together.ttft_s / run.alone.ttft_s for run in runs)
    return "\n".join(
        [
            *(f"{name:<50} {_span(values)} s" for name, values in rows.items()),
            f"TTFT of n = {n} is {ratio:.3f} x that of n = 1, limit 1.1",
            f"prompt tokens computed, all choices: {sum(each.prefill_tokens_computed for each in usages)}",
            f"while they run: {runs[0].together.pages}",
        ]
    )


def _span(values: list[float]) -> str:
    each = spread(values)
    return f"{each['median']:.2f} [{each['min']:.2f}..{each['max']:.2f}]"


def main() -> None:
    """Start, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    with cluster(["--model", "smollm2", "--dtype", arguments.dtype]) as (address, _):
        print(machine())
        print(table(asyncio.run(measure(address, arguments)), arguments.n))


if __name__ == "__main__":
    main()
