"""Requests that come, and mostly go away before they are done, for minutes: nothing may be left over or grow.

    python -m benchmarks.soak [--minutes 5] [--clients 24]

A random tiny model, one prefill and two decode workers. Each client sends one request after the other and leaves most
of them at a random moment. Every ten seconds the cluster is audited (every page in use belongs to a live request), and
memory, threads and file descriptors of router and workers are noted. At the end everything must be free.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import psutil

from benchmarks.run import cluster, machine
from cluster.audit import collect, lasting
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, generation_pb2_grpc
from pdserve.v1 import generation_pb2 as pb
from tests.toy import write_toy_model

AUDIT_INTERVAL_S = 10.0


@dataclass
class Tally:
    """What happened."""

    whole: int = 0
    left: int = 0
    failed: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    usage: list[dict[str, tuple[int, int, int]]] = field(default_factory=list)  # MiB, threads, files per process


async def client(address: str, number: int, tally: Tally) -> None:
    """One request after the other, until cancelled."""
    chance = random.Random(number)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        while True:
            await ask(stub, chance, tally)


async def ask(stub: "generation_pb2_grpc.GenerationServiceAsyncStub", chance: random.Random, tally: Tally) -> None:
    """One request, to its end or to a moment of chance."""
    call = stub.Generate(random_request(chance))
    try:
        async with asyncio.timeout(chance.choice([0.001, 0.01, 0.05, 0.2, 60.0])):
            async for _ in call:
                pass
        tally.whole += 1
    except TimeoutError:
        call.cancel()
        tally.left += 1
    except grpc.aio.AioRpcError as error:
        tally.failed.append(f"{error.code().name}: {error.details()}")


def random_request(chance: random.Random) -> pb.GenerateRequest:
    """Of a page or several chunks, sharing a beginning with others or not."""
    start = chance.choice([0, 0, chance.randrange(400)])
    prompt = [3 + (start + i) % 500 for i in range(chance.choice([1, 15, 16, 17, 100, 300]))]
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt))
    request.stopping.max_tokens = chance.choice([1, 2, 30, 200])
    request.stopping.ignore_eos = True
    return request


async def watch(address: str, until: float, tally: Tally) -> None:
    """Audit and note, now and then."""
    while time.monotonic() < until:
        await asyncio.sleep(AUDIT_INTERVAL_S)
        tally.findings += map(str, lasting(await collect([address])))
        tally.usage.append(await usage(address))


async def usage(address: str) -> dict[str, tuple[int, int, int]]:
    """Of every worker, and of the router."""
    async with grpc.aio.insecure_channel(address) as channel:
        status = await cluster_pb2_grpc.ClusterServiceStub(channel).GetStatus(cluster_pb2.GetStatusRequest())
    pids = {worker.id: worker.pid for worker in status.workers}
    children = psutil.Process().children(recursive=True)
    pids["router"] = next(child.pid for child in children if "router.json" in " ".join(child.cmdline()))
    return {name: of_process(psutil.Process(pid)) for name, pid in sorted(pids.items())}


def of_process(process: psutil.Process) -> tuple[int, int, int]:
    """MiB resident, threads, file descriptors."""
    return process.memory_info().rss // 2**20, process.num_threads(), process.num_fds()


async def soak(address: str, minutes: float, num_clients: int) -> Tally:
    """All of it; returns when everything is free again, or a minute later."""
    tally = Tally()
    clients = [asyncio.create_task(client(address, number, tally)) for number in range(num_clients)]
    await watch(address, time.monotonic() + 60 * minutes, tally)
    for task in clients:
        task.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    with suppress(TimeoutError):
        async with asyncio.timeout(60):
            while held := await holders(address):
                await asyncio.sleep(0.5)  # ledgers can only be asked
    tally.findings += [f"left over: {each}" for each in held]
    return tally


async def holders(address: str) -> list[str]:
    """Who still holds pages, or promises."""
    [answer] = (await collect([address]))[-1]
    return [
        f"{worker.id}: {worker.pages.in_use} in use, {worker.pages.promised} promised"
        for worker in answer.workers
        if worker.pages.in_use or worker.pages.promised or worker.entries
    ]


def report(tally: Tally, minutes: float) -> str:
    """For a person."""
    lines = [
        f"{tally.whole} requests ended, {tally.left} were left, {len(tally.failed)} failed in {minutes:g} min;"
        f" {len(tally.usage)} audits, {len(tally.findings)} findings",
        *sorted(set(tally.findings))[:20],
        *sorted(set(tally.failed))[:20],
        "process: MiB, threads, files after the first minute -> at the end",
    ]
    early, late = tally.usage[min(5, len(tally.usage) - 1)], tally.usage[-1]
    return "\n".join([*lines, *(f"{name}: {early[name]} -> {late[name]}" for name in late)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Start, soak, print; exit code 1 when something failed or was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=24)
    parsed = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = write_toy_model(Path(folder) / "toy")
        config = Path(folder) / "cluster.yaml"
        config.write_text(f"model: {model}\ndtype: float32\ndecode: 2\nnum_pages: 256\nverify_kv: true\n")
        with cluster(["--config", str(config)]) as (address, _):
            print(machine())
            tally = asyncio.run(soak(address, parsed.minutes, parsed.clients))
    print(report(tally, parsed.minutes))
    raise SystemExit(bool(tally.findings or tally.failed))


if __name__ == "__main__":
    main()
