"""What `pdserve up` decides before it starts anything: which processes, on which cores, with which settings.

Whatever is wrong with the configuration, the model, the port or the Redis shows here, as a ConfigError.
"""

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cluster import model_store
from cluster.redis_server import check_redis, find_binary
from pdserve.config import ClusterConfig, NodeConfig, resolve
from pdserve.errors import ConfigError

RAY_LIMIT_S = 5.0
_GPU_FILE = re.compile(r"nvidia\d+")


@dataclass(frozen=True)
class Plan:
    """A cluster that can be started."""

    config: ClusterConfig  # resolved; grpc_port is a real port
    model_dir: Path

    @property
    def address(self) -> str:
        """The router's, as a client on this machine reaches it."""
        host = self.config.host
        return f"{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{self.config.grpc_port}"


def make_plan(config: ClusterConfig, progress: Callable[[str], None]) -> Plan:
    """Check everything that can be checked, and convert the model where needed. Raises ConfigError."""
    config = resolve(config, num_gpus())
    _check_discovery(config)
    _check_ray(config.ray_address)
    config = replace(config, grpc_port=_checked_port(config.host, config.grpc_port))
    model = model_store.resolve(config.model, progress=progress)
    return Plan(replace(config, name=config.name or model.name), model.folder)


def node(plan: Plan, role: Literal["prefill", "decode", "router"], number: int) -> NodeConfig:
    """The configuration of one process; what only a session knows stands empty."""
    return NodeConfig(
        role=role,
        worker_id=f"{role}-{number}",
        namespace="",
        redis_url=plan.config.redis_url,
        model_dir=str(plan.model_dir),
        log_dir="",
        cores=(),
        cluster=plan.config,
    )


def worker_nodes(plan: Plan, allowed_cores: Sequence[int]) -> list[NodeConfig]:
    """Prefill workers from the first core up, decode workers after them; cores only where all get their own."""
    config = plan.config
    nodes = [node(plan, "prefill", number) for number in range(config.prefill)]
    nodes += [node(plan, "decode", number) for number in range(config.decode)]
    pinned = config.pin_cores and config.device == "cpu" and not config.ray_address
    if not pinned or len(nodes) * config.threads > len(allowed_cores):
        return nodes
    count = config.threads
    return [replace(each, cores=tuple(allowed_cores[i * count : (i + 1) * count])) for i, each in enumerate(nodes)]


def num_gpus() -> int:
    """NVIDIA GPUs of this machine, without loading torch."""
    return sum(1 for name in os.listdir("/dev") if _GPU_FILE.fullmatch(name))


def _check_discovery(config: ClusterConfig) -> None:
    if config.redis_url:
        check_redis(config.redis_url)
    elif not _is_loopback(config.host):
        raise ConfigError(f"redis_url: the embedded Redis serves this machine only; with host {config.host} give one")
    else:
        find_binary()


def _check_ray(address: str) -> None:
    """Ray itself tries for ever to reach a cluster that is not there."""
    if not address or address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"ray_address: expected host:port or auto, got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=RAY_LIMIT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"ray_address: no Ray at {address}: {error}") from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _checked_port(host: str, port: int) -> int:
    try:
        with socket.create_server((host, port)) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        raise ConfigError(f"grpc_port: cannot listen on {host}:{port}: {error.strerror}") from None
