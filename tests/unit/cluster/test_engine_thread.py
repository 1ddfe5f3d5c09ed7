"""The loop around an engine: delivers, fails, notices a step that does not move."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cluster import engine_thread
from cluster.engine_thread import EngineThread
from engine.pages import PageCounts
from pdserve.errors import Unavailable
from pdserve.ledger import Ledger


class Engine:
    """Steps as the test says."""

    def __init__(self) -> None:
        self.is_idle = True
        self.progress = 0
        self.num_requests = 3
        self.queued_tokens = 70
        self.steps: list[object] = []
        self.gate = threading.Event()
        self.gate.set()
        self.problems: tuple[str, ...] = ()

    def ledger(self) -> Ledger:
        assert threading.current_thread().name == "engine"
        return Ledger((), self.problems)

    def page_counts(self) -> PageCounts:
        return PageCounts(total=10, free=7, cached=0, in_use=3, promised=1)

    def step(self) -> list[object]:
        self.gate.wait()
        if self.steps and isinstance(self.steps[0], Exception):
            raise self.steps.pop(0)  # type: ignore[misc]
        return self.steps and [self.steps.pop(0)]

    def wait_for_command(self, timeout_s: float) -> None:
        threading.Event().wait(min(timeout_s, 0.005))


async def test_updates_arrive_on_the_loop_in_order() -> None:
    engine, got = Engine(), asyncio.Queue[list[object]]()
    engine.steps = [1, 2, 3]
    thread = EngineThread(engine, got.put_nowait)
    thread.start()
    assert [await asyncio.wait_for(got.get(), 2) for _ in range(3)] == [[1], [2], [3]]
    await thread.stop()
    assert thread.vitals().busy_s == 0
    assert 0 < thread.busy_s() < 1
    assert (thread.vitals().pages_in_use, thread.vitals().requests) == (3, 3)


async def test_an_engine_that_fails_ends_the_watch_with_its_error() -> None:
    engine = Engine()
    engine.steps = [ValueError("broken")]
    thread = EngineThread(engine, lambda update: None)
    thread.start()
    with pytest.raises(ValueError, match="broken"):
        await asyncio.wait_for(thread.watch(stuck_after_s=5), 3)


async def test_a_step_that_does_not_move_is_noticed_and_one_that_moves_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "WATCH_INTERVAL_S", 0.02)
    engine = Engine()
    engine.gate.clear()
    thread = EngineThread(engine, lambda update: None)
    thread.start()
    watch = asyncio.create_task(thread.watch(stuck_after_s=1.0))
    while thread.vitals().busy_s < 1.4:
        await asyncio.sleep(0.02)
        engine.progress += 1
    assert not watch.done()
    assert thread.busy_s() >= 1.4  # the step under way counts
    assert "one layer" in await asyncio.wait_for(watch, 5)
    engine.gate.set()
    await thread.stop()


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[EngineThread[list[object]]]:
    thread = EngineThread(engine, lambda update: None)
    thread.start()
    yield thread
    engine.gate.set()
    await thread.stop()


async def test_a_call_is_made_in_the_engines_thread_between_two_steps() -> None:
    async with running(Engine()) as thread:
        assert await thread.call(lambda: threading.current_thread().name) == "engine"
        with pytest.raises(ZeroDivisionError):
            await thread.call(lambda: 1 // 0)
        assert await thread.call(lambda: 7) == 7


async def test_a_stuck_engine_ends_a_call_with_a_typed_error_and_never_makes_it() -> None:
    engine, made = Engine(), []
    engine.gate.clear()
    async with running(engine) as thread:
        with pytest.raises(Unavailable, match=r"within 0\.2 s"):
            await thread.call(lambda: made.append(1), limit_s=0.2)
        engine.gate.set()
        await thread.call(lambda: None)
    assert made == []


async def test_an_idle_engine_audits_itself_and_what_was_broken_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_thread, "AUDIT_INTERVAL_S", 0.01)
    engine = Engine()
    engine.problems = ("a page is lost",)
    async with running(engine) as thread:
        async with asyncio.timeout(5):
            while not caplog.messages:
                await asyncio.sleep(0.01)
        engine.problems = ()
        audit = await thread.audit()
    assert audit.ledger.problems == ("a page is lost",)
    assert audit.pages.in_use == 3
    assert caplog.messages == ["the ledger of KV pages: a page is lost"]
