"""The order of a drain: refuse, let finish, expel, wait, leave."""

import asyncio

import pytest

from cluster import drain as module
from cluster.drain import Drain
from pdserve.errors import Draining, PdserveError


class Worker:
    """Keeps what it is told; obeys `expel` unless it is stubborn."""

    def __init__(self, num_requests: int = 0, stubborn: bool = False) -> None:
        self.num_requests = num_requests
        self.stubborn = stubborn
        self.commands: list[str | PdserveError] = []

    def submit(self, command: str | PdserveError) -> None:
        self.commands.append(command)
        if isinstance(command, PdserveError) and not self.stubborn:
            self.num_requests = 0


def drain_of(worker: Worker) -> Drain[str | PdserveError]:
    return Drain(worker, "refuse", lambda error: error)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_S", 0.01)
    monkeypatch.setattr(module, "LINGER_S", 0.01)
    monkeypatch.setattr(module, "EXPEL_LIMIT_S", 0.1)


async def test_an_idle_worker_leaves_at_once() -> None:
    worker = Worker()
    drain = drain_of(worker)
    running = asyncio.create_task(drain.run())
    await asyncio.sleep(0.05)
    assert not running.done(), "nobody has told it to leave"
    assert not drain.is_draining
    drain.begin(30)
    assert drain.is_draining
    async with asyncio.timeout(5):
        assert await running == "drained"
    assert worker.commands == ["refuse"]


async def test_running_work_finishes_inside_the_limit() -> None:
    worker = Worker(num_requests=2)
    drain = drain_of(worker)
    drain.begin(30)
    running = asyncio.create_task(drain.run())
    await asyncio.sleep(0.05)
    assert not running.done()
    worker.num_requests = 0
    async with asyncio.timeout(5):
        assert await running == "drained"
    assert worker.commands == ["refuse"]


async def test_what_outlasts_the_limit_is_expelled() -> None:
    worker = Worker(num_requests=3)
    drain = drain_of(worker)
    drain.begin(0.05)
    async with asyncio.timeout(5):
        assert await drain.run() == "drained; 3 of its requests go on elsewhere"
    refuse, expel = worker.commands
    assert refuse == "refuse"
    assert isinstance(expel, Draining)


async def test_a_worker_that_does_not_let_go_leaves_all_the_same() -> None:
    worker = Worker(num_requests=1, stubborn=True)
    drain = drain_of(worker)
    drain.begin(0)
    async with asyncio.timeout(5):
        assert await drain.run() == "drained; 1 of its requests go on elsewhere"


async def test_a_second_command_shortens_the_limit_and_never_lengthens_it() -> None:
    worker = Worker(num_requests=1)
    drain = drain_of(worker)
    drain.begin(30)
    running = asyncio.create_task(drain.run())
    drain.begin(0.05)
    drain.begin(30)
    async with asyncio.timeout(5):
        await running
    assert [type(command) for command in worker.commands] == [str, Draining]
