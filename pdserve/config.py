"""The configuration of a cluster, and of each process in it: frozen, checked once, "auto" resolved once.

A configuration's life: `load_config` reads cluster.yaml and lays the command line's flags over it; `resolve` replaces
every "auto" by what this machine allows; the composition root derives one `NodeConfig` per process, which travels as
JSON. Nothing reads the environment, and nothing changes a configuration afterwards.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pdserve.due import PATIENCE
from pdserve.errors import ConfigError
from pdserve.plain import from_plain, to_plain


@dataclass(frozen=True)
class ClusterConfig:
    """What `pdserve up` takes from cluster.yaml and its flags; the field names are the keys of the file."""

    model: str = "smollm2"  # a folder, a .gguf file, a Hub id, or the demo model's name
    name: str = ""  # what clients call the model; "": the name that comes with it
    prefill: int = 1  # workers
    decode: int = 1  # workers
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of weights and KV
    fast: bool = False  # oneDNN's bf16 units where the CPU has them; gives up path-invariance there
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "gloo", "nccl"] = "auto"  # of the links
    threads: int = 0  # of each worker's engine; 0: one
    pin_cores: bool = True  # a core per worker, where there are enough
    num_pages: int = 0  # KV pages of each worker; 0: what memory allows
    max_batch: int = 64  # rows of a decode step
    chunk_tokens: int = 256  # prompt tokens of a prefill step
    slot_bytes: int = 4 * 2**20  # of a link's staging slot
    queue_limit: int = 256  # requests that wait in a router
    patience: int = PATIENCE  # times its length of later, shorter prompts that one waits for; 0: none
    stuck_after_s: float = 10.0  # an engine without progress for so long is killed
    host: str = "127.0.0.1"  # what every server binds to
    grpc_port: int = 0  # of the router; 0: a free one
    redis_url: str = ""  # "": an embedded server
    ray_address: str = ""  # "": a Ray of our own
    verify_kv: bool = False  # a checksum per payload, checked before its pages are used
    chaos: bool = False  # obey `pdserve chaos`: kill, stop, cut and slow workers on demand
    run_dir: str = ""  # for logs, kept; "": a temporary folder


@dataclass(frozen=True)
class NodeConfig:
    """All that one process of the cluster needs to know: one worker, or one router."""

    role: Literal["prefill", "decode", "router"]
    worker_id: str  # stable over restarts: "prefill-0", "router-0"
    namespace: str  # of this cluster in Redis
    redis_url: str
    model_dir: str  # a folder with config.json, safetensors, tokenizer
    log_dir: str  # "": standard error
    cores: tuple[int, ...]  # to run on; empty: wherever the system likes
    cluster: ClusterConfig  # resolved

    def to_json(self) -> str:
        """One line of JSON; `from_json` gives an equal object."""
        return json.dumps(to_plain(self))

    @classmethod
    def from_json(cls, text: str) -> "NodeConfig":
        """Read what `to_json` wrote; raises ConfigError for anything else."""
        try:
            return from_plain(cls, json.loads(text))
        except ValueError as error:
            raise ConfigError(f"node configuration: {error}") from None


# field: (least, greatest) value allowed
LIMITS: Mapping[str, tuple[float, float]] = {
    "prefill": (1, 1024),
    "decode": (1, 1024),
    "threads": (0, 1024),
    "num_pages": (0, math.inf),
    "max_batch": (1, 4096),
    "chunk_tokens": (1, 65536),
    "slot_bytes": (2**16, 2**30),
    "queue_limit": (1, 10**6),
    "patience": (0, 10**6),
    "stuck_after_s": (1, math.inf),
    "grpc_port": (0, 65535),
}


def load_config(path: Path | None, flags: Mapping[str, Any]) -> ClusterConfig:
    """The file (if any) with the flags that are not None laid over it; raises ConfigError in one line."""
    plain = {**_read(path), **{key: value for key, value in flags.items() if value is not None}}
    try:
        config = from_plain(ClusterConfig, plain)
        _check(config)
    except ValueError as error:
        raise ConfigError(f"{path or 'configuration'}: {error}") from None
    return config


def resolve(config: ClusterConfig, num_gpus: int) -> ClusterConfig:
    """A copy without "auto": what a machine with so many GPUs does by default. Raises ConfigError."""
    device = config.device if config.device != "auto" else ("cuda" if num_gpus else "cpu")
    if config.ray_address:
        num_gpus = max(num_gpus, config.prefill + config.decode)  # the GPUs are elsewhere; Ray finds out
    elif device == "cuda" and not num_gpus:
        raise ConfigError("device: cuda, but this machine has no NVIDIA GPU; use cpu or auto")
    # NCCL refuses two ranks on one GPU; Gloo stages through pinned memory and takes any placement
    own_gpu_each = device == "cuda" and num_gpus >= config.prefill + config.decode
    backend = config.backend if config.backend != "auto" else ("nccl" if own_gpu_each else "gloo")
    if backend == "nccl" and not own_gpu_each:
        raise ConfigError(f"backend: nccl needs a GPU per worker, {config.prefill + config.decode}; found {num_gpus}")
    return replace(
        config,
        device=device,
        backend=backend,
        dtype="bfloat16" if config.dtype == "auto" else config.dtype,
        threads=config.threads or 1,
    )


def _read(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    import yaml  # only `pdserve up` reads files: clients and routers do without

    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(plain, dict | None):
        raise ConfigError(f"{path}: expected a mapping of keys, got {type(plain).__name__}")
    return plain or {}


def _check(config: ClusterConfig) -> None:
    for name, (least, greatest) in LIMITS.items():
        value = getattr(config, name)
        if not least <= value <= greatest:  # also refuses NaN
            raise ValueError(f"{name}: {value} is not in [{least}, {greatest}]")
    if not config.model:
        raise ValueError("model: empty; give a folder, a .gguf file or a Hub id")
