"""A killed or stopped worker costs a pause, and nobody a request: answers are those of an undisturbed run."""

import asyncio
import os
import signal
import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import quantiles

import pytest

from pdserve.v1 import generation_pb2
from tests.e2e.harness import Answer, Cluster, token_request


def prompt(length: int, salt: int) -> list[int]:
    return [(7 * i * i + 13 * i + salt) % 500 + 3 for i in range(length)]


def requests(count: int, max_tokens: int) -> list[generation_pb2.GenerateRequest]:
    """Half of them greedy, half seeded."""
    return [token_request(prompt(30, n), max_tokens, seed=n if n % 2 else None) for n in range(count)]


def pid_of(cluster: Cluster, worker: str) -> int:
    return next(each.pid for each in cluster.status().workers if each.id == worker)


@dataclass
class Streams:
    """Requests under way."""

    answers: list[Answer] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @classmethod
    async def start(cls, cluster: Cluster, wanted: list[generation_pb2.GenerateRequest]) -> "Streams":
        """Returns when all of them are decoding."""
        streams = cls()
        for request in wanted:
            streams.answers.append(Answer())
            streams.tasks.append(asyncio.create_task(cluster.follow(request, streams.answers[-1])))
        async with asyncio.timeout(60):
            while not all(len(answer.token_ids) > 3 for answer in streams.answers):
                await asyncio.sleep(0.01)
        return streams

    async def end(self) -> list[Answer]:
        """All of them; the first error is raised."""
        await asyncio.gather(*self.tasks)
        return self.answers


def gaps(answer: Answer) -> list[float]:
    return [after - before for before, after in pairwise(answer.times)]


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_decode_worker_costs_a_pause(cluster: Cluster, fault: signal.Signals) -> None:
    wanted = requests(6, 460)
    expected = await cluster.generate_all(wanted, concurrency=6)
    victim = pid_of(cluster, "decode-0")
    streams = await Streams.start(cluster, wanted)
    began = time.monotonic()
    os.kill(victim, fault)
    try:
        answers = await streams.end()
    finally:
        if fault is signal.SIGSTOP:
            os.kill(victim, signal.SIGCONT)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    resumed = [answer for answer in answers if answer.finished and answer.finished.usage.resumes]
    assert 0 < len(resumed) < 6, "both decode workers had requests"
    pauses = [max(gaps(answer)) for answer in resumed]
    print(f"{len(resumed)} resumed; longest pause {max(pauses):.2f} s; done {time.monotonic() - began:.1f} s later")
    assert max(pauses) < 15, "bounded; how long it takes is a benchmark's business"


async def test_a_killed_prefill_worker_costs_no_request(cluster: Cluster) -> None:
    wanted = [token_request(prompt(400, n), 8) for n in range(12)]
    expected = await cluster.generate_all(wanted, concurrency=4)
    victim = pid_of(cluster, "prefill-1")
    asking = asyncio.create_task(cluster.generate_all(wanted, concurrency=6))
    await asyncio.sleep(0.2)
    os.kill(victim, signal.SIGKILL)
    answers = await asking
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    cluster.wait_until("back", 40, lambda status: len(status.workers) == 4 and pid_of(cluster, "prefill-1") != victim)


async def test_streams_on_other_workers_do_not_notice(cluster: Cluster) -> None:
    streams = await Streams.start(cluster, requests(4, 460))
    os.kill(pid_of(cluster, "decode-1"), signal.SIGKILL)
    survivors = [answer for answer in await streams.end() if answer.finished and not answer.finished.usage.resumes]
    assert survivors
    for answer in survivors:
        percentiles = quantiles(gaps(answer), n=100)
        print(f"inter-token p50 {percentiles[49] * 1000:.1f} ms, p99 {percentiles[98] * 1000:.1f} ms")
        assert max(gaps(answer)) < 10.0, "a stream on another worker stood still"
