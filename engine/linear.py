"""Linear layers: weights are packed once when the model is loaded, then applied to the rows of every forward."""

import ctypes
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.kv_cache import GROUP, to_groups
from engine.native import Library

ROWS = 16  # torch's fp32 product sums in one order from this number of rows on


class Linear(Protocol):
    """y = x weight^T + bias."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] to [T, out]; fp32 on a CPU."""


class TorchLinear:
    """The twin. On a CPU it widens weights to fp32 and pads rows: the nearest that torch comes to path-invariance."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [out, in], bias [out]."""
        on_cpu = weight.device.type == "cpu"
        self._weight = weight.float() if on_cpu else weight
        self._bias = None if bias is None else bias.to(self._weight.dtype)
        self._rows = ROWS if on_cpu else 1

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        if self._rows == 1:
            return functional.linear(x.to(self._weight.dtype), self._weight, self._bias)
        num_rows = x.shape[0]
        padded = functional.pad(x, (0, 0, 0, -num_rows % self._rows))
        return functional.linear(padded.to(self._weight.dtype), self._weight, self._bias)[:num_rows]


class NativeLinear:
    """csrc/linear.c: every output element is summed over the inputs in one order, whatever the number of rows."""

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [out, in] float32 or bfloat16, bias [out]."""
        self._library = library
        self._out, self._in = weight.shape
        self._packed = _pack(weight)
        self._bias = None if bias is None else functional.pad(bias.float(), (0, -self._out % GROUP)).contiguous()
        bias_at, is_bf16 = None if self._bias is None else self._bias.data_ptr(), int(weight.dtype == torch.bfloat16)
        sizes = (0, 0, self._in, self._out, is_bf16, library.threads)
        self.args = LinearArgs(None, self._packed.data_ptr(), bias_at, None, *sizes)  # without rows: good while we live

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`. Raises ValueError when the width of x is wrong."""
        if x.dim() != 2 or x.shape[1] != self._in:
            raise ValueError(f"expected x of shape [rows, {self._in}], got {list(x.shape)}")
        x = x.float() if x.stride(1) == 1 else x.float().contiguous()
        y = torch.empty(x.shape[0], self._out)
        args = LinearArgs.from_buffer_copy(self.args)
        args.x, args.y, args.ldx, args.rows = x.data_ptr(), y.data_ptr(), x.stride(0), x.shape[0]
        self._library.call("linear_forward", args)
        return y


def native_linear(library: Library) -> partial[NativeLinear]:
    """`engine.kernels.MakeLinear` of a library."""
    return partial(NativeLinear, library)


def _pack(weight: Tensor) -> Tensor:
    """[out, in] to [out / 16][in][16], padded with zeros, a group of bfloat16 in pairs."""
    if weight.dtype not in (torch.float32, torch.bfloat16):
        weight = weight.float()
    padded = functional.pad(weight, (0, 0, 0, -weight.shape[0] % GROUP))
    return to_groups(padded.view(-1, GROUP, weight.shape[1]).transpose(1, 2)).contiguous()


class LinearArgs(ctypes.Structure):
    """linear_args in csrc/linear.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "w", "bias", "y")),
        *((name, ctypes.c_long) for name in ("ldx", "rows", "in_", "out", "is_bf16", "threads")),
    ]
