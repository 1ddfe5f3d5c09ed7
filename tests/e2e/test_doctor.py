"""What workers say of their speed, and what `pdserve doctor` makes of it, on the shared cluster."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from decode_worker.capacity import capacity
from engine.config_file import read_config
from engine.kv_cache import kv_layout
from pdserve.v1.cluster_pb2 import GetStatusResponse, Work
from pdserve.v1.generation_pb2 import GenerateRequest
from tests.e2e.harness import ROOT, Cluster, token_request

PROMPT, COMPLETION, COUNT = 200, 20, 6


def load() -> list[GenerateRequest]:
    """Prompts of which nothing is cached by another one."""
    prompts = [[3 + (37 * n + i) % 500 for i in range(PROMPT)] for n in range(COUNT)]
    return [token_request(prompt, COMPLETION) for prompt in prompts]


def totals(status: GetStatusResponse, role: str) -> Work:
    """Of all workers of a role."""
    works = [worker.work for worker in status.workers if worker.role == role]
    return Work(tokens=sum(work.tokens for work in works), flops=sum(work.flops for work in works))


async def test_workers_count_every_token_that_they_compute(cluster: Cluster) -> None:
    before = cluster.status()
    answers = await cluster.generate_all(load(), COUNT)
    usages = [answer.finished.usage for answer in answers if answer.finished]
    computed, steps = sum(each.prefill_tokens_computed for each in usages), sum(each.decode_steps for each in usages)
    assert steps == COUNT * (COMPLETION - 1)

    def is_counted(status: GetStatusResponse) -> bool:
        grown = [totals(status, role).tokens - totals(before, role).tokens for role in ("prefill", "decode")]
        return grown == [computed, steps]

    status = cluster.wait_until("counted", 5, is_counted)
    assert totals(status, "prefill").flops > totals(before, "prefill").flops
    assert all(worker.limits.flops_per_s > 0 and worker.limits.read_bytes_per_s > 0 for worker in status.workers)


async def test_doctor_sees_running_workers_beside_their_floors(cluster: Cluster, toy_folder: Path) -> None:
    lengths = ("--prompt-tokens", "100", "--completion-tokens", "50")
    command = (sys.executable, "-m", "cluster.cli", "doctor", str(toy_folder), "--address", cluster.address, *lengths)
    process = await asyncio.create_subprocess_exec(*command, "--json", cwd=ROOT, stdout=subprocess.PIPE)
    output = asyncio.create_task(process.communicate())
    async with asyncio.timeout(100):
        while not output.done():  # it looks at the last seconds, whenever it has loaded
            await cluster.generate_all(load(), COUNT)
    found = json.loads((await output)[0])
    assert process.returncode == 0
    assert {each["role"] for each in found["workers"]} == {"prefill", "decode"}
    assert all(each["mbu"] > 0 and 0 < each["busy"] <= 1 for each in found["workers"])
    layout = kv_layout(read_config(toy_folder), "float32")
    pages = [worker.pages.total for worker in cluster.status().workers if worker.role == "decode"]
    assert found["room"]["pages"] == pages
    assert found["room"]["admitted"] == sum(capacity(layout, each, 100, 50).admitted for each in pages)
