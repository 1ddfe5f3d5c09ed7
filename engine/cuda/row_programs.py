"""The small row-wise routines between the linear layers, in Triton's language. They compute in fp32.

A program takes one row, or one head of a row, or a piece of one: so a row's bits are its own.
"""

import triton
import triton.language as tl


@triton.jit
def _normed(x, weight, width: tl.constexpr, eps):
    return x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight


@triton.jit
def rms_norm(x, weight, out, eps, width: tl.constexpr, padded: tl.constexpr):
    """Grid: rows."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, padded)
    mask = columns < width
    wide = tl.load(x.data + row * x.stride + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=mask, other=0.0)
    tl.store(out + row * width + columns, _normed(wide, scale, width, eps).to(out.dtype.element_ty), mask=mask)


@triton.jit
def norm_heads(x, weight, eps, width: tl.constexpr, padded: tl.constexpr):
    """Grid: rows, heads; in place."""
    row, columns, own = tl.program_id(0).to(tl.int64), tl.arange(0, padded), tl.program_id(1) * width
    mask = columns < width
    place = x.data + row * x.stride + own + columns
    wide = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + own + columns, mask=mask, other=0.0)
    tl.store(place, _normed(wide, scale, width, eps).to(x.data.dtype.element_ty), mask=mask)


@triton.jit
def gate_mul(gate_up, out, width: tl.constexpr, block: tl.constexpr, is_gelu: tl.constexpr):
    """Grid: rows, blocks of `width`. gelu in its tanh form, as (1 + tanh(x)) / 2 is sigmoid(2 x)."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    mask = columns < width
    source = gate_up.data + row * gate_up.stride + columns
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    bent = gate
    if is_gelu:
        bent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    product = gate / (1.0 + tl.exp(-bent)) * up
    tl.store(out + row * width + columns, product.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rotate(x, tables, positions, sizes: tl.constexpr):
    """Grid: rows; in place."""
    row = tl.program_id(0).to(tl.int64)
    heads, columns = tl.arange(0, sizes.padded_heads), tl.arange(0, sizes.padded_half)
    angles = tl.load(positions + row).to(tl.int64) * sizes.half + columns
    turns = columns < sizes.half
    mask = (heads < sizes.heads)[:, None] & turns[None, :]
    cos = tl.load(tables[0] + angles, mask=turns, other=0.0)[None, :]
    sin = tl.load(tables[1] + angles, mask=turns, other=0.0)[None, :]
    place = x.data + row * x.stride + heads[:, None] * sizes.dim + columns[None, :]
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + sizes.half, mask=mask, other=0.0).to(tl.float32)
    kind = x.data.dtype.element_ty
    tl.store(place, (first * cos - second * sin).to(kind), mask=mask)
    tl.store(place + sizes.half, (second * cos + first * sin).to(kind), mask=mask)
