"""An engine whose kernels are timed where the model calls them, for `benchmarks.engine`."""

import ctypes
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from engine.batch import Batch, Chunk
from engine.config_file import read_config
from engine.floors import ModelCost, model_cost
from engine.joined import PARTS, JoinedLayer, JoinedPass
from engine.kernels import Kernels, MakeLinear, choose_kernels
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


_QKV, _OUT, _GATE_UP, _DOWN, _HEAD = LINEARS
_JOINED = ("norms", _QKV, "rotation", "KV into pages", "attention", _OUT, _GATE_UP, "activation", _DOWN)  # as PARTS


class Stopwatch:
    """Seconds by name."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.joined_s = (ctypes.c_double * len(PARTS))()  # of joined layers, until `collect`

    def timed(self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """The function, its time added up."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            began = time.perf_counter()
            result = function(*args, **kwargs)
            self.spent[name] += time.perf_counter() - began
            return result

        return call

    def collect(self) -> None:
        """Take over what joined layers have spent."""
        for index, name in enumerate(_JOINED):
            if self.joined_s[index]:
                self.spent[name] += self.joined_s[index]
                self.joined_s[index] = 0.0

    def timed_maker(self, name: str, make: MakeLinear) -> MakeLinear:
        """Linear layers with their time added up."""

        def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
            return self.timed(name, make(weight, bias))

        return linear


class _TimedRunner(Runner):
    def __init__(self, model: Model, cache: KvCache, watch: Stopwatch) -> None:
        super().__init__(model, cache)
        self._watch = watch

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        logits = self._watch.timed("forward", super().run)(chunks)
        self._watch.collect()
        return logits


@dataclass(frozen=True)
class Bench:
    """An engine and the watch that its calls are timed by."""

    engine: Engine
    watch: Stopwatch
    linear_names: Mapping[tuple[int, int], str]  # by [out, in]
    weight_bytes: int
    cost: ModelCost


def bench_of(config: EngineConfig, *, by_call: bool) -> Bench:
    """A model without experts, whose layers are alike, on a CPU; without the self-test.

    `by_call`: every routine of a layer called from Python, as it is where layers cannot be joined.
    """
    torch.set_num_threads(config.threads)
    device, folder = torch.device(config.device), Path(config.model_path)
    model_config, watch = read_config(folder), Stopwatch()
    layout = kv_layout(model_config, config.dtype, page_format(device))
    cache = KvCache(layout, choose_num_pages(config, model_config, layout), device)
    names = _linear_names(model_config)
    kernels = choose_kernels(device, threads=config.threads)
    head = watch.timed_maker(LINEARS[-1], kernels.head)
    kernels = watched(kernels, names, watch) if by_call else replace(kernels, head=head)
    dtype: torch.dtype = getattr(torch, config.dtype)
    model = _TimedModel(model_config, load_weights(folder, model_config), kernels, dtype, device)
    model.watch = watch
    card = ModelCard("model", model_config.vocab_size, model_config.window, (), "", layout, exact=kernels.exact)
    engine = Engine(card, _TimedRunner(model, cache, watch), cache)
    return Bench(engine, watch, names, dtype.itemsize, model_cost(model_config, layout))


class _TimedModel(Model):
    """Parts of joined layers are timed in C."""

    watch: Stopwatch

    def over(self, batch: Batch, cache: KvCache) -> Callable[[int, Tensor], Tensor]:
        layers = [layer for layer in self.layers if isinstance(layer, JoinedLayer)]
        if not layers:
            return super().over(batch, cache)
        return JoinedPass(layers, batch, cache, self.watch.joined_s)


def watched(kernels: Kernels, linear_names: Mapping[tuple[int, int], str], watch: Stopwatch) -> Kernels:
    """The same call by call, every one timed."""

    def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
        out, width = weight.shape
        return watch.timed(linear_names[out, width], kernels.linear(weight, bias))

    return replace(
        kernels,
        compiled=None,
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
