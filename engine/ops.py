"""The small row-wise routines between the linear layers: norm, activation, rotary embedding.

The torch twins compute in fp32 and return the dtype of their input.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `engine.kernels.RmsNorm`."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def torch_silu_mul(gate_up: Tensor) -> Tensor:
    """See `engine.kernels.SiluMul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def torch_rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """See `engine.kernels.Rotate`."""
    rows = positions.long()
    c, s = cos[rows].unsqueeze(1), sin[rows].unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    x.copy_(torch.cat((first * c - second * s, second * c + first * s), dim=-1))
