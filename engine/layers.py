"""The layers of a decoder-only transformer of the Llama shape, over the kernels of the device.

A layer's input are the hidden rows of all sequences of a batch, [T, hidden]: fp32 on a CPU, the model's dtype on CUDA.
K and V of the rows go into the cache's pages before attention reads them, so a row finds itself there too.
Query, key and value share one linear layer, as do gate and up: fewer and larger products.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import Batch
from engine.kernels import Kernels
from engine.kv_cache import KvCache
from engine.linear import Linear
from engine.model_config import Llama3Rope, ModelConfig


@dataclass(frozen=True)
class RotaryTables:
    """Cosine and sine of every position's angles, fp32 [window, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


def rotary_tables(config: ModelConfig, device: torch.device) -> RotaryTables:
    """Angles are position * theta^(-2i / head_dim), in fp32 because that is what models are trained with."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is not None:
        frequencies = _stretch(frequencies, config.rope_scaling)
    angles = torch.outer(torch.arange(config.window, dtype=torch.float32), frequencies)
    return RotaryTables(angles.cos().to(device), angles.sin().to(device))


def _stretch(frequencies: Tensor, rope: Llama3Rope) -> Tensor:
    """Llama 3.1: how often a frequency turns within the original window decides how much of it is kept."""
    turns = rope.original_window * frequencies / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope.factor)


@dataclass(frozen=True)
class RmsNorm:
    """x / rms(x) * weight."""

    weight: Tensor  # [hidden], in the dtype of the activations
    eps: float
    kernels: Kernels

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to the same."""
        return self.kernels.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True)
class SelfAttention:
    """Grouped-query attention over the pages of each row's sequence."""

    index: int  # of the layer, which is its place in a page
    qkv: Linear  # hidden -> query, key and value heads side by side
    out: Linear
    config: ModelConfig
    rotary: RotaryTables
    kernels: Kernels

    def __call__(self, x: Tensor, batch: Batch, cache: KvCache) -> Tensor:
        """[T, hidden] to the same; writes the rows' K and V into the cache."""
        config = self.config
        heads = self.qkv(x).view(x.shape[0], -1, config.head_dim)  # [T, heads + 2 kv_heads, head_dim]
        turned, v = heads[:, : -config.num_kv_heads], heads[:, -config.num_kv_heads :]
        self.kernels.rotate(turned, self.rotary.cos, self.rotary.sin, batch.positions)
        q, k = turned[:, : config.num_heads], turned[:, config.num_heads :]
        self.kernels.write_kv(k, v, cache, self.index, batch)
        return self.out(self.kernels.attend(q, cache, self.index, batch).flatten(1))


@dataclass(frozen=True)
class GatedMlp:
    """down(silu(gate(x)) * up(x))."""

    gate_up: Linear  # hidden -> gate and up side by side
    down: Linear
    kernels: Kernels

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to the same."""
        return self.down(self.kernels.silu_mul(self.gate_up(x)))


@dataclass(frozen=True)
class DecoderLayer:
    """Attention, then the MLP, each normed before and added to what came in."""

    attention_norm: RmsNorm
    attention: SelfAttention
    mlp_norm: RmsNorm
    mlp: GatedMlp

    def __call__(self, hidden: Tensor, batch: Batch, cache: KvCache) -> Tensor:
        """[T, hidden] to the same."""
        hidden = hidden + self.attention(self.attention_norm(hidden), batch, cache)
        return hidden + self.mlp(self.mlp_norm(hidden))


class LmHead:
    """Hidden rows to logits, accumulated and returned in fp32 in every dtype: bf16 logits tie too often."""

    def __init__(self, weight: Tensor, kernels: Kernels) -> None:
        self._cpu_linear = kernels.head(weight) if weight.device.type == "cpu" else None
        self._transposed = weight.t()  # [hidden, vocab]

    def __call__(self, x: Tensor) -> Tensor:
        """[R, hidden] to fp32 [R, vocab]."""
        if self._cpu_linear is not None:
            return self._cpu_linear(x)
        if x.dtype == torch.float32:
            return x @ self._transposed
        return torch.mm(x, self._transposed, out_dtype=torch.float32)
