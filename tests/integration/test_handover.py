"""Decode uses what was pushed and nothing else; cancelling frees both sides in every state."""

import asyncio
import inspect
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from decode_worker.commands import Reserve
from engine.load import Engine
from pdserve.request import Sampling, Token, WorkRequest
from router.record import RequestRecord
from tests.inprocess import InProcess, in_process, reference, settle
from tests.toy import toy_engine, write_toy_model

CANCELS = 10  # in each of five states


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> list[Engine]:
    """Of a prefill worker, of a decode worker, for references."""
    folder: Path = write_toy_model(tmp_path_factory.mktemp("toy"))
    return [toy_engine(folder, num_pages=256) for _ in range(3)]


def request(length: int = 200, max_tokens: int = 12, kind: int = 0) -> WorkRequest:
    """Of each kind another prompt, from the first token on."""
    token_ids = tuple((11 * i * i + (5 + kind) * i + kind) % 500 + 3 for i in range(length))
    return WorkRequest("", token_ids, length, Sampling(temperature=0.0), max_tokens, top_logprobs=20)


async def test_decode_never_looks_at_its_copy_of_the_prompt(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = request()
    async with in_process(engines[:1], engines[1:2]) as cluster:
        tickets = cluster.decodes[0].worker._tickets
        reserve = tickets.reserve

        def poisoned(asked: Reserve) -> object:
            return reserve(replace(asked, request=replace(work, token_ids=(3,) * 200)))

        monkeypatch.setattr(tickets, "reserve", poisoned)
        assert await cluster.complete(work) == reference(engines[2], work)


@pytest.mark.parametrize("payload", range(3))
async def test_a_byte_corrupted_in_flight_changes_the_logits(engines: list[Engine], payload: int) -> None:
    work, slot_bytes = request(), 6 * engines[0].card.kv_layout.page_bytes
    async with in_process(
        engines[:1], engines[1:2], chunk_tokens=128, slot_bytes=slot_bytes, verify_kv=False
    ) as cluster:
        # the top byte of a K element: large enough to show in the attention of every later token
        cluster.loopback.corrupt(payload, 3)
        tokens, expected = await cluster.complete(work), reference(engines[2], work)
        assert cluster.loopback.num_arrived == 3
        assert tokens[0] == expected[0], "the first token is prefill's own"
        assert [token.top_logprobs for token in tokens[1:]] != [token.top_logprobs for token in expected[1:]]


async def test_a_byte_corrupted_in_flight_is_found_by_its_checksum_and_costs_a_resume(engines: list[Engine]) -> None:
    work, record = request(), RequestRecord(arrived=0.0)
    async with in_process(engines[:1], engines[1:2]) as cluster:
        cluster.loopback.corrupt(1, 3)
        assert await cluster.complete(work, record) == reference(engines[2], work)
        assert record.resumes == 1
        await cluster.assert_clean()


@pytest.fixture
async def stepped(engines: list[Engine]) -> AsyncIterator[InProcess]:
    layout = engines[0].card.kv_layout
    async with in_process(
        engines[:1], engines[1:2], stepped=True, chunk_tokens=64, slot_bytes=2 * layout.page_bytes
    ) as cluster:
        while not cluster.decodes[0].servicer._outboxes:  # the router's stream is up
            await settle()
        tasks, threads = our_tasks(), threading.active_count()
        yield cluster
        await settle()
        assert not our_tasks() - tasks
        assert threading.active_count() <= threads


def our_tasks() -> Counter[str]:
    """What runs, but for the tasks of gRPC and of the test itself."""
    coroutines = (task.get_coro() for task in asyncio.all_tasks() if task is not asyncio.current_task())
    return Counter(each.__qualname__ for each in coroutines if inspect.iscoroutine(each) and "grpc" not in repr(each))


class Client:
    """One request whose tokens are collected in the background; `leave` is what a cancelled client does."""

    def __init__(self, cluster: InProcess, work: WorkRequest) -> None:
        self.tokens: list[Token] = []
        self.record = RequestRecord(arrived=0.0)
        self._generation: AsyncGenerator[Token, None] = cluster.pipeline.generate(work, 0, self.record)
        self._task = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        try:
            async for token in self._generation:
                self.tokens.append(token)
        finally:
            await self._generation.aclose()

    def is_over(self) -> bool:
        return self._task.done()

    async def outcome(self) -> None:
        await self._task

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await settle()


async def step_until(
    cluster: InProcess, holds: Callable[[], bool], *, prefill: bool = True, decode: bool = True
) -> None:
    """Step the engines until something holds; messages need a moment between steps."""
    async with asyncio.timeout(10):
        while not holds():
            if prefill:
                await cluster.prefills[0].step()
            if decode:
                await cluster.decodes[0].step()


async def reserve(cluster: InProcess, kind: int) -> Client:
    client = Client(cluster, request(kind=kind))
    await step_until(cluster, lambda: cluster.decodes[0].worker.page_counts().promised > 0, prefill=False)
    return client


async def finish(cluster: InProcess) -> None:
    await step_until(cluster, cluster.is_clean)
    await cluster.assert_clean()


async def test_cancel_while_queued(stepped: InProcess) -> None:
    for kind in range(CANCELS):
        client = Client(stepped, request(kind=kind))
        await settle()
        assert len(stepped.room) == 1, "reserve has not been answered: it waits in the router"
        assert stepped.prefills[0].worker.num_requests == 0
        await client.leave()
    await finish(stepped)


async def test_cancel_while_prefilling(stepped: InProcess) -> None:
    for kind in range(CANCELS):
        client = await reserve(stepped, kind)
        prefill = stepped.prefills[0].worker
        await step_until(stepped, lambda: 0 < prefill.queued_tokens < 170, decode=False)  # noqa: B023 - awaited at once
        assert client.tokens == []
        await client.leave()
        await finish(stepped)


async def test_cancel_while_transferring(stepped: InProcess) -> None:
    for kind in range(CANCELS):
        client = await reserve(stepped, kind)
        stepped.loopback.hold()
        await step_until(stepped, lambda: len(client.tokens) == 1, decode=False)  # noqa: B023 - awaited at once
        assert stepped.prefills[0].worker.num_requests == 1, "the first token came while the KV is held back"
        await client.leave()
        stepped.loopback.release()  # what was announced still flows, into scratch
        await finish(stepped)


async def test_cancel_while_decoding(stepped: InProcess) -> None:
    for kind in range(CANCELS):
        client = await reserve(stepped, kind)
        await step_until(stepped, lambda: len(client.tokens) >= 3)  # noqa: B023 - awaited at once
        assert len(client.tokens) < 12
        await client.leave()
        await finish(stepped)


async def test_cancel_in_the_middle_of_a_pass(stepped: InProcess) -> None:
    prefill = stepped.prefills[0].worker
    for kind in range(CANCELS):
        client = await reserve(stepped, kind)
        before = prefill.progress
        await step_until(stepped, lambda: (prefill.progress - before) % 3 > 0, decode=False)  # noqa: B023 - awaited at once
        await client.leave()
        await finish(stepped)


async def test_a_payload_for_a_dead_ticket_is_scrapped_and_the_request_resumes(
    stepped: InProcess, engines: list[Engine]
) -> None:
    client = await reserve(stepped, 0)
    stepped.loopback.hold()
    await step_until(stepped, lambda: len(client.tokens) == 1, decode=False)
    table = stepped.decodes[0].worker._tickets
    for entry in table.all():
        table.drop(entry)
    stepped.loopback.release()
    await step_until(stepped, client.is_over)
    await client.outcome()
    assert (client.record.resumes, client.tokens) == (1, reference(engines[2], request()))
    await finish(stepped)
