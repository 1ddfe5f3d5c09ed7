"""A leg is lost in mid-request: the answer is that of an undisturbed run, bit for bit."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.load import Engine
from pdserve.errors import Unavailable
from pdserve.request import Sampling, Token, WorkRequest
from router import dispatch
from router.record import RequestRecord
from tests.inprocess import InProcess, in_process
from tests.toy import toy_engine, write_toy_model

PROMPT = tuple((7 * i * i + 13 * i) % 500 + 3 for i in range(150))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_model(tmp_path_factory.mktemp("toy"))


def engines(folder: Path, count: int) -> list[Engine]:
    return [toy_engine(folder, "float32", 128) for _ in range(count)]


def request(salt: int, max_tokens: int = 120) -> WorkRequest:
    sampling = Sampling(seed=salt) if salt % 2 else Sampling(temperature=0.0)
    return WorkRequest(f"r{salt}", PROMPT[salt:], len(PROMPT) - salt, sampling, max_tokens, top_logprobs=3)


async def undisturbed(folder: Path, works: list[WorkRequest]) -> list[list[Token]]:
    async with in_process(engines(folder, 1), engines(folder, 1)) as cluster:
        return await asyncio.gather(*map(cluster.complete, works))


class Follower:
    """One request under way."""

    def __init__(self, cluster: InProcess, work: WorkRequest) -> None:
        self.tokens: list[Token] = []
        self.record = RequestRecord(arrived=0.0)
        self._cluster, self._work = cluster, work
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> list[Token]:
        async for token in self._cluster.pipeline.generate(self._work, 0, self.record):
            self.tokens.append(token)
        return self.tokens


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.002)


async def test_a_lost_decode_worker_costs_no_token(folder: Path) -> None:
    works = [request(salt) for salt in range(6)]
    expected = await undisturbed(folder, works)
    async with in_process(engines(folder, 1), engines(folder, 2)) as cluster:
        followers = [Follower(cluster, work) for work in works]
        await until(lambda: all(len(each.tokens) > 5 for each in followers))
        await cluster.decodes[0].server.stop(0)
        assert await asyncio.gather(*(each.task for each in followers)) == expected
        resumed = [each.record for each in followers if each.record.resumes]
        assert 0 < len(resumed) < 6
        for record in resumed:
            assert record.completion_tokens == 120
            assert record.decode_steps == 119 - record.resumes  # the first token of an attempt is prefill's
        await until(cluster.is_clean)


async def test_a_lost_prefill_worker_costs_no_token(folder: Path) -> None:
    works = [request(salt, 40) for salt in range(4)]
    expected = await undisturbed(folder, works)
    async with in_process(engines(folder, 2), engines(folder, 1), stepped=True) as cluster:
        followers = [Follower(cluster, work) for work in works]
        victim, other = cluster.prefills
        while cluster.pipeline.num_running < 2:
            await cluster.decodes[0].step()
        await victim.step()  # in the middle of its first prompt
        await victim.server.stop(0)
        async with asyncio.timeout(60):
            while not all(each.task.done() for each in followers):
                await other.step()
                await cluster.decodes[0].step()
        assert [each.task.result() for each in followers] == expected
        assert any(each.record.resumes for each in followers)


async def test_a_cut_link_costs_no_token(folder: Path) -> None:
    works = [request(salt) for salt in range(4)]
    expected = await undisturbed(folder, works)
    async with in_process(engines(folder, 1), engines(folder, 1)) as cluster:
        cluster.loopback.hold()
        followers = [Follower(cluster, work) for work in works]
        await until(lambda: any(each.tokens for each in followers))  # sampled, and its KV is under way
        assert cluster.prefills[0].links.cut() == 1
        cluster.loopback.release()
        assert await asyncio.gather(*(each.task for each in followers)) == expected
        assert any(each.record.resumes for each in followers)
        await until(cluster.is_clean)


async def test_without_a_spare_the_error_says_what_happened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "NO_WORKER_LIMIT_S", 0.5)
    async with in_process(engines(folder, 1), engines(folder, 1)) as cluster:
        follower = Follower(cluster, request(0, 300))
        await until(lambda: len(follower.tokens) > 3)
        await cluster.decodes[0].server.stop(0)
        with pytest.raises(Unavailable, match="no prefill worker has reached a decode worker"):
            await asyncio.wait_for(follower.task, 10)
        assert [token.number for token in follower.tokens] == list(range(len(follower.tokens)))


async def test_a_client_may_come_with_tokens_of_its_own(folder: Path) -> None:
    work = request(1)
    [expected] = await undisturbed(folder, [work])
    async with in_process(engines(folder, 1), engines(folder, 1)) as cluster:
        for kept in (1, 60, 119):
            emitted = [token.token_id for token in expected[:kept]]
            record = RequestRecord(arrived=0.0)
            assert await cluster.complete(work.resumed(emitted), record) == expected[kept:]
            assert record.resumes == 0
        shorter = replace(work, max_tokens=61)
        [last] = await cluster.complete(shorter.resumed([token.token_id for token in expected[:60]]))
        assert (last.number, last.finish) == (60, "length")
