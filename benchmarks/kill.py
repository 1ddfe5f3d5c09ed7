"""What a killed decode worker costs the streams of another one, and how soon its own requests know.

    python -m benchmarks.kill [--dtype bfloat16]

One prefill and two decode workers; steady streams on both. After a quiet while one decode worker is killed. Prints the
inter-token times of the other worker's streams before and after, and when the killed one's requests failed.
"""

import argparse
import asyncio
import os
import signal
import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, quantiles

import grpc.aio

from benchmarks.load import request
from benchmarks.run import cluster, machine
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, generation_pb2_grpc

QUIET_S = 15.0
STREAMS = 4


@dataclass
class Stream:
    """One answer in progress."""

    times: list[float] = field(default_factory=list)  # of each token
    failed_at: float | None = None

    def gaps_ms(self, begin: float, end: float) -> list[float]:
        """Times between tokens of that span."""
        inside = [at for at in self.times if begin <= at < end]
        return [1000 * (after - before) for before, after in pairwise(inside)]


async def follow(address: str, number: int, stream: Stream) -> None:
    """Read one long answer."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        try:
            async for response in stub.Generate(request(32, 4000, number)):
                stream.times += [time.perf_counter()] * len(response.delta.token_ids)
        except grpc.aio.AioRpcError:
            stream.failed_at = time.perf_counter()


async def pids(address: str) -> dict[str, int]:
    """Process of each worker."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        return {worker.id: worker.pid for worker in (await stub.GetStatus(cluster_pb2.GetStatusRequest())).workers}


async def measure(address: str) -> str:
    """One kill."""
    streams = [Stream() for _ in range(STREAMS)]
    tasks = [asyncio.create_task(follow(address, number, stream)) for number, stream in enumerate(streams)]
    while not all(len(stream.times) > 5 for stream in streams):
        await asyncio.sleep(0.1)  # a look now and then is enough
    await asyncio.sleep(QUIET_S)
    victim, killed_at = (await pids(address))["decode-0"], time.perf_counter()
    os.kill(victim, signal.SIGKILL)
    await asyncio.sleep(QUIET_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    failed = [1000 * (stream.failed_at - killed_at) for stream in streams if stream.failed_at]
    rows = []
    for what, begin in (("before", killed_at - QUIET_S), ("after", killed_at)):
        gaps = [gap for stream in streams if not stream.failed_at for gap in stream.gaps_ms(begin, begin + QUIET_S)]
        rows.append((what, median(gaps), quantiles(gaps, n=100)[98], max(gaps), len(gaps)))
    lines = [f"{what}: p50 {p50:.1f} p99 {p99:.1f} max {top:.1f} ms ({n} gaps)" for what, p50, p99, top, n in rows]
    ratio = rows[1][2] / rows[0][2]
    return "\n".join(
        [*lines, f"p99 ratio {ratio:.2f}; requests of the killed worker failed after {max(failed):.0f} ms"]
    )


def main() -> None:
    """Start, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    with cluster(["--model", "smollm2", "--decode", "2", "--dtype", arguments.dtype]) as (address, _):
        print(machine())
        print(asyncio.run(measure(address)))


if __name__ == "__main__":
    main()
