"""A decoder layer in one call of csrc/layer.c: what the layer's own calls do, bit for bit, without Python between them.

    DecoderLayer, built and packed as ever -> joined() -> JoinedLayer, where every part of it is one of the C kernels

At batch 1 the calls between the linear layers cost more in Python than in C, and a prefill's rows leave the cache.
"""

import ctypes
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

PARTS = ("norms", "qkv", "rotation", "kv_write", "attention", "out", "gate_up", "activation", "down")


def joined(layer: DecoderLayer, kernels: Kernels) -> Layer:
    """One call where that can be, else the layer as it is."""
    mlp = layer.mlp
    if kernels.library is None or not isinstance(mlp, GatedMlp):
        return layer
    linears = [layer.attention.qkv, layer.attention.out, mlp.gate_up, mlp.down]
    packed = [each for each in linears if isinstance(each, NativeLinear)]
    if len(packed) < len(linears):
        return layer
    return JoinedLayer(kernels.library, layer, packed, is_gelu=mlp.gate_mul == kernels.gelu_mul)


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
        self._library = library
        self._index = attention.index
        self._hidden_size = linears[0].args.in_
        window, half = rotary.cos.shape
        numbers = (attention.heads.num, half, window, attention.look.reach or 0, int(is_gelu), library.threads)
        self._args = _LayerArgs(
            *(linear.args for linear in linears),
            *(None if norm is None else norm.data_ptr() for norm in norms),
            *(table.data_ptr() for table in tables),
            *numbers,
            layer.attention_norm.eps,
            attention.look.scale,
        )
        self._address = ctypes.addressof(self._args)

    def __call__(self, hidden: Tensor, batch: Batch, cache: KvCache) -> Tensor:
        """See `Layer`. Raises IndexError for a page or a position that there is not."""
        return self.run(hidden, batch, cache, None)

    def run(
        self, hidden: Tensor, batch: Batch, cache: KvCache, spent_s: "ctypes.Array[ctypes.c_double] | None"
    ) -> Tensor:
        """The same; the time of each of `PARTS` is added to `spent_s`."""
        if hidden.shape != (batch.num_rows, self._hidden_size) or not hidden.is_contiguous():
            raise ValueError(f"expected {batch.num_rows} rows of {self._hidden_size}, got {list(hidden.shape)}")
        if hidden.dtype != torch.float32:
            raise ValueError(f"expected fp32 rows, got {hidden.dtype}")
        call = _LayerCall(
            self._address,
            pages_args(cache, self._index, batch),
            hidden.data_ptr(),
            batch.num_rows,
            None if spent_s is None else ctypes.addressof(spent_s),
        )
        status = self._library.call("decoder_layer", call)
        if status == -3:
            raise IndexError(f"a position is outside the rotary tables, which end at {self._args.window}")
        check_status(status, cache)
        return hidden


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
        *_fields(ctypes.c_long, "heads", "half", "window", "reach", "is_gelu", "threads"),
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
