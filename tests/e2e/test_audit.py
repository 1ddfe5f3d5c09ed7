"""`pdserve kv audit` and `pdserve chaos` on a real cluster."""

import asyncio
import json
import subprocess
import sys

import grpc.aio
import pytest

from cluster.audit import audit
from cluster.control import chaos
from cluster.flags import AuditFlags, ChaosFlags, Harm
from pdserve.internal.v1 import decode_pb2, decode_pb2_grpc
from pdserve.request import Sampling, WorkRequest
from pdserve.v1.cluster_pb2 import WorkerStatus
from pdserve.wire import request_to_wire
from tests.e2e.harness import ROOT, Cluster, token_request


def prompt(length: int, salt: int) -> list[int]:
    return [(11 * i * i + 17 * i + salt) % 500 + 3 for i in range(length)]


def worker(cluster: Cluster, name: str) -> WorkerStatus | None:
    return next((each for each in cluster.status().workers if each.id == name), None)


async def audited(cluster: Cluster) -> bool:
    return await asyncio.to_thread(audit, AuditFlags(address=[cluster.address], json=True))


async def harm(cluster: Cluster, kind: Harm, name: str, for_s: float = 2, bytes_per_s: float = 1e6) -> None:
    await asyncio.to_thread(chaos, ChaosFlags(kind, name, for_s, bytes_per_s, cluster.address))


async def test_all_views_agree_while_requests_come_and_go(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    requests = [token_request(prompt(20 + 9 * n, n), 150, seed=n) for n in range(24)]
    running = asyncio.create_task(cluster.generate_all(requests, concurrency=8))
    verdicts = []
    while not running.done():
        verdicts.append(await audited(cluster))
    await running
    plain = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(verdicts), plain
    assert any(each["entries"] for said in plain for router in said["routers"] for each in router["workers"])


async def test_pages_promised_to_nobody_known_are_found(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """A router that nobody knows reserves pages, and sits on them."""
    decode = worker(cluster, "decode-0")
    assert decode is not None
    request = WorkRequest("lost", tuple(prompt(40, 1)), prompt_length=40, sampling=Sampling(), max_tokens=8)
    async with grpc.aio.insecure_channel(decode.address) as channel:
        call = decode_pb2_grpc.DecodeServiceStub(channel).Connect(metadata=(("pdserve-router", "ghost"),))
        reserve = decode_pb2.Reserve(call=1, request=request_to_wire(request))
        await call.write(decode_pb2.ConnectRequest(reserve=reserve))
        answer = await call.read()
        assert isinstance(answer, decode_pb2.ConnectResponse)
        assert answer.reserved[0].HasField("ticket")
        assert not await audited(cluster)
        problems = json.loads(capsys.readouterr().out)["problems"]
        assert any(problem.startswith("decode-0: ghost owns it") for problem in problems), problems
        call.cancel()
    cluster.assert_clean()
    assert await audited(cluster), "its stream broke: all is free again"


async def test_a_stopped_worker_is_missed_and_comes_back_as_it_was(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    before = worker(cluster, "decode-1")
    assert before is not None
    await harm(cluster, Harm.STOP, "decode-1", for_s=5)  # a worker has 2.5 s to answer
    cluster.wait_until("missed", 3, lambda status: "decode-1" not in {each.id for each in status.workers})
    capsys.readouterr()
    assert not await audited(cluster)
    assert "decode-1 does not answer" in json.loads(capsys.readouterr().out)["problems"]
    cluster.wait_complete(4)
    after = worker(cluster, "decode-1")
    assert after is not None
    assert after.incarnation == before.incarnation
    assert await audited(cluster)


async def test_a_killed_worker_is_another_one_afterwards(cluster: Cluster) -> None:
    before = worker(cluster, "prefill-1")
    assert before is not None
    await harm(cluster, Harm.KILL, "prefill-1")
    cluster.wait_until(
        "gone", 5, lambda status: before.incarnation not in {each.incarnation for each in status.workers}
    )
    cluster.wait_complete(4)
    assert len((await cluster.generate(token_request(prompt(30, 3), 8))).token_ids) == 8


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_requests_go_on_over_cut_links(cluster: Cluster, name: str) -> None:
    requests = [token_request(prompt(300, n), 40, seed=n) for n in range(6)]
    running = asyncio.create_task(cluster.generate_all(requests, concurrency=6))
    await harm(cluster, Harm.CUT, name)
    assert all(len(answer.token_ids) == 40 for answer in await running)


async def test_a_slow_link_delays_the_second_token(cluster: Cluster) -> None:
    for name in ("prefill-0", "prefill-1"):
        await harm(cluster, Harm.SLOW, name, for_s=2, bytes_per_s=500e3)
    answer = await cluster.generate(token_request(prompt(400, 99), 3))
    assert answer.finished is not None
    slowest_s = answer.finished.workers.transfer_bytes / 500e3
    assert slowest_s > 0.3
    assert answer.finished.timings.second_token_ms > 0.8 * slowest_s * 1000


def test_the_commands_themselves(cluster: Cluster) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "cluster.cli", *arguments, "--address", cluster.address]
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        return done.returncode, done.stdout

    code, table = run("kv", "audit")
    assert (code, table.splitlines()[-1]) == (0, "clean: 4 workers, 0 holders")
    assert run("chaos", "cut", "decode-1") == (0, "decode-1: cut\n")
    assert run("chaos", "slow", "decode-1") == (
        2, "pdserve: chaos.slow: only prefill workers send payloads; name one of them\n"
    )  # fmt: skip
