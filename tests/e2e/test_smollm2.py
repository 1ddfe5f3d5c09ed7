"""The real model through the real cluster: the same bits whatever the load, the worker and the chunking."""

import random
from pathlib import Path

import pytest

from tests.e2e.harness import running_cluster, token_request
from tests.short_model import write_short_model

LENGTHS = (1, 15, 16, 17, 255, 300, 2000, 2, 3, 5, 8, 13, 21, 31, 32, 33)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def test_the_whole_model_in_bfloat16(smollm2_folder: Path, tmp_path: Path) -> None:
    await check_bits_at_any_load(smollm2_folder, tmp_path, "bfloat16")


async def test_its_first_layers_in_float32(smollm2_folder: Path, tmp_path: Path) -> None:
    """What differs between the types is in every layer."""
    await check_bits_at_any_load(write_short_model(smollm2_folder, tmp_path / "short", 4), tmp_path, "float32")


async def check_bits_at_any_load(model: Path, folder: Path, dtype: str) -> None:
    """Top-20 log-probabilities, as raw floats, of 16 requests at once and of each alone."""
    draw = random.Random(5)
    prompts = [[draw.randrange(100, 40_000) for _ in range(length)] for length in LENGTHS]
    requests = [token_request(prompt, 8, top_logprobs=20) for prompt in prompts]
    flags = ("--model", str(model), "--prefill", "2", "--decode", "2", "--dtype", dtype)
    with running_cluster(folder, *flags) as cluster:
        assert all(worker.exact for worker in cluster.status().workers)
        together = await cluster.generate_all(requests, concurrency=16)
        alone = await cluster.generate_all(requests, concurrency=1)
        assert [answer.logprobs for answer in together] == [answer.logprobs for answer in alone]
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
        assert {answer.finished.workers.decode for answer in together if answer.finished} == {"decode-0", "decode-1"}
        cluster.assert_clean()
