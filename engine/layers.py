"""The layers of a decoder-only transformer, over the kernels of the device.

A layer's input are the hidden rows of all sequences of a batch, [T, hidden]: fp32 on a CPU, the model's dtype on CUDA.
K and V of the rows go into the cache's pages before attention reads them, so a row finds itself there too.
Query, key and value share one linear layer, as do gate and up: fewer and larger products.
What only some families have is a part that is None in the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.attention import Look
from engine.batch import Batch
from engine.kernels import GateMul, Kernels, MakeLinear
from engine.kv_cache import KvCache
from engine.linear import Linear
from engine.rotary import RotaryTables


@dataclass(frozen=True)
class RmsNorm:
    """x / rms(x) * weight."""

    weight: Tensor  # fp32 [hidden]
    eps: float
    kernels: Kernels

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to the same."""
        return self.kernels.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True)
class HeadNorm:
    """The same for every query and key head, in place."""

    weight: Tensor  # fp32 [heads + kv_heads, head_dim]
    eps: float
    kernels: Kernels

    def __call__(self, heads: Tensor) -> None:
        """[T, heads + kv_heads, head_dim]."""
        self.kernels.norm_heads(heads, self.weight, self.eps)


@dataclass(frozen=True)
class Heads:
    """How many there are, and their size."""

    num: int
    num_kv: int
    dim: int


@dataclass(frozen=True)
class SelfAttention:
    """Grouped-query attention over the pages of each row's sequence."""

    index: int  # of the layer, which is its place in a page
    heads: Heads
    qkv: Linear  # hidden -> query, key and value heads side by side
    norm: HeadNorm | None
    rotary: RotaryTables
    look: Look
    out: Linear
    kernels: Kernels

    def __call__(self, x: Tensor, batch: Batch, cache: KvCache) -> Tensor:
        """[T, hidden] to the same; writes the rows' K and V into the cache."""
        num, num_kv = self.heads.num, self.heads.num_kv
        heads = self.qkv(x).view(x.shape[0], -1, self.heads.dim)  # [T, heads + 2 kv_heads, head_dim]
        turned, v = heads[:, :-num_kv], heads[:, -num_kv:]
        if self.norm is not None:
            self.norm(turned)
        self.kernels.rotate(turned, self.rotary.cos, self.rotary.sin, batch.positions)
        self.kernels.write_kv(turned[:, num:], v, cache, self.index, batch)
        return self.out(self.kernels.attend(turned[:, :num], cache, self.index, batch, self.look).flatten(1))


class Mlp(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to the same."""


@dataclass(frozen=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x))."""

    gate_up: Linear  # hidden -> gate and up side by side
    gate_mul: GateMul
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to the same."""
        return self.down(self.gate_mul(self.gate_up(x)))


@dataclass(frozen=True)
class ExpertMlp:
    """A few of many MLPs for each row, weighted by a router.

    A row's outputs are added in the order of the experts' numbers, and each is computed by a linear layer in which rows
    do not touch each other, so it does not matter which rows the batch brings to an expert together.
    """

    router: Linear  # hidden -> a score for each expert
    experts: Sequence[Mlp]
    per_token: int
    normalized: bool

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to the same."""
        weights, chosen = self.router(x).float().softmax(-1).topk(self.per_token)  # both [T, per_token]
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():  # ascending
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            out[rows] += self.experts[expert](x[rows]) * weights[rows, places, None].to(x.dtype)
        return out


class Layer(Protocol):
    def __call__(self, hidden: Tensor, batch: Batch, cache: KvCache) -> Tensor:
        """[T, hidden] to the same; it may be the same tensor, changed."""


@dataclass(frozen=True)
class DecoderLayer:
    """Attention, then the MLP, each normed before and added to what came in."""

    attention_norm: RmsNorm
    attention: SelfAttention
    attention_end_norm: RmsNorm | None
    mlp_norm: RmsNorm
    mlp: Mlp
    mlp_end_norm: RmsNorm | None

    def __call__(self, hidden: Tensor, batch: Batch, cache: KvCache) -> Tensor:
        """[T, hidden] to the same."""
        hidden = _add(hidden, self.attention(self.attention_norm(hidden), batch, cache), self.attention_end_norm)
        return _add(hidden, self.mlp(self.mlp_norm(hidden)), self.mlp_end_norm)


def _add(hidden: Tensor, update: Tensor, norm: RmsNorm | None) -> Tensor:
    return hidden + (update if norm is None else norm(update))


class LmHead:
    """Hidden rows to logits, accumulated and returned in fp32 in every dtype: bf16 logits tie too often."""

    def __init__(self, weight: Tensor, make_linear: MakeLinear, cap: float | None) -> None:
        """Logits beyond `cap` are bent back to it."""
        self._cpu_linear = make_linear(weight) if weight.device.type == "cpu" else None
        self._transposed = weight.t()  # [hidden, vocab]
        self._cap = cap

    def __call__(self, x: Tensor) -> Tensor:
        """[R, hidden] to fp32 [R, vocab]."""
        logits = self._product(x)
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)

    def _product(self, x: Tensor) -> Tensor:
        if self._cpu_linear is not None:
            return self._cpu_linear(x)
        if x.dtype == torch.float32:
            return x @ self._transposed
        return torch.mm(x, self._transposed, out_dtype=torch.float32)
