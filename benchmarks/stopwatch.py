"""An engine whose kernels are timed where the model calls them, for `benchmarks.engine`."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from engine.batch import Chunk
from engine.config_file import read_config
from engine.kernels import Kernels, choose_kernels
from engine.kv_cache import KvCache, kv_layout, page_format
from engine.linear import Linear
from engine.load import Engine, EngineConfig, choose_num_pages
from engine.model import Model
from engine.model_config import ModelConfig
from engine.runner import Runner
from engine.weights import load_weights
from pdserve.model_card import ModelCard

P = ParamSpec("P")
R = TypeVar("R")
LINEARS = ("linear: query, key, value", "linear: attention out", "linear: gate, up", "linear: down", "linear: lm_head")


class Stopwatch:
    """Seconds by name."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)

    def timed(self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """The function, its time added up."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            began = time.perf_counter()
            result = function(*args, **kwargs)
            self.spent[name] += time.perf_counter() - began
            return result

        return call


class _TimedRunner(Runner):
    def __init__(self, model: Model, cache: KvCache, watch: Stopwatch) -> None:
        super().__init__(model, cache)
        self._watch = watch

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        return self._watch.timed("forward", super().run)(chunks)


@dataclass(frozen=True)
class Bench:
    """An engine and the watch that its calls are timed by."""

    engine: Engine
    watch: Stopwatch
    linear_names: Mapping[tuple[int, int], str]  # by [out, in]
    weight_bytes: int


def bench_of(config: EngineConfig) -> Bench:
    """A model without experts, whose layers are alike, on a CPU; without the self-test."""
    torch.set_num_threads(config.threads)
    device, folder = torch.device(config.device), Path(config.model_path)
    model_config, watch = read_config(folder), Stopwatch()
    layout = kv_layout(model_config, config.dtype, page_format(device))
    cache = KvCache(layout, choose_num_pages(config, model_config, layout), device)
    names = _linear_names(model_config)
    kernels = watched(choose_kernels(device, threads=config.threads), names, watch)
    dtype: torch.dtype = getattr(torch, config.dtype)
    model = Model(model_config, load_weights(folder, model_config), kernels, dtype, device)
    card = ModelCard("model", model_config.vocab_size, model_config.window, (), "", layout, exact=kernels.exact)
    return Bench(Engine(card, _TimedRunner(model, cache, watch), cache), watch, names, dtype.itemsize)


def watched(kernels: Kernels, linear_names: Mapping[tuple[int, int], str], watch: Stopwatch) -> Kernels:
    """The same, every call timed."""

    def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
        out, width = weight.shape
        return watch.timed(linear_names[out, width], kernels.linear(weight, bias))

    return replace(
        kernels,
        linear=linear,
        head=linear,
        attend=watch.timed("attention", kernels.attend),
        write_kv=watch.timed("KV into pages", kernels.write_kv),
        rotate=watch.timed("rotation", kernels.rotate),
        rms_norm=watch.timed("norms", kernels.rms_norm),
        norm_heads=watch.timed("norms", kernels.norm_heads),
        silu_mul=watch.timed("activation", kernels.silu_mul),
        gelu_mul=watch.timed("activation", kernels.gelu_mul),
    )


def _linear_names(config: ModelConfig) -> dict[tuple[int, int], str]:
    hidden, between = config.hidden_size, config.intermediate_size
    qkv = config.q_size + 2 * config.num_kv_heads * config.head_dim
    shapes = ((qkv, hidden), (hidden, config.q_size), (2 * between, hidden), (hidden, between))
    return dict(zip((*shapes, (config.vocab_size, hidden)), LINEARS, strict=True))
