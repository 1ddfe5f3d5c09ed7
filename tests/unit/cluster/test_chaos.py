"""Harm on demand: refused unless allowed, and done to the right process."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from cluster.chaos import PAUSE, Chaos
from pdserve.errors import InvalidRequest
from pdserve.v1.cluster_pb2 import Chaos as Harm
from pdserve.v1.cluster_pb2 import Slow


class Links:
    """Keeps what is done to it."""

    def __init__(self) -> None:
        self.done: list[object] = []

    def cut(self) -> int:
        self.done.append("cut")
        return 1

    def slow(self, bytes_per_s: float, for_s: float) -> None:
        self.done.append((bytes_per_s, for_s))


@pytest.mark.parametrize("harm", [Harm(kill=True), Harm(stop_s=1), Harm(cut=True), Harm(slow=Slow(for_s=1))])
async def test_without_the_flag_everything_is_refused(harm: Harm) -> None:
    links = Links()
    with pytest.raises(InvalidRequest, match="not started with --chaos"):
        await Chaos(False, links, links).inflict(harm)
    assert links.done == []


async def test_links_are_cut_and_slowed() -> None:
    links = Links()
    chaos = Chaos(True, links, links)
    await chaos.inflict(Harm(cut=True))
    await chaos.inflict(Harm(slow=Slow(bytes_per_s=1e6, for_s=2)))
    assert links.done == ["cut", (1e6, 2)]


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (Harm(), "is not set"),
        (Harm(stop_s=0), r"chaos\.stop_s: must be in"),
        (Harm(stop_s=float("nan")), r"chaos\.stop_s: must be in"),
        (Harm(slow=Slow(bytes_per_s=1, for_s=1e9)), r"chaos\.slow\.for_s: must be in"),
    ],
)
async def test_what_makes_no_sense_is_refused(harm: Harm, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        await Chaos(True, Links(), Links()).inflict(harm)


async def test_links_that_send_nothing_cannot_be_slowed() -> None:
    with pytest.raises(InvalidRequest, match="only prefill workers"):
        await Chaos(True, Links()).inflict(Harm(slow=Slow(bytes_per_s=1, for_s=1)))


@pytest.fixture
async def victim() -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    yield process
    if process.returncode is None:
        process.kill()
    await process.wait()


async def pause(victim: asyncio.subprocess.Process, for_s: float) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, str(PAUSE), str(victim.pid), "0", str(for_s))


async def until_is(pid: int, state: str) -> None:
    async with asyncio.timeout(10):
        while psutil.Process(pid).status() != state:
            await asyncio.sleep(0.01)


async def test_a_stopped_process_goes_on_by_itself(victim: asyncio.subprocess.Process) -> None:
    pauser = await pause(victim, for_s=1.0)
    await until_is(victim.pid, psutil.STATUS_STOPPED)
    assert await pauser.wait() == 0
    await until_is(victim.pid, psutil.STATUS_SLEEPING)


async def test_the_pause_does_not_outlive_the_process(victim: asyncio.subprocess.Process) -> None:
    pauser = await pause(victim, for_s=60)
    await until_is(victim.pid, psutil.STATUS_STOPPED)
    victim.kill()
    async with asyncio.timeout(10):
        assert await pauser.wait() == 0


async def test_kill_and_stop_meet_the_process_that_was_asked() -> None:
    """In a process of its own; the answer comes first."""
    program = (
        "import asyncio, sys\n"
        "from cluster.chaos import Chaos\nfrom pdserve.v1.cluster_pb2 import Chaos as Harm\n"
        "async def main():\n"
        "    harm = Harm(kill=True) if sys.argv[1] == 'kill' else Harm(stop_s=1.0)\n"
        "    await Chaos(True, None).inflict(harm)\n"
        "    print('answered', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    for harm in ("kill", "stop"):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, harm, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[3]
        )
        assert process.stdout
        async with asyncio.timeout(20):
            assert await process.stdout.readline() == b"answered\n"
            if harm == "stop":
                await until_is(process.pid, psutil.STATUS_STOPPED)
                await until_is(process.pid, psutil.STATUS_SLEEPING)
                process.kill()
            assert await process.wait() == -9
