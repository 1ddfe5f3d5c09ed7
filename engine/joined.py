"""A decoder layer in one call of csrc/layer.c: what the layer's own calls do, bit for bit, without Python between them.

    DecoderLayer, built and packed as ever -> joined() -> JoinedLayer, where every part of it is one of the C kernels

At batch 1 the calls between the linear layers cost more in Python than in C, and a prefill's rows leave the cache.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.attention import PagesArgs, check_status, pages_args
from engine.batch import Batch
from engine.kernels import Kernels
from engine.kv_cache import KvCache
from engine.layers import DecoderLayer, GatedMlp, Layer, RmsNorm
from engine.linear import LinearArgs, NativeLinear
from engine.native import Library

Spent = ctypes.Array[ctypes.c_double]
PARTS = ("norms", "qkv", "rotation", "kv_write", "attention", "out", "gate_up", "activation", "down")


def joined(layer: DecoderLayer, kernels: Kernels) -> Layer:
    """One call where that can be, else the layer as it is."""
    mlp = layer.mlp
    if kernels.compiled is None or not isinstance(mlp, GatedMlp):
        return layer
    linears = [layer.attention.qkv, layer.attention.out, mlp.gate_up, mlp.down]
    packed = [each for each in linears if isinstance(each, NativeLinear)]
    if len(packed) < len(linears):
        return layer
    return JoinedLayer(kernels.compiled, layer, packed, is_gelu=mlp.gate_mul == kernels.gelu_mul)


class JoinedLayer:
    """See `Layer`; changes the hidden rows in place."""

    def __init__(self, library: Library, layer: DecoderLayer, linears: list[NativeLinear], *, is_gelu: bool) -> None:
        """`linears`: of query, key and value; out; gate and up; down."""
        attention, rotary = layer.attention, layer.attention.rotary
        head_norm = None if attention.norm is None else attention.norm.weight.contiguous()
        norms = [
            _weight(layer.attention_norm),
            head_norm,
            *map(_weight, (layer.attention_end_norm, layer.mlp_norm, layer.mlp_end_norm)),
        ]
        tables = [rotary.cos.contiguous(), rotary.sin.contiguous()]
        self._alive = (linears, norms, tables)  # what `_args` points to
        self.compiled = library
        self.hidden_size = linears[0].args.in_
        self.window, half = rotary.cos.shape
        numbers = (
            attention.index,
            attention.heads.num,
            half,
            self.window,
            attention.look.reach or 0,
            int(is_gelu),
            library.threads,
        )
        self._args = _LayerArgs(
            *(linear.args for linear in linears),
            *(None if norm is None else norm.data_ptr() for norm in norms),
            *(table.data_ptr() for table in tables),
            *numbers,
            layer.attention_norm.eps,
            attention.look.scale,
        )
        self.address = ctypes.addressof(self._args)  # good while we live

    def __call__(self, hidden: Tensor, batch: Batch, cache: KvCache) -> Tensor:
        """See `Layer`. Raises IndexError for a page or a position that there is not."""
        return JoinedPass([self], batch, cache)(0, hidden)


class JoinedPass:
    """The layers over one batch. What they are told is laid out once: between two layers Python has next to no work."""

    def __init__(
        self, layers: Sequence[JoinedLayer], batch: Batch, cache: KvCache, spent_s: "Spent | None" = None
    ) -> None:
        """`spent_s` for each of `PARTS` is added to, where it is given."""
        self._layers = layers
        self._alive = (batch, cache, spent_s)  # what `_call` points to
        self._cache = cache
        self._hidden: Tensor | None = None
        spent = None if spent_s is None else ctypes.addressof(spent_s)
        self._call = _LayerCall(None, pages_args(cache, 0, batch), None, batch.num_rows, spent)

    def __call__(self, index: int, hidden: Tensor) -> Tensor:
        """Layer `index`: hidden rows [T, hidden] to the same tensor. Raises IndexError, ValueError."""
        layer = self._layers[index]
        if hidden is not self._hidden:
            self._take(hidden, layer.hidden_size)
        self._call.layer = layer.address
        status = layer.compiled.call("decoder_layer", self._call)
        if status == -3:
            raise IndexError(f"a position is outside the rotary tables, which end at {layer.window}")
        check_status(status, self._cache)
        return hidden

    def _take(self, hidden: Tensor, size: int) -> None:
        if hidden.shape != (self._call.rows, size) or not hidden.is_contiguous() or hidden.dtype != torch.float32:
            raise ValueError(f"expected {self._call.rows} rows of {size} in fp32, got {list(hidden.shape)}")
        self._hidden, self._call.hidden = hidden, hidden.data_ptr()


def _weight(norm: RmsNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight.contiguous()


def _fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class _LayerArgs(ctypes.Structure):
    """layer_args in csrc/layer.c."""

    _fields_ = [
        *_fields(LinearArgs, "qkv", "out", "gate_up", "down"),
        *_fields(ctypes.c_void_p, "attention_norm", "head_norm", "attention_end_norm", "mlp_norm", "mlp_end_norm"),
        *_fields(ctypes.c_void_p, "cos", "sin"),
        *_fields(ctypes.c_long, "index", "heads", "half", "window", "reach", "is_gelu", "threads"),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_double),
    ]


class _LayerCall(ctypes.Structure):
    """layer_call in csrc/layer.c."""

    _fields_ = [
        ("layer", ctypes.c_void_p),
        ("at", PagesArgs),
        ("hidden", ctypes.c_void_p),
        ("rows", ctypes.c_long),
        ("spent", ctypes.c_void_p),
    ]
