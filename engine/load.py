"""From a model folder to an engine that serves: read, check, hash, pack, make room for pages, and test itself.

    config.json -> weights (mapped) -> layers (packed copies) -> KV cache -> self-test -> Engine

The folder is not needed afterwards.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from engine.config_file import read_config
from engine.cuda.graphs import CudaRecorder, StepGraphs
from engine.kernels import Kernels, choose_kernels
from engine.kv_cache import KvCache, kv_layout, page_format
from engine.model import Model
from engine.model_config import ModelConfig
from engine.runner import Runner
from engine.self_test import is_path_invariant
from engine.weights import fingerprint, load_weights
from pdserve.errors import ConfigError
from pdserve.grammar import Grammars
from pdserve.model_card import KvLayout, ModelCard

_AUTO_TOKENS = 16384  # what the cache holds where memory is plenty and the window not large
_AUTO_SHARE = 4  # at most one part in four of the available memory


@dataclass(frozen=True)
class EngineConfig:
    """What to serve, and how."""

    model_path: str  # a Hugging Face folder
    name: str  # under which clients ask for it
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of weights and KV
    device: Literal["cpu", "cuda"] = "cpu"
    num_pages: int = 0  # 0: what memory allows
    threads: int = 1  # of one forward, which changes no bits; more than the free cores makes it slower
    fast: bool = (
        False  # may give up exactness for speed; the exact kernels are the quickest we have, so it changes nothing
    )


@dataclass(frozen=True)
class Engine:
    """A loaded model, ready for its first chunk."""

    card: ModelCard
    runner: Runner
    cache: KvCache
    grammars: Grammars = field(default_factory=Grammars)


def load_engine(config: EngineConfig) -> Engine:
    """Takes about as long as reading the weights twice. ConfigError says in one line what is wrong."""
    device = _device(config)
    torch.set_num_threads(config.threads)
    model_config = read_config(Path(config.model_path))
    weights = load_weights(Path(config.model_path), model_config)
    layout = kv_layout(model_config, config.dtype, page_format(device))
    cache = KvCache(layout, choose_num_pages(config, model_config, layout), device)
    kernels = choose_kernels(device, fast=config.fast, threads=config.threads)
    model = Model(model_config, weights, kernels, getattr(torch, config.dtype), device)
    card = ModelCard(
        name=config.name,
        vocab_size=model_config.vocab_size,
        window=model_config.window,
        eos_token_ids=model_config.eos_token_ids,
        fingerprint=fingerprint(model_config, weights),
        kv_layout=layout,
        exact=kernels.exact and is_path_invariant(model, layout, device),
    )
    grammars = Grammars.load(Path(config.model_path), card.vocab_size, card.eos_token_ids)
    return Engine(card, Runner(model, cache, step_graphs(model, cache, kernels)), cache, grammars)


def step_graphs(model: Model, cache: KvCache, kernels: Kernels) -> StepGraphs | None:
    """Where a decode step can be recorded: on CUDA, by kernels that allow it, for a model without experts.

    Which experts a batch meets is known on the host alone.
    """
    has_experts = any(layer.experts is not None for layer in model.config.layers)
    if cache.is_synchronous or not kernels.capturable or has_experts:
        return None
    return StepGraphs(model, cache, CudaRecorder())


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda, but torch finds no CUDA device; use cpu, or install a CUDA build of torch")
    return torch.device(config.device)


def choose_num_pages(config: EngineConfig, model_config: ModelConfig, layout: KvLayout) -> int:
    """As configured, or enough for two windows and `_AUTO_TOKENS`, as far as a share of the memory goes."""
    if config.num_pages:
        return config.num_pages
    wanted = layout.pages_for(max(2 * model_config.window, _AUTO_TOKENS))
    available = _available_bytes(config.device)
    num_pages = min(wanted, available // _AUTO_SHARE // layout.page_bytes)
    if num_pages < layout.pages_for(model_config.window):
        needed = layout.pages_for(model_config.window) * layout.page_bytes
        raise ConfigError(
            f"the KV cache of one window of {model_config.window} tokens needs {needed >> 20} MiB, and a quarter of "
            f"the available memory is {available // _AUTO_SHARE >> 20} MiB; free memory, or set num_pages"
        )
    return num_pages


def _available_bytes(device: str) -> int:
    """Memory that a process may still take: on the device, or on this machine within the limit of its control group."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists():
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            available = min(available, max(int(limit) - int(used), 0))
    return available
