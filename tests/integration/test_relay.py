"""Prefill and decode over loopback links and real gRPC, in one process: the answer is that of a single engine."""

import asyncio
import random
from pathlib import Path

import pytest

from engine.load import Engine
from pdserve.request import Sampling, WorkRequest
from router.record import RequestRecord
from tests.inprocess import in_process, reference
from tests.short_model import write_short_model
from tests.toy import toy_engine, write_toy_model


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> list[Engine]:
    folder: Path = write_toy_model(tmp_path_factory.mktemp("toy"))
    return [toy_engine(folder, num_pages=256) for _ in range(4)]


def request(length: int, max_tokens: int, *, seed: int | None = None, top_logprobs: int = 0) -> WorkRequest:
    token_ids = tuple((7 * i * i + 13 * i + length) % 500 + 3 for i in range(length))
    sampling = Sampling(temperature=0.0) if seed is None else Sampling(seed=seed)
    return WorkRequest(f"r{length}", token_ids, length, sampling, max_tokens, top_logprobs=top_logprobs)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 255, 300])
@pytest.mark.parametrize("seed", [None, 4])
async def test_disaggregated_equals_one_engine_bit_for_bit(
    engines: list[Engine], length: int, seed: int | None
) -> None:
    work = request(length, 40, seed=seed, top_logprobs=5)
    async with in_process(engines[:1], engines[1:2]) as cluster:
        record = RequestRecord(arrived=0.0)
        assert await cluster.complete(work, record) == reference(engines[2], work)
        layout = engines[0].card.kv_layout
        assert record.kv_bytes == layout.pages_for(length) * layout.page_bytes
        assert (record.computed_tokens, record.decode_steps) == (length, 39)
        await cluster.assert_clean()


async def test_many_at_once_over_two_and_two_workers(engines: list[Engine]) -> None:
    works = [request(1 + 17 * i, 30, seed=i) for i in range(16)]
    expected = [reference(engines[0], work) for work in works]
    async with in_process(engines[:2], engines[2:]) as cluster:
        assert await asyncio.gather(*map(cluster.complete, works)) == expected
        await cluster.assert_clean()


@pytest.mark.slow
async def test_real_shapes_in_float32_at_any_load(smollm2_folder: Path, tmp_path: Path) -> None:
    """As the whole model in tests/e2e/test_smollm2.py: what differs between the types is in every layer."""
    folder, draw = write_short_model(smollm2_folder, tmp_path / "short", num_layers=4), random.Random(5)
    lengths = (1, 15, 16, 17, 255, 300, 2000, 2, 3, 5, 8, 13, 21, 31, 32, 33)
    prompts = [tuple(draw.randrange(100, 40_000) for _ in range(length)) for length in lengths]
    greedy = Sampling(temperature=0.0)
    works = [WorkRequest("", each, len(each), greedy, 8, top_logprobs=20) for each in prompts]
    engines = [toy_engine(folder, num_pages=256) for _ in range(4)]
    assert engines[0].card.exact
    expected = [reference(engines[0], work) for work in works]
    async with in_process(engines[:2], engines[2:]) as cluster:
        records = [RequestRecord(arrived=0.0) for _ in works]
        assert await asyncio.gather(*map(cluster.complete, works, records)) == expected
        assert {record.decode.id for record in records if record.decode} == {"decode-0", "decode-1"}
        await cluster.assert_clean()


async def test_one_token_needs_no_decode_worker(engines: list[Engine]) -> None:
    work = request(20, 1)
    async with in_process(engines[:1], engines[1:2]) as cluster:
        record = RequestRecord(arrived=0.0)
        assert await cluster.complete(work, record) == reference(engines[2], work)
        assert record.decode is None
        assert record.kv_bytes == 0
        await cluster.assert_clean()


async def test_the_first_token_may_end_the_request(engines: list[Engine]) -> None:
    work = request(100, 10)
    first = reference(engines[2], work)[0]
    work = WorkRequest("", work.token_ids, 100, work.sampling, 10, stop_token_ids=frozenset([first.token_id]))
    async with in_process(engines[:1], engines[1:2]) as cluster:
        assert [token.finish for token in await cluster.complete(work)] == ["stop_token"]
        await cluster.assert_clean()
