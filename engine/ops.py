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


def torch_silu_mul(gate_up: Tensor) -> Tensor:
    """See `engine.kernels.SiluMul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def torch_rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """See `engine.kernels.Rotate`."""
    rows = positions.long()
    c, s = cos[rows].unsqueeze(1), sin[rows].unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    x.copy_(torch.cat((first * c - second * s, second * c + first * s), dim=-1))


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

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `engine.kernels.SiluMul`."""
        gate_up = _dense_rows(gate_up)
        num_rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        y = torch.empty(num_rows, n)
        self._library.call("silu_mul", _SiluMulArgs(gate_up.data_ptr(), y.data_ptr(), gate_up.stride(0), num_rows, n))
        return y

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """See `engine.kernels.Rotate`. Raises IndexError for a position outside the tables."""
        num_rows, heads, dim = x.shape
        if x.dtype != torch.float32 or x.stride()[1:] != (dim, 1):
            raise ValueError("rotate works in place on fp32 rows whose heads lie behind one another")
        cos, sin, positions = cos.contiguous(), sin.contiguous(), positions.contiguous()
        pointers = (x.data_ptr(), cos.data_ptr(), sin.data_ptr(), positions.data_ptr())
        if self._library.call("rotate", _RotateArgs(*pointers, x.stride(0), num_rows, heads, dim // 2, cos.shape[0])):
            raise IndexError(f"a position is outside the rotary tables, which end at {cos.shape[0]}")


def _dense_rows(x: Tensor) -> Tensor:
    x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


class _RmsNormArgs(ctypes.Structure):
    """rms_norm_args in csrc/ops.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "y")),
        *((name, ctypes.c_long) for name in ("ldx", "rows", "n")),
        ("eps", ctypes.c_float),
    ]


class _SiluMulArgs(ctypes.Structure):
    """silu_mul_args in csrc/ops.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gate_up", "y")),
        *((name, ctypes.c_long) for name in ("ldx", "rows", "n")),
    ]


class _RotateArgs(ctypes.Structure):
    """rotate_args in csrc/ops.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "positions")),
        *((name, ctypes.c_long) for name in ("ldx", "rows", "heads", "half", "window")),
    ]
