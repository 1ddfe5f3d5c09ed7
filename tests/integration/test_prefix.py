"""Prefix caching on both sides, through real workers: not one bit changes, and the counts are exact."""

import asyncio
from pathlib import Path

import pytest

from engine.load import Engine
from pdserve.request import Sampling, Token, WorkRequest
from router.record import RequestRecord
from tests.inprocess import InProcess, in_process, reference
from tests.toy import toy_engine, write_toy_model

PAGE = 16


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> list[Engine]:
    """Of a prefill worker, of a decode worker, for references."""
    folder: Path = write_toy_model(tmp_path_factory.mktemp("toy"))
    return [toy_engine(folder, num_pages=256) for _ in range(3)]


def request(token_ids: tuple[int, ...], max_tokens: int = 20) -> WorkRequest:
    return WorkRequest("", token_ids, len(token_ids), Sampling(seed=7), max_tokens, top_logprobs=20)


def text(length: int, kind: int = 0) -> tuple[int, ...]:
    return tuple((11 * i * i + (5 + kind) * i + kind) % 500 + 3 for i in range(length))


async def complete(cluster: InProcess, work: WorkRequest) -> tuple[list[Token], RequestRecord]:
    record = RequestRecord(arrived=0.0)
    return await cluster.complete(work, record), record


def pages_pushed(record: RequestRecord, engine: Engine) -> float:
    return record.kv_bytes / engine.card.kv_layout.page_bytes


@pytest.mark.parametrize("tail", [1, 12, 13, 60, 150])
async def test_a_shared_prefix_changes_no_bit_and_is_neither_computed_nor_pushed_again(
    engines: list[Engine], tail: int
) -> None:
    shared, cold = text(100), request((*text(100), *text(tail, 3)))
    async with in_process(engines[:1], engines[1:2]) as cluster:
        await complete(cluster, request((*shared, *text(40, 1))))
        tokens, record = await complete(cluster, cold)
        assert tokens == reference(engines[2], cold)
        assert (record.cached_tokens, record.computed_tokens) == (96, 4 + tail)
        assert pages_pushed(record, engines[0]) == -(-(100 + tail) // PAGE) - 6
        await cluster.assert_clean()


async def test_a_chat_of_five_turns_pushes_only_what_decode_lacks(engines: list[Engine]) -> None:
    history: tuple[int, ...] = ()
    known_to_prefill = known_to_decode = 0  # whole pages
    async with in_process(engines[:1], engines[1:2]) as cluster:
        for turn in range(5):
            work = request((*history, *text(30 + 9 * turn, turn)), max_tokens=21 + turn)
            length, findable = len(work.token_ids), (len(work.token_ids) - 1) // PAGE
            tokens, record = await complete(cluster, work)
            assert tokens == reference(engines[2], work)
            assert record.cached_tokens == PAGE * min(known_to_prefill, findable)
            assert record.computed_tokens == length - record.cached_tokens
            assert pages_pushed(record, engines[0]) == -(-length // PAGE) - min(known_to_decode, findable)
            assert record.decode_steps == len(tokens) - 1
            history = (*work.token_ids, *(token.token_id for token in tokens))
            known_to_prefill, known_to_decode = length // PAGE, (len(history) - 1) // PAGE  # not the last one's KV
        assert known_to_decode > known_to_prefill > 10, "decode kept its own answers"
        await cluster.assert_clean()


async def test_a_shared_prompt_is_computed_once_and_pushed_by_the_first_that_needs_it(engines: list[Engine]) -> None:
    works = [request((*text(300), *text(9, kind)), max_tokens=4) for kind in range(1, 33)]
    async with in_process(engines[:1], engines[1:2]) as cluster:
        outcomes = await asyncio.gather(*(complete(cluster, work) for work in works))
        records = [record for _, record in outcomes]
        assert sum(record.computed_tokens for record in records) == 309 + 31 * (309 - 288)
        assert sum(record.cached_tokens for record in records) == 31 * 288
        assert [tokens for tokens, _ in outcomes] == [reference(engines[2], work) for work in works]
        await cluster.assert_clean()
