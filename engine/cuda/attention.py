"""Attention over pages, and the writing of K and V into them, by Triton.

Which tiles a program takes follows from dtype and head_dim alone, so that the blocks in which keys are summed are the
same in every call.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention import Look
from engine.batch import Batch
from engine.cuda import attention_programs as programs
from engine.cuda.rows import Rows, check_heads, power_of_2
from engine.kv_cache import ROWS_FORMAT, KvCache
from pdserve.model_card import KvLayout

EVERYTHING = 2**30  # a reach


class _At(NamedTuple):
    """Where a batch's rows stand in one layer's pages."""

    pages: Tensor  # from the layer's K of page 0 on
    page_stride: int  # elements from one page to the next
    page_table: Tensor
    table_width: int
    positions: Tensor
    row_starts: Tensor


class _Look(NamedTuple):
    scale: float  # of scores whose weights are powers of 2
    reach: int


class _Parts(NamedTuple):
    """What the blocks of a decode step gave, fp32."""

    largest: Tensor  # [blocks, S, kv_heads, group]
    total: Tensor
    out: Tensor  # [blocks, S, kv_heads, group, head_dim]


class _Shape(NamedTuple):
    """Known when a kernel is compiled."""

    kv_heads: int
    group: int  # query heads that share a KV head
    padded_group: int
    dim: int
    padded_dim: int
    page_tokens: int
    values_offset: int  # elements from a token's key to its value
    block: int  # keys
    lanes: int  # query rows times the heads of a group


@dataclass(frozen=True)
class _Tiles:
    block: int
    decode_lanes: int
    decode_warps: int
    prefill_lanes: int
    prefill_warps: int


# A matrix unit takes 64 lanes from four warps, also where decode has fewer: so a lane's sums are the same in both.
_NARROW = _Tiles(block=128, decode_lanes=64, decode_warps=4, prefill_lanes=128, prefill_warps=8)
_WIDE = _Tiles(block=64, decode_lanes=64, decode_warps=8, prefill_lanes=64, prefill_warps=8)  # heads above 128
_FP32 = _Tiles(block=32, decode_lanes=16, decode_warps=4, prefill_lanes=32, prefill_warps=4)  # without matrix units


def write_kv(k: Tensor, v: Tensor, cache: KvCache, layer: int, batch: Batch) -> None:
    """See `engine.kernels.WriteKv`. Nobody checks page ids here: `Runner` has."""
    layout = cache.layout
    for x in (k, v):
        _check(x, batch, layout, layout.num_kv_heads)
    tiles = -(-batch.longest_chunk // programs.WRITTEN_ROWS.value)
    grid = (tiles, batch.num_sequences, layout.num_kv_heads)
    programs.write_kv[grid](_rows(k), _rows(v), _at(cache, layer, batch), _shape(layout, layout.num_kv_heads, 1))


def attend(q: Tensor, cache: KvCache, layer: int, batch: Batch, look: Look) -> Tensor:
    """See `engine.kernels.Attend`. Nobody checks page ids here: `Runner` has."""
    _check(q, batch, cache.layout, q.shape[1])
    scaled = _Look(look.scale * math.log2(math.e), look.reach or EVERYTHING)
    routine = _decode if batch.longest_chunk == 1 else _prefill
    return routine(q, cache.layout, batch, _at(cache, layer, batch), scaled)


def _prefill(q: Tensor, layout: KvLayout, batch: Batch, at: _At, look: _Look) -> Tensor:
    tiles, out = _tiles(layout), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shape = _shape(layout, q.shape[1], tiles.prefill_lanes)
    rows_each = shape.lanes // shape.group
    grid = (-(-batch.longest_chunk // rows_each), batch.num_sequences, layout.num_kv_heads)
    options = {"num_warps": tiles.prefill_warps, "num_stages": 2, "enable_fp_fusion": False}
    programs.prefill[grid](_rows(q), out, at, look, shape, **options)
    return out


def _decode(q: Tensor, layout: KvLayout, batch: Batch, at: _At, look: _Look) -> Tensor:
    tiles, out = _tiles(layout), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shape = _shape(layout, q.shape[1], tiles.decode_lanes)
    grid = (-(-batch.longest_context // tiles.block), batch.num_sequences, layout.num_kv_heads)
    largest, total = (torch.empty(*grid, shape.group, dtype=torch.float32, device=q.device) for _ in range(2))
    parts = _Parts(largest, total, largest.new_empty(*grid, shape.group, shape.dim))
    options = {"num_warps": tiles.decode_warps, "enable_fp_fusion": False}
    programs.decode_block[grid](_rows(q), parts, at, look, shape, num_stages=1, **options)
    programs.merge_blocks[grid[1:]](parts, out, at, look, shape, num_stages=4, **options)
    return out


def _tiles(layout: KvLayout) -> _Tiles:
    if layout.dtype == "float32":
        return _FP32
    return _NARROW if layout.head_dim <= 128 else _WIDE


def _shape(layout: KvLayout, heads: int, lanes: int) -> _Shape:
    group = heads // layout.num_kv_heads
    return _Shape(
        kv_heads=layout.num_kv_heads,
        group=group,
        padded_group=power_of_2(group),
        dim=layout.head_dim,
        padded_dim=power_of_2(layout.head_dim),
        page_tokens=layout.page_tokens,
        values_offset=layout.num_kv_heads * layout.page_tokens * layout.head_dim,
        block=_tiles(layout).block,
        lanes=max(lanes, power_of_2(group)),
    )


def _at(cache: KvCache, layer: int, batch: Batch) -> _At:
    pages = cache.pages[:, layer]
    width = batch.page_table.shape[1]
    return _At(pages, pages.stride(0), batch.page_table, width, batch.positions, batch.row_starts)


def _rows(x: Tensor) -> Rows:
    return Rows(x, x.stride(0))


def _check(x: Tensor, batch: Batch, layout: KvLayout, heads: int) -> None:
    """A wrong shape would read foreign memory."""
    if layout.page_format != ROWS_FORMAT:
        raise ValueError(f"the Triton kernels work on pages of format {ROWS_FORMAT}, not {layout.page_format}")
    if x.shape != (batch.num_rows, heads, layout.head_dim) or heads % layout.num_kv_heads:
        raise ValueError(f"rows of shape {list(x.shape)} do not fit {batch.num_rows} rows and {layout}")
    check_heads(x)
