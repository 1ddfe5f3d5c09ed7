"""`pdserve up` comes, survives what it should, and goes without a trace, however it goes."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import psutil
import pytest

from tests.e2e.harness import (
    ROOT,
    Cluster,
    child,
    children,
    free_port,
    is_alive,
    of_session,
    serving_router,
    session_of,
    token_request,
)

LIMIT_S = 150.0  # for anything; a slow machine is no failure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass
class Up:
    """One `pdserve up` and what it wrote."""

    process: "subprocess.Popen[bytes]"
    folder: Path

    @property
    def ready(self) -> dict[str, str]:
        """The ready file."""
        plain: dict[str, str] = json.loads((self.folder / "ready.json").read_text())
        return plain

    @property
    def session(self) -> Path:
        return session_of(self.ready)

    @property
    def log(self) -> str:
        return (self.folder / "err").read_text()

    def wait_ready(self) -> "Up":
        self.wait("ready", (self.folder / "ready.json").exists)
        return self

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            assert self.process.poll() is None or what == "gone", f"up ended while waiting for {what}: {self.log}"
            assert time.monotonic() < deadline, f"not {what}: {self.log}"
            time.sleep(0.1)

    def cluster(self) -> Cluster:
        return Cluster(self.ready["grpc"], self.process, self.folder / "err", self.session)


@contextmanager
def starting(folder: Path, model: Path, *flags: str) -> Iterator[Up]:
    folder.mkdir()
    command = [
        sys.executable, "-m", "cluster.cli", "up", "--model", str(model), "--dtype", "float32",
        "--ready-file", str(folder / "ready.json"), "--run-dir", str(folder / "logs"), *flags,
    ]  # fmt: skip
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err)
    try:
        yield Up(process, folder)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(LIMIT_S)


def assert_gone(up: Up, session: Path, address: str) -> None:
    up.wait("gone", lambda: not of_session(session) and not session.exists())
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", int(address.rpartition(":")[2])))


async def answers(cluster: Cluster) -> bool:
    """Whether a request succeeds now."""
    try:
        return len((await cluster.generate(token_request([5, 6, 7], 8))).token_ids) == 8
    except grpc.aio.AioRpcError:
        return False


def test_two_at_once_then_one_is_killed_and_its_port_is_taken_over(tmp_path: Path, toy_folder: Path) -> None:
    port = str(free_port())
    with (
        starting(tmp_path / "a", toy_folder) as one,
        starting(tmp_path / "b", toy_folder, "--grpc-port", port) as two,
    ):
        one.wait_ready()
        two.wait_ready()
        assert asyncio.run(answers(one.cluster()))
        assert asyncio.run(answers(two.cluster()))
        ready = f"pdserve ready grpc={two.ready['grpc']} redis={two.ready['redis']} pid={two.process.pid}\n"
        assert (tmp_path / "b" / "out").read_text() == ready
        assert {*of_session(one.session)}.isdisjoint(of_session(two.session))

        session, address = two.session, two.ready["grpc"]
        two.process.kill()
        two.process.wait()
        assert_gone(two, session, address)
        assert asyncio.run(answers(one.cluster()))

        with starting(tmp_path / "c", toy_folder, "--grpc-port", port) as three:
            three.wait_ready()
            assert three.ready["grpc"] == address
            asyncio.run(_drains(three))
            assert three.process.wait(LIMIT_S) == 0, three.log
            assert not (three.folder / "ready.json").exists()
        _ends_without_ray(one)


async def _drains(up: Up) -> None:
    """SIGTERM in the middle of an answer: it is finished all the same, and nothing is left."""
    session, address = up.session, up.ready["grpc"]
    request = asyncio.create_task(up.cluster().generate(token_request([5, 6, 7], 400)))
    while not up.cluster().status().running_requests and not request.done():
        await asyncio.sleep(0.01)
    up.process.send_signal(signal.SIGTERM)
    assert len((await request).token_ids) == 400
    await asyncio.to_thread(up.process.wait, LIMIT_S)
    assert_gone(up, session, address)


def _ends_without_ray(up: Up) -> None:
    session, address = up.session, up.ready["grpc"]
    child(session, "gcs_server").kill()
    assert up.process.wait(LIMIT_S) == 1
    assert "Ray's gcs_server ended" in up.log
    assert_gone(up, session, address)


def test_redis_and_the_router_come_back(cluster: Cluster) -> None:
    child(cluster.session, "unixsocket").kill()
    assert asyncio.run(answers(cluster))
    until("Redis again", lambda: "the embedded Redis ended" in cluster.log.read_text())

    for _ in range(2):  # the second time it is the spare of the first one's spare
        until("two routers", lambda: len(children(cluster.session, "cluster.node")) == 2)
        killed = serving_router(cluster.session, cluster.address)
        killed.kill()
        until("a router at the same address again", lambda: asyncio.run(answers(cluster)))
        assert serving_router(cluster.session, cluster.address) != killed


def until(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, f"not {what}"
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_starting_leaves_nothing(tmp_path: Path, toy_folder: Path, number: signal.Signals) -> None:
    with starting(tmp_path / "a", toy_folder) as up:
        up.wait("Ray on its way", lambda: "gcs_server" in names_of_children(up))
        everyone = [each.pid for each in psutil.Process(up.process.pid).children(recursive=True)]
        assert everyone
        up.process.send_signal(number)
        assert up.process.wait(LIMIT_S) == 0, up.log
        up.wait("gone", lambda: not any(map(is_alive, everyone)))
        assert (tmp_path / "a" / "out").read_text() == ""


def names_of_children(up: Up) -> set[str]:
    names = set()
    for each in psutil.Process(up.process.pid).children():
        with suppress(psutil.NoSuchProcess):
            names.add(each.name())
    return names


def test_a_worker_that_cannot_start_ends_up_with_its_reason(tmp_path: Path, toy_folder: Path) -> None:
    weights = toy_folder / "model.safetensors"
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in toy_folder.iterdir():
        os.symlink(path, broken / path.name)
    config = json.loads((toy_folder / "config.json").read_text())
    (broken / "config.json").unlink()
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 17}))
    assert weights.exists()
    with starting(tmp_path / "a", broken) as up:
        assert up.process.wait(LIMIT_S) == 2
        assert up.log.strip().splitlines()[-1].startswith("pdserve: ")
