"""The real model through the real cluster: the same bits whatever the load, the worker and the chunking."""

import random
from pathlib import Path

import pytest

from tests.e2e.harness import running_cluster, token_request

LENGTHS = (1, 15, 16, 17, 255, 300, 2000, *range(20, 110, 10))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_top_20_logprobs_are_bit_equal_at_any_load(smollm2_folder: Path, tmp_path: Path, dtype: str) -> None:
    draw = random.Random(5)
    prompts = [[draw.randrange(100, 40_000) for _ in range(length)] for length in LENGTHS]
    requests = [token_request(prompt, 8, top_logprobs=20) for prompt in prompts]
    flags = ("--model", str(smollm2_folder), "--prefill", "2", "--decode", "2", "--dtype", dtype)
    with running_cluster(tmp_path, *flags) as cluster:
        assert all(worker.exact for worker in cluster.status().workers)
        together = await cluster.generate_all(requests, concurrency=16)
        alone = await cluster.generate_all(requests, concurrency=1)
        assert [answer.logprobs for answer in together] == [answer.logprobs for answer in alone]
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
        assert {answer.finished.workers.decode for answer in together if answer.finished} == {"decode-0", "decode-1"}
        cluster.assert_clean()
