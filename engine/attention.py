"""Attention over pages, and the writing of K and V into them.

Every forward writes the K and V of its rows for a layer, then attends: so a row finds its own key in the cache like all earlier ones.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.batch import Batch
from engine.kv_cache import KvCache, from_groups, place_in_group, to_groups


def torch_write_kv(k: Tensor, v: Tensor, cache: KvCache, layer: int, batch: Batch) -> None:
    """See `engine.kernels.WriteKv`."""
    layout, positions = cache.layout, batch.positions.long()
    counts = batch.row_starts.diff().long()
    sequences = torch.repeat_interleave(torch.arange(batch.num_sequences, device=k.device), counts)
    pages = batch.page_table[sequences, positions // layout.page_tokens].long()
    slots = positions % layout.page_tokens
    keys = cache.pages[:, layer, 0].unflatten(-1, (layout.head_dim, layout.page_tokens))
    values = cache.pages[:, layer, 1].unflatten(-1, (layout.page_tokens, layout.head_dim))
    keys[pages, :, :, place_in_group(slots, keys.dtype)] = k.to(keys.dtype)
    values[pages, :, slots] = to_groups(v.to(values.dtype))


def torch_attend(q: Tensor, cache: KvCache, layer: int, batch: Batch) -> Tensor:
    """See `engine.kernels.Attend`. Gathers the pages of one sequence after the other."""
    out = torch.empty_like(q)
    starts = batch.row_starts.tolist()
    for sequence, (begin, end) in enumerate(pairwise(starts)):
        length = int(batch.positions[end - 1]) + 1
        pages = batch.page_table[sequence, : cache.layout.pages_for(length)].long()
        keys, values = _gather(cache, layer, pages)
        out[begin:end] = _attend_sequence(q[begin:end], keys[:, :length], values[:, :length])
    return out


def _gather(cache: KvCache, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of a sequence, both [kv_heads, tokens, head_dim]."""
    layout = cache.layout
    rows = cache.pages[pages, layer]  # [pages, 2, kv_heads, page_tokens * head_dim]
    keys = from_groups(rows[:, 0].unflatten(-1, (layout.head_dim, layout.page_tokens))).transpose(-1, -2)
    values = from_groups(rows[:, 1].unflatten(-1, (layout.page_tokens, layout.head_dim)))
    return keys.transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)


def _attend_sequence(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The last rows of one sequence [T, heads, head_dim] against all its keys."""
    num_rows, length = q.shape[0], keys.shape[1]
    mask = torch.ones(num_rows, length, dtype=torch.bool, device=q.device).tril(length - num_rows)
    query, group = q.transpose(0, 1), q.shape[1] // keys.shape[0]
    keys, values = (x.to(q.dtype).repeat_interleave(group, 0) for x in (keys, values))
    return F.scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=mask)[0].transpose(0, 1)
