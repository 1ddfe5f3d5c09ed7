"""The real model through the real cluster: the same bits whatever the load, the worker and the chunking."""

import random
from pathlib import Path

import pytest

from tests.e2e.harness import running_cluster, token_request

LENGTHS = (1, 15, 16, 17, 255, 300, 2000, 2, 3, 5, 8, 13, 21, 31, 32, 33)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def test_the_whole_model_in_bfloat16(smollm2_folder: Path, tmp_path: Path) -> None:
    """Top-20 log-probabilities, as raw floats, of 16 requests at once and of each alone; float32 is tested in
    tests/integration/test_relay.py, with fewer layers."""
    draw = random.Random(5)
    prompts = [[draw.randrange(100, 40_000) for _ in range(length)] for length in LENGTHS]
    requests = [token_request(prompt, 8, top_logprobs=20) for prompt in prompts]
    flags = ("--model", str(smollm2_folder), "--prefill", "2", "--decode", "2", "--dtype", "bfloat16")
    with running_cluster(tmp_path, *flags) as cluster:
        assert all(worker.exact for worker in cluster.status().workers)
        together = await cluster.generate_all(requests, concurrency=16)
        alone = await cluster.generate_all(requests, concurrency=1)
        assert [answer.logprobs for answer in together] == [answer.logprobs for answer in alone]
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
        assert {answer.finished.workers.decode for answer in together if answer.finished} == {"decode-0", "decode-1"}
        cluster.assert_clean()
