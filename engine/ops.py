"""The small row-wise routines between the linear layers: norm, activation, rotary embedding.

The torch twins compute in fp32 and return the dtype of their input.
"""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from engine.native import Library


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `engine.kernels.RmsNorm`."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def torch_norm_heads(x: Tensor, weight: Tensor, eps: float) -> None:
    """See `engine.kernels.NormHeads`."""
    x.copy_(torch_rms_norm(x, weight, eps))


def torch_silu_mul(gate_up: Tensor) -> Tensor:
    """See `engine.kernels.GateMul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def torch_gelu_mul(gate_up: Tensor) -> Tensor:
    """See `engine.kernels.GateMul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def torch_rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """See `engine.kernels.Rotate`."""
    rows = positions.long()
    c, s = cos[rows].unsqueeze(1), sin[rows].unsqueeze(1)
    turned = x[..., : 2 * cos.shape[1]]
    first, second = turned.float().chunk(2, dim=-1)
    turned.copy_(torch.cat((first * c - second * s, second * c + first * s), dim=-1))


class NativeOps:
    """csrc/ops.c, for fp32 rows on a CPU. Inputs may be views whose rows lie apart."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `engine.kernels.RmsNorm`."""
        x, weight = _dense_rows(x), weight.float().contiguous()
        y = torch.empty(x.shape)
        args = _RmsNormArgs(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.stride(0), *x.shape, eps)
        self._library.call("rms_norm", args)
        return y

    def norm_heads(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """See `engine.kernels.NormHeads`."""
        _check_in_place(x)
        if weight.shape != x.shape[1:]:
            raise ValueError(f"expected weights of shape {list(x.shape[1:])}, got {list(weight.shape)}")
        weight = weight.float().contiguous()
        args = _NormHeadsArgs(x.data_ptr(), weight.data_ptr(), x.stride(0), *x.shape, eps)
        self._library.call("norm_heads", args)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `engine.kernels.GateMul`."""
        return self._gate_mul("silu_mul", gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """See `engine.kernels.GateMul`."""
        return self._gate_mul("gelu_mul", gate_up)

    def _gate_mul(self, name: str, gate_up: Tensor) -> Tensor:
        gate_up = _dense_rows(gate_up)
        num_rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        y = torch.empty(num_rows, n)
        self._library.call(name, _GateMulArgs(gate_up.data_ptr(), y.data_ptr(), gate_up.stride(0), num_rows, n))
        return y

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """See `engine.kernels.Rotate`. Raises IndexError for a position outside the tables."""
        _check_in_place(x)
        window, half = cos.shape
        if sin.shape != cos.shape or 2 * half > x.shape[2]:
            raise ValueError(f"tables of shapes {list(cos.shape)} and {list(sin.shape)} for heads of {x.shape[2]}")
        cos, sin, positions = cos.contiguous(), sin.contiguous(), positions.contiguous()
        pointers = (x.data_ptr(), cos.data_ptr(), sin.data_ptr(), positions.data_ptr())
        if self._library.call("rotate", _RotateArgs(*pointers, x.stride(0), *x.shape, half, window)):
            raise IndexError(f"a position is outside the rotary tables, which end at {window}")


def _dense_rows(x: Tensor) -> Tensor:
    x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def _check_in_place(x: Tensor) -> None:
    if x.dtype != torch.float32 or x.dim() != 3 or x.stride()[1:] != (x.shape[2], 1):
        raise ValueError("works in place on fp32 rows whose heads lie behind one another")


class _RmsNormArgs(ctypes.Structure):
    """rms_norm_args in csrc/ops.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "y")),
        *((name, ctypes.c_long) for name in ("ldx", "rows", "n")),
        ("eps", ctypes.c_float),
    ]


class _NormHeadsArgs(ctypes.Structure):
    """norm_heads_args in csrc/ops.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight")),
        *((name, ctypes.c_long) for name in ("ldx", "rows", "heads", "dim")),
        ("eps", ctypes.c_float),
    ]


class _GateMulArgs(ctypes.Structure):
    """gate_mul_args in csrc/ops.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gate_up", "y")),
        *((name, ctypes.c_long) for name in ("ldx", "rows", "n")),
    ]


class _RotateArgs(ctypes.Structure):
    """rotate_args in csrc/ops.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "positions")),
        *((name, ctypes.c_long) for name in ("ldx", "rows", "heads", "dim", "half", "window")),
    ]
