"""A worker that drains leaves for good, and no request notices more than a pause.

These tests use up the shared cluster and come last of all that share it: each drains another worker, or one that comes
back.
"""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from cluster import control
from cluster.audit import audit
from cluster.control import drain
from cluster.flags import AuditFlags, DrainFlags
from cluster.readiness import is_linked
from pdserve.errors import Unavailable
from pdserve.v1.cluster_pb2 import GetStatusResponse
from tests.e2e.harness import ROOT, Answer, Cluster, is_alive, token_request

NUM_TOKENS = 480  # nearly all that the toy's window takes: two milliseconds each


def prompt(salt: int) -> list[int]:
    return [(7 * i * i + 13 * i + salt) % 500 + 3 for i in range(30)]


async def start(cluster: Cluster, worker: str) -> tuple[list[Answer], "asyncio.Task[list[None]]"]:
    """Long answers, some of them on this worker (or on all whose names begin so), with most of it to come."""
    answers = [Answer() for _ in range(6)]
    following = [
        cluster.follow(token_request(prompt(n), NUM_TOKENS, seed=n), answer) for n, answer in enumerate(answers)
    ]
    running = asyncio.ensure_future(asyncio.gather(*following))
    async with asyncio.timeout(60):
        while await asyncio.to_thread(load_of, cluster, worker) < 2:
            await asyncio.sleep(0.01)
    return answers, running  # type: ignore[return-value]


def load_of(cluster: Cluster, worker: str) -> int:
    return sum(each.load.requests for each in cluster.status().workers if each.id.startswith(worker))


def pid_of(cluster: Cluster, name: str) -> int:
    return next(each.pid for each in cluster.status().workers if each.id == name)


def drainings(status: GetStatusResponse) -> set[tuple[str, bool]]:
    return {(each.id, each.draining) for each in status.workers}


async def wait_left(cluster: Cluster, name: str, pid: int) -> None:
    """For good: `up` says so, its process is gone, and nobody holds anything of it."""
    cluster.wait_until("gone", 30, lambda status: name not in {each.id for each in status.workers})
    async with asyncio.timeout(10):
        while is_alive(pid) or f"{name} has left: drained" not in cluster.log.read_text():
            await asyncio.sleep(0.1)
    assert await asyncio.to_thread(audit, AuditFlags(address=[cluster.address]))


async def test_what_a_drain_interrupts_goes_on_elsewhere_token_for_token(toy_cluster: Cluster) -> None:
    requests = [token_request(prompt(n), NUM_TOKENS, seed=n) for n in range(6)]
    undisturbed = await toy_cluster.generate_all(requests, concurrency=6)
    pid = pid_of(toy_cluster, "decode-1")
    answers, running = await start(toy_cluster, "decode-1")
    await asyncio.to_thread(drain, DrainFlags("decode-1", limit_s=0, address=toy_cluster.address))
    await running
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in undisturbed]
    resumes = [answer.finished.usage.resumes for answer in answers if answer.finished]
    assert len(resumes) == 6
    assert any(resumes), "nothing ran on the drained worker: this test has shown nothing"
    await wait_left(toy_cluster, "decode-1", pid)


async def test_sigterm_drains_too(toy_cluster: Cluster) -> None:
    pid = pid_of(toy_cluster, "prefill-1")
    _, running = await start(toy_cluster, "decode")
    os.kill(pid, signal.SIGTERM)
    await running
    await wait_left(toy_cluster, "prefill-1", pid)
    assert len((await toy_cluster.generate(token_request(prompt(9), 8))).token_ids) == 8


async def test_a_worker_that_is_killed_while_it_drains_has_not_left(
    toy_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = pid_of(toy_cluster, "decode-0")
    _, running = await start(toy_cluster, "decode-0")
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(control, "_say", say)
    with pytest.raises(Unavailable, match="decode-0 was lost before it had drained, and has been started again"):
        # by force: another test may have drained the other one
        await asyncio.to_thread(drain, DrainFlags("decode-0", limit_s=60, force=True, address=toy_cluster.address))
    assert len(said) == 1
    assert ("decode-0", False) in drainings(toy_cluster.status())
    assert pid_of(toy_cluster, "decode-0") != pid
    running.cancel()  # how they go on is shown above
    await asyncio.gather(running, return_exceptions=True)


def test_a_worker_that_stands_still_is_there_but_silent(toy_cluster: Cluster) -> None:
    pid = pid_of(toy_cluster, "decode-0")
    os.kill(pid, signal.SIGSTOP)
    try:
        toy_cluster.wait_until("silent", 10, lambda status: "decode-0" in status.silent)
        with pytest.raises(Unavailable, match="decode-0 is there, but silent"):
            drain(DrainFlags("decode-0", address=toy_cluster.address))
    finally:
        os.kill(pid, signal.SIGCONT)
    status = toy_cluster.wait_until("heard", 10, lambda status: not status.silent and is_linked(status))
    assert ("decode-0", False) in drainings(status)


def test_the_command_refuses_who_is_not_there(toy_cluster: Cluster) -> None:
    command = [sys.executable, "-m", "cluster.cli", "drain", "decode-7", "--address", toy_cluster.address]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("pdserve: worker: 'decode-7' is not there; there are: decode-0")
