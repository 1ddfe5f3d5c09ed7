"""A killed worker costs its own requests, and nobody else's."""

import asyncio
import os
import signal
import time
from statistics import quantiles

import grpc
import grpc.aio
import pytest

from tests.e2e.harness import Answer, Cluster, token_request


def prompt(length: int, salt: int) -> list[int]:
    return [(7 * i * i + 13 * i + salt) % 500 + 3 for i in range(length)]


def pid_of(cluster: Cluster, worker: str) -> int:
    return next(each.pid for each in cluster.status().workers if each.id == worker)


async def start(cluster: Cluster, count: int) -> list[tuple[asyncio.Task[None], Answer]]:
    """Long answers, all of them decoding."""
    running = []
    for salt in range(count):
        answer = Answer()
        task = asyncio.create_task(_follow(cluster, answer, salt))
        running.append((task, answer))
    async with asyncio.timeout(30):
        while not all(len(answer.token_ids) > 3 for _, answer in running):
            await asyncio.sleep(0.01)
    return running


async def _follow(cluster: Cluster, answer: Answer, salt: int) -> None:
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        from pdserve.v1 import generation_pb2_grpc

        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        async for response in stub.Generate(token_request(prompt(30, salt), 460, seed=salt), timeout=100):
            answer.add(response)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_decode_worker_fails_its_requests_within_a_second_or_two(
    cluster: Cluster, fault: signal.Signals
) -> None:
    victim, incarnation = pid_of(cluster, "decode-0"), cluster.status().workers[0].incarnation
    running = await start(cluster, 6)
    began = time.monotonic()
    os.kill(victim, fault)
    try:
        outcomes = await asyncio.gather(*(task for task, _ in running), return_exceptions=True)
    finally:
        if fault is signal.SIGSTOP:
            os.kill(victim, signal.SIGCONT)
    lost = [outcome for outcome in outcomes if outcome is not None]
    assert 0 < len(lost) < 6, "both decode workers had requests"
    for error in lost:
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
    for (_, answer), outcome in zip(running, outcomes, strict=True):
        if outcome is None:
            assert len(answer.token_ids) == 460
        else:
            assert answer.times[-1] - began < 2.0, "no token came after the worker was lost"
    if fault is signal.SIGKILL:
        status = cluster.wait_complete(4)
        assert status.workers[0].incarnation != incarnation or status.workers[0].pid != victim
    cluster.wait_complete(4)
    answers = await cluster.generate_all([token_request(prompt(20, n), 8) for n in range(8)], concurrency=4)
    assert all(len(answer.token_ids) == 8 for answer in answers)


async def test_a_killed_prefill_worker_comes_back_and_new_requests_work(cluster: Cluster) -> None:
    victim = pid_of(cluster, "prefill-1")
    os.kill(victim, signal.SIGKILL)
    cluster.wait_until("noticed", 2, lambda status: all(worker.pid != victim for worker in status.workers))
    answers = await cluster.generate_all([token_request(prompt(200, n), 8) for n in range(8)], concurrency=2)
    assert all(len(answer.token_ids) == 8 for answer in answers)
    cluster.wait_until("back", 40, lambda status: len(status.workers) == 4 and pid_of(cluster, "prefill-1") != victim)


async def test_streams_on_other_workers_do_not_notice(cluster: Cluster) -> None:
    running = await start(cluster, 4)
    os.kill(pid_of(cluster, "decode-1"), signal.SIGKILL)
    outcomes = await asyncio.gather(*(task for task, _ in running), return_exceptions=True)
    survivors = [answer for (_, answer), outcome in zip(running, outcomes, strict=True) if outcome is None]
    assert survivors
    for answer in survivors:
        gaps = [after - before for before, after in zip(answer.times, answer.times[1:], strict=False)]
        percentiles = quantiles(gaps, n=100)
        print(f"inter-token p50 {percentiles[49] * 1000:.1f} ms, p99 {percentiles[98] * 1000:.1f} ms")
        assert max(gaps) < 5.0, "a stream on another worker stood still"
    cluster.wait_complete(4)
