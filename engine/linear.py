"""Linear layers: weights are packed once when the model is loaded, then applied to the rows of every forward."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS = 16  # torch's fp32 product sums in one order from this number of rows on


class Linear(Protocol):
    """y = x weight^T + bias."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] to [T, out]; fp32 on a CPU."""


class TorchLinear:
    """The twin of the native one. On a CPU the weights are widened to fp32 and rows padded, the nearest that torch comes to path-invariance."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        on_cpu = weight.device.type == "cpu"
        self._weight = weight.float() if on_cpu else weight
        self._bias = None if bias is None else bias.to(self._weight.dtype)
        self._rows = ROWS if on_cpu else 1

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        num_rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -num_rows % self._rows))
        return F.linear(padded.to(self._weight.dtype), self._weight, self._bias)[:num_rows]
