"""Norm, activation and rotary embedding by Triton, for rows whose elements lie behind one another."""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.cuda import row_programs as programs

_BLOCK = 1024  # elements of a row for one program


class Rows(NamedTuple):
    """Rows of a tensor, in Triton's language."""

    data: Tensor
    stride: int  # elements from one row to the next


class _Turn(NamedTuple):
    """Sizes, known when the kernel is compiled."""

    heads: int
    padded_heads: int
    half: int
    padded_half: int
    dim: int


def power_of_2(number: int) -> int:
    """The next one; Triton's tiles have no other sizes."""
    return 1 << (number - 1).bit_length()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `engine.kernels.RmsNorm`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[1]
    programs.rms_norm[(x.shape[0],)](Rows(x, x.stride(0)), weight, out, eps, width, power_of_2(width))
    return out


def norm_heads(x: Tensor, weight: Tensor, eps: float) -> None:
    """See `engine.kernels.NormHeads`."""
    check_heads(x)
    num_rows, heads, dim = x.shape
    programs.norm_heads[num_rows, heads](Rows(x, x.stride(0)), weight, eps, dim, power_of_2(dim))


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `engine.kernels.GateMul`."""
    return _gate_mul(gate_up, is_gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See `engine.kernels.GateMul`."""
    return _gate_mul(gate_up, is_gelu=True)


def _gate_mul(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    gate_up = gate_up if gate_up.stride(-1) == 1 else gate_up.contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(power_of_2(width), _BLOCK)
    grid = (num_rows, -(-width // block))
    programs.gate_mul[grid](Rows(gate_up, gate_up.stride(0)), out, width, block, is_gelu)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """See `engine.kernels.Rotate`."""
    check_heads(x)
    num_rows, heads, dim = x.shape
    half = cos.shape[1]
    turn = _Turn(heads, power_of_2(heads), half, power_of_2(half), dim)
    programs.rotate[(num_rows,)](Rows(x, x.stride(0)), (cos, sin), positions, turn)


def check_heads(x: Tensor) -> None:
    """Raises ValueError where the heads of a row do not lie behind one another."""
    if x.dim() != 3 or x.stride()[1:] != (x.shape[2], 1):
        raise ValueError(f"the heads of a row must lie behind one another, not at strides {x.stride()}")
