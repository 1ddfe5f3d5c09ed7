"""One `pdserve up` on this machine: its folder, the mark on everything that it starts, and the end of all that.

Its life: `open_session` makes a private folder, starts the reaper and marks the environment -> processes come and go,
each inheriting the mark -> `close` lets the reaper end what is left and remove the folder. A killed `up` never calls
`close`; the pipe to the reaper closes all the same.
"""

import os
import secrets
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cluster import reaper
from pdserve.config import ClusterConfig
from pdserve.errors import ConfigError

# Ray's longest socket name inside its folder, measured; Linux allows 107 bytes for the whole path
_RAY_SOCKET_BYTES = 75
_UNIX_PATH_BYTES = 107
_REAP_LIMIT_S = 15.0


@dataclass(frozen=True)
class Session:
    """What belongs to one `up`."""

    id: str  # the namespace in Redis
    folder: Path  # private, gone afterwards: sockets, node files
    log_dir: Path
    reaper: "subprocess.Popen[bytes]"

    def close(self) -> None:
        """End what is left and remove the folder."""
        assert self.reaper.stdin
        self.reaper.stdin.close()
        try:
            self.reaper.wait(_REAP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.reaper.kill()
            self.reaper.wait()


def open_session(config: ClusterConfig) -> Session:
    """Begin a session; the environment of this process, and so of its children, is set here and nowhere else."""
    folder = Path(tempfile.mkdtemp(prefix="pds-"))
    if len(os.fsencode(folder)) + _RAY_SOCKET_BYTES > _UNIX_PATH_BYTES:
        folder.rmdir()
        raise ConfigError(f"the temporary folder {folder.parent} is too long for a unix socket; set TMPDIR=/tmp")
    log_dir = Path(config.run_dir).expanduser().resolve() if config.run_dir else folder / "logs"
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        folder.rmdir()
        raise ConfigError(f"run_dir: {error}") from None
    watcher = reaper.start(folder)
    os.environ.update(environment(config, folder))
    return Session(secrets.token_hex(8), folder, log_dir, watcher)


def environment(config: ClusterConfig, folder: Path) -> dict[str, str]:
    """What Ray, torch and NCCL read in the processes to come; Ray reads some of it when it is imported."""
    variables = {
        reaper.MARK: str(folder),
        # spinning threads of one worker take the core of another: 942 ms a step instead of 44
        "OMP_NUM_THREADS": str(config.threads or 1),
        "OMP_WAIT_POLICY": "PASSIVE",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    if not config.ray_address:
        variables |= {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the only switch that keeps all of Ray on 127.0.0.1
            "RAY_worker_niceness": "0",  # else 15: on a busy machine heartbeats would come late
            "RAY_AUTH_MODE": "token",  # loopback is shared with every user of the machine
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
    if config.backend == "nccl":
        from transport.torch_dist import NCCL_ENV

        variables |= NCCL_ENV
    return variables
