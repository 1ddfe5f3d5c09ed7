"""What a killed or stopped decode worker costs the streams of another one, and its own.

    python -m benchmarks.fault --fault kill|stop [--streams 32] [--dtype bfloat16]

One prefill and two decode workers; long streams on both, and new prompts all the time, over a slowed link, so that the
one prefill worker has payloads outstanding to both. After a quiet while one decode worker is killed, or stopped for
good. Prints the inter-token times of the other worker's streams before the fault and after it, until the lost worker's
requests resume; and how long those pause.
"""

import argparse
import asyncio
import itertools
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

MAX_TOKENS = 440  # a resumed request is promised all of them: they must fit the one worker that is left
QUIET_S = 8.0
RESUME_LIMIT_S = 40.0  # for all that was hit: one prefill worker computes it anew
SLOW = cluster_pb2.Chaos(slow=cluster_pb2.Slow(bytes_per_s=20e6, for_s=600))  # the KV of 32 tokens takes 40 ms


@dataclass
class Stream:
    """One answer in progress."""

    label: str
    times: list[float] = field(default_factory=list)  # of each token

    def gaps_ms(self, begin: float, end: float) -> list[float]:
        """Times between tokens, of those that end in that span."""
        return [1000 * (after - before) for before, after in pairwise(self.times) if begin <= after < end]

    def pause_s(self, at: float) -> float:
        """The gap that `at` lies in."""
        return min(time for time in self.times if time > at) - max(time for time in self.times if time <= at)


async def follow(channel: grpc.aio.Channel, number: int, stream: Stream) -> None:
    """Read one long answer."""
    message = request(32, MAX_TOKENS, number)
    message.request_id = stream.label
    async for response in generation_pb2_grpc.GenerationServiceStub(channel).Generate(message):
        stream.times += [time.perf_counter()] * len(response.delta.token_ids)


async def newcomers(channel: grpc.aio.Channel) -> None:
    """Short requests, one after the other, until cancelled."""
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    for number in itertools.count(10_000):
        async for _ in stub.Generate(request(64, 2, number)):
            pass


async def running(service: "cluster_pb2_grpc.ClusterServiceAsyncStub", worker: str) -> set[str]:
    """Labels of the requests on a worker."""
    ledgers = (await service.GetLedger(cluster_pb2.GetLedgerRequest())).workers
    return {entry.label for ledger in ledgers if ledger.id == worker for entry in ledger.entries}


async def measure(address: str, fault: signal.Signals, num_streams: int) -> str:
    """One fault."""
    streams = [Stream(f"stream-{number}") for number in range(num_streams)]
    async with grpc.aio.insecure_channel(address) as channel:
        service = cluster_pb2_grpc.ClusterServiceStub(channel)
        await service.InflictChaos(cluster_pb2.InflictChaosRequest(worker="prefill-0", chaos=SLOW))
        tasks = [asyncio.create_task(follow(channel, number, stream)) for number, stream in enumerate(streams)]
        while not all(len(stream.times) > 5 for stream in streams):
            await asyncio.sleep(0.1)  # a look now and then is enough
        tasks += [asyncio.create_task(newcomers(channel)) for _ in range(2)]
        await asyncio.sleep(QUIET_S)
        status = await service.GetStatus(cluster_pb2.GetStatusRequest())
        victim = next(worker for worker in status.workers if worker.id == "decode-0")
        hit = await running(service, victim.id)
        at = time.perf_counter()
        os.kill(victim.pid, fault)
        async with asyncio.timeout(RESUME_LIMIT_S):
            while not all(stream.times[-1] > at for stream in streams if stream.label in hit):
                await asyncio.sleep(0.1)  # streams have nobody to wake us
        if fault is signal.SIGSTOP:
            os.kill(victim.pid, signal.SIGKILL)  # `up` waits for its processes
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return report(streams, hit, at)


def report(streams: list[Stream], hit: set[str], at: float) -> str:
    """The other worker's streams before and after, and the pauses of those that were hit."""
    others = [stream for stream in streams if stream.label not in hit]
    pauses = [stream.pause_s(at) for stream in streams if stream.label in hit]
    first_back = min(time for stream in streams if stream.label in hit for time in stream.times if time > at)
    spans = {
        "before": (at - QUIET_S, at),
        "until the first resumes": (at, first_back),
        "after, while the others resume": (first_back, max(stream.times[-1] for stream in streams)),
    }
    lines = [f"{len(others)} streams on the other worker; {len(pauses)} resumed"]
    p99 = {}
    for what, (begin, end) in spans.items():
        gaps = [gap for stream in others for gap in stream.gaps_ms(begin, end)]
        p99[what] = quantiles(gaps, n=100)[98]
        lines.append(f"{what}: p50 {median(gaps):.1f} p99 {p99[what]:.1f} max {max(gaps):.1f} ms ({len(gaps)} gaps)")
    lines += [f"p99 ratio to before, {what}: {value / p99['before']:.2f}" for what, value in p99.items()][1:]
    lines.append(f"pause of the hit ones: median {median(pauses):.2f} s, longest {max(pauses):.2f} s")
    return "\n".join(lines)


def main() -> None:
    """Start, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=["kill", "stop"], default="kill")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    fault = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[arguments.fault]
    flags = ["--model", "smollm2", "--decode", "2", "--dtype", arguments.dtype, "--chaos"]
    with cluster(flags) as (address, _):
        print(machine())
        print(asyncio.run(measure(address, fault, arguments.streams)))


if __name__ == "__main__":
    main()
