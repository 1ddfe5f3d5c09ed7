"""Attention over pages, and the writing of K and V into them.

Every forward writes the K and V of its rows for a layer, then attends: so a row finds its own key in the cache like all
earlier ones.
"""

import ctypes
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import Batch
from engine.kv_cache import PAGE_FORMAT, KvCache, from_groups, place_in_group, to_groups
from engine.native import Library


@dataclass(frozen=True)
class Look:
    """How a layer's rows look at the keys."""

    scale: float  # of the products of query and key
    reach: int | None = None  # tokens that a row sees, the last of them its own; None: all up to it


def torch_write_kv(k: Tensor, v: Tensor, cache: KvCache, layer: int, batch: Batch) -> None:
    """See `engine.kernels.WriteKv`."""
    positions, counts = batch.positions.long(), batch.row_starts.diff().long()
    sequences = torch.repeat_interleave(torch.arange(batch.num_sequences, device=k.device), counts)
    positions, k, v = (x[: len(sequences)] for x in (positions, k, v))  # rows of no sequence may stand behind
    pages = batch.page_table[sequences, positions // cache.layout.page_tokens].long()
    slots = positions % cache.layout.page_tokens
    keys, values = _keys_values(cache.pages[:, layer], cache)
    k, v = k.to(keys.dtype), v.to(values.dtype)
    if _in_groups(cache):
        keys[pages, :, :, place_in_group(slots, keys.dtype)], values[pages, :, slots] = k, to_groups(v)
    else:
        keys[pages, :, :, slots], values[pages, :, slots] = k, v


def torch_attend(q: Tensor, cache: KvCache, layer: int, batch: Batch, look: Look) -> Tensor:
    """See `engine.kernels.Attend`. Gathers the pages of one sequence after the other."""
    out = torch.empty_like(q)
    starts = batch.row_starts.tolist()
    for sequence, (begin, end) in enumerate(pairwise(starts)):
        if begin == end:
            continue
        length = int(batch.positions[end - 1]) + 1
        pages = batch.page_table[sequence, : cache.layout.pages_for(length)].long()
        keys, values = _gather(cache, layer, pages)
        out[begin:end] = _attend_sequence(q[begin:end], keys[:, :length], values[:, :length], look)
    return out


def _keys_values(pages: Tensor, cache: KvCache) -> tuple[Tensor, Tensor]:
    """Views of one layer of some pages: K [pages, kv_heads, head_dim, page_tokens], V with the last two exchanged."""
    tokens, dim = cache.layout.page_tokens, cache.layout.head_dim
    shape = pages.shape[0], cache.layout.num_kv_heads
    keys, values = pages[:, 0], pages[:, 1].view(*shape, tokens, dim)
    if _in_groups(cache):
        return keys.view(*shape, dim, tokens), values
    return keys.view(*shape, tokens, dim).transpose(-1, -2), values


def _in_groups(cache: KvCache) -> bool:
    return cache.layout.page_format == PAGE_FORMAT


def _gather(cache: KvCache, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of a sequence, both [kv_heads, tokens, head_dim]."""
    keys, values = _keys_values(cache.pages[pages, layer], cache)
    if _in_groups(cache):
        keys, values = from_groups(keys), from_groups(values)
    keys = keys.transpose(-1, -2)
    return keys.transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)


def _attend_sequence(q: Tensor, keys: Tensor, values: Tensor, look: Look) -> Tensor:
    """The last rows of one sequence [T, heads, head_dim] against all its keys."""
    num_rows, length = q.shape[0], keys.shape[1]
    seen = torch.ones(num_rows, length, dtype=torch.bool, device=q.device).tril(length - num_rows)
    if look.reach is not None:
        seen = seen.triu(length - num_rows - look.reach + 1)
    query, group = q.transpose(0, 1), q.shape[1] // keys.shape[0]
    keys, values = (x.to(q.dtype).repeat_interleave(group, 0) for x in (keys, values))
    out = functional.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=seen, scale=look.scale
    )
    return out[0].transpose(0, 1)


class NativeAttention:
    """csrc/pages.c and csrc/attention.c, for a cache on a CPU."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def write_kv(self, k: Tensor, v: Tensor, cache: KvCache, layer: int, batch: Batch) -> None:
        """See `engine.kernels.WriteKv`. Raises IndexError for a page that the cache does not have."""
        expected = (batch.num_rows, cache.layout.num_kv_heads, cache.layout.head_dim)
        if k.shape != expected or v.shape != expected:
            raise ValueError(f"expected k and v of shape {list(expected)}, got {list(k.shape)} and {list(v.shape)}")
        k, v = _dense_heads(k), _dense_heads(v)
        pages = pages_args(cache, layer, batch)
        args = _WriteArgs(pages, k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0))
        check_status(self._library.call("write_kv", args), cache)

    def attend(self, q: Tensor, cache: KvCache, layer: int, batch: Batch, look: Look) -> Tensor:
        """See `engine.kernels.Attend`. Raises IndexError for a page that the cache does not have."""
        if (
            q.shape[0] != batch.num_rows
            or q.shape[1] % cache.layout.num_kv_heads
            or q.shape[2] != cache.layout.head_dim
        ):
            raise ValueError(f"q of shape {list(q.shape)} does not fit {batch.num_rows} rows and {cache.layout}")
        q = _dense_heads(q)
        out = torch.empty(q.shape)
        sizes = (q.shape[1], q.stride(0), self._library.threads, look.reach or 0)
        args = _AttendArgs(pages_args(cache, layer, batch), q.data_ptr(), out.data_ptr(), *sizes, look.scale)
        check_status(self._library.call("attend", args), cache)
        return out


def _dense_heads(x: Tensor) -> Tensor:
    """fp32 rows [T, heads, head_dim], each without gaps."""
    x = x.float()
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def check_status(status: int, cache: KvCache) -> None:
    """Raises what a routine over pages returned."""
    if status == -1:
        raise IndexError(f"the page table is too short or names pages beyond the {cache.num_pages} of the cache")
    if status:
        raise MemoryError("no memory for attention's scratch space")


class PagesArgs(ctypes.Structure):
    """pages_args in csrc/pages.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("pages", "positions", "row_starts", "page_table")),
        *(
            (name, ctypes.c_long)
            for name in ("num_pages", "num_layers", "kv_heads", "head_dim", "page_tokens", "is_bf16")
        ),
        *((name, ctypes.c_long) for name in ("layer", "sequences", "max_pages")),
    ]


def pages_args(cache: KvCache, layer: int, batch: Batch) -> PagesArgs:
    """Of one layer; `cache` and `batch` must live until the call returns."""
    layout, (sequences, max_pages) = cache.layout, batch.page_table.shape
    if not _in_groups(cache):
        raise ValueError(f"the native kernels work on pages of format {PAGE_FORMAT}, not {layout.page_format}")
    pointers = (x.data_ptr() for x in (cache.pages, batch.positions, batch.row_starts, batch.page_table))
    shape = (cache.num_pages, layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.page_tokens)
    return PagesArgs(*pointers, *shape, int(layout.dtype == "bfloat16"), layer, sequences, max_pages)


class _WriteArgs(ctypes.Structure):
    """write_args in csrc/pages.h."""

    _fields_ = [
        ("at", PagesArgs),
        *((name, ctypes.c_void_p) for name in ("k", "v")),
        *((name, ctypes.c_long) for name in ("ldk", "ldv")),
    ]


class _AttendArgs(ctypes.Structure):
    """attend_args in csrc/pages.h."""

    _fields_ = [
        ("at", PagesArgs),
        *((name, ctypes.c_void_p) for name in ("q", "out")),
        *((name, ctypes.c_long) for name in ("heads", "ldq", "threads", "reach")),
        ("scale", ctypes.c_double),
    ]
