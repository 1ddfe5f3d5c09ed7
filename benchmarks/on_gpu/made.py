"""A model of any size with random weights, made where it is used."""

import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.on_gpu.kernels import device_kernels
from benchmarks.on_gpu.report import Context
from engine.cuda.graphs import StepGraphs
from engine.floors import ModelCost, model_cost
from engine.kv_cache import ROWS_FORMAT, KvCache, kv_layout
from engine.load import step_graphs
from engine.model import Model
from engine.model_config import ModelConfig
from engine.runner import Runner
from engine.tensor_names import expected_shapes
from tests.toy import toy_config

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
}
SMALL = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
DRY = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}  # the toy model, smaller


class RandomWeights(Mapping[str, Tensor]):
    """Made anew whenever one is asked for, bf16: only what the model has copied stays."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._shapes = expected_shapes(config)
        self._device = device
        self._generator = torch.Generator(device).manual_seed(1)

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=self._device)
        weight = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return weight.normal_(std=1 / math.sqrt(shape[1]), generator=self._generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class Made:
    """A model, a cache full of noise, and what a pass costs."""

    def __init__(self, context: Context, sizes: Mapping[str, object], num_tokens: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.config = toy_config(Path(folder), **(DRY if context.is_dry else sizes))
        layout = kv_layout(self.config, "bfloat16", ROWS_FORMAT)
        self.cache = KvCache(layout, layout.pages_for(num_tokens), context.device)
        self.cache.pages.normal_()
        kernels = device_kernels(context)
        weights = RandomWeights(self.config, context.device)
        self.model = Model(self.config, weights, kernels, torch.bfloat16, context.device)
        self.cost: ModelCost = model_cost(self.config, layout)
        self._graphs = step_graphs(self.model, self.cache, kernels)
        if context.is_dry:
            self._graphs = StepGraphs(self.model, self.cache, lambda work: (work(), work)[1])

    def runner(self, *, with_graphs: bool = False) -> Runner:
        """One over this cache."""
        return Runner(self.model, self.cache, self._graphs if with_graphs else None)
