"""Who waits for whom, and how waiting ends: real workers of a toy model in one process."""

import asyncio
from pathlib import Path

import pytest

from engine.load import Engine
from pdserve.errors import InvalidRequest, QueueFull, Unavailable
from pdserve.request import Sampling, WorkRequest
from router import dispatch
from router.record import RequestRecord
from tests.inprocess import in_process
from tests.toy import toy_engine, write_toy_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_model(tmp_path_factory.mktemp("toy"))


def engines(folder: Path, *, decode_pages: int) -> tuple[list[Engine], list[Engine]]:
    return [toy_engine(folder, "float32", 256)], [toy_engine(folder, "float32", decode_pages)]


def request(length: int, max_tokens: int) -> WorkRequest:
    return WorkRequest("", tuple(range(3, 3 + length)), length, Sampling(temperature=0.0), max_tokens)


async def test_what_does_not_fit_now_waits_until_it_does(folder: Path) -> None:
    async with in_process(*engines(folder, decode_pages=8)) as cluster:
        answers = await asyncio.gather(*(cluster.complete(request(60, 60)) for _ in range(5)))
        assert [len(tokens) for tokens in answers] == [60] * 5
        await cluster.assert_clean()


async def test_what_never_fits_is_refused_with_the_numbers(folder: Path) -> None:
    async with in_process(*engines(folder, decode_pages=8)) as cluster:
        with pytest.raises(InvalidRequest, match="need 200 tokens, a worker holds 128"):
            await cluster.complete(request(100, 100))
        await cluster.assert_clean()


async def test_lower_priority_numbers_are_served_first(folder: Path) -> None:
    async with in_process(*engines(folder, decode_pages=8)) as cluster:
        done: list[int] = []

        async def one(priority: int) -> None:
            record = RequestRecord(arrived=0.0)
            async for _ in cluster.pipeline.generate(request(60, 60), priority, record):
                pass
            done.append(priority)

        running = asyncio.create_task(one(9))  # takes all the pages
        while cluster.pipeline.num_running == 0:
            await asyncio.sleep(0)
        await asyncio.gather(running, *(one(priority) for priority in (5, 1, 3, 2, 4)))
        assert done == [9, 1, 2, 3, 4, 5]


def own(kind: int, length: int) -> WorkRequest:
    """A prompt that shares nothing with one of another kind."""
    token_ids = tuple((7 * i * i + 13 * i + kind * (i + 31)) % 500 + 3 for i in range(length))
    return WorkRequest("", token_ids, length, Sampling(temperature=0.0), max_tokens=3)


async def test_short_prompts_do_not_wait_for_long_ones_that_came_before(folder: Path) -> None:
    async with in_process(*engines(folder, decode_pages=256)) as cluster:
        first_tokens: list[int] = []  # lengths of prompts in order

        async def one(kind: int, length: int) -> None:
            record = RequestRecord(arrived=0.0)
            async for token in cluster.pipeline.generate(own(kind, length), 0, record):
                if token.number == 0:
                    first_tokens.append(length)

        await asyncio.gather(*(one(kind, 300) for kind in range(5)), *(one(kind, 20) for kind in range(5, 25)))
        assert first_tokens[:21].count(20) == 20, "but for the one that was under way"
        await cluster.assert_clean()


async def test_a_full_queue_refuses_at_once(folder: Path) -> None:
    async with in_process(*engines(folder, decode_pages=8)) as cluster:
        outcomes = await asyncio.gather(
            *(cluster.complete(request(110, 10)) for _ in range(70)), return_exceptions=True
        )
        refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert 0 < len(refused) <= 6
        assert all(isinstance(error, QueueFull) and error.retry_after_s > 0 for error in refused)
        await cluster.assert_clean()


async def test_without_workers_waiting_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "NO_WORKER_LIMIT_S", 0.5)
    async with in_process(*engines(folder, decode_pages=8)) as cluster:
        cluster.members.set()
        async with asyncio.timeout(5):
            while cluster.directory.prefills:
                await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="no prefill worker has reached a decode worker"):
            await asyncio.wait_for(cluster.complete(request(10, 10)), 5)
