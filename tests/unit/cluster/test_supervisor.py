"""A supervised process is started again, drained politely, and never outlives its supervisor."""

import asyncio
import sys
from pathlib import Path

import pytest

from cluster import patience as patiences
from cluster.patience import Patience
from cluster.supervisor import Supervisor
from pdserve.errors import Unavailable

TICK = "import sys, time; print('up', flush=True); time.sleep(60)"
POLITE = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patiences, "FIRST_WAIT_S", 0.01)


def supervisor(tmp_path: Path, program: str) -> Supervisor:
    return Supervisor("router", [sys.executable, "-c", program], tmp_path / "log", Patience("router"))


async def ups(tmp_path: Path, count: int) -> None:
    """Wait until the program has started so many times."""
    log = tmp_path / "log"
    async with asyncio.timeout(20):
        while not log.exists() or log.read_text().count("up") < count:
            await asyncio.sleep(0.02)  # a file has nobody to wake us


async def cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait([task])


async def test_it_is_started_again(tmp_path: Path) -> None:
    router = supervisor(tmp_path, TICK)
    keeping = asyncio.create_task(router.keep())
    await ups(tmp_path, 1)
    router.kill()
    await ups(tmp_path, 2)
    await cancelled(keeping)
    await router.drain(5)


@pytest.mark.parametrize(("program", "code"), [(POLITE, 0), (STUBBORN, -9)])
async def test_it_is_asked_first_and_killed_after_the_limit(tmp_path: Path, program: str, code: int) -> None:
    router = supervisor(tmp_path, program)
    keeping = asyncio.create_task(router.keep())
    await ups(tmp_path, 1)
    await cancelled(keeping)
    await router.drain(5 if program is POLITE else 0.2)
    assert router._process
    assert router._process.returncode == code
    await router.drain(5)  # twice is harmless


async def test_a_hopeless_program_ends_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="router failed 3 times: exit code 3: no such model"):
        await supervisor(tmp_path, "import sys; print('no such model'); sys.exit(3)").keep()
