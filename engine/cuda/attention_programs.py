"""Attention over pages, in Triton's language: what one program of a grid computes.

A program takes some query rows of one sequence, and of them the heads that share one KV head ("lanes": a row's heads
behind one another), against keys in blocks that begin at fixed positions, counted from 0. A block gives each lane three
things: the largest score in it, the sum of the weights 2^(score - largest), and the values so weighted. Blocks are
merged from the first that a lane sees to the last, in that order. In a prefill one program does all of that; in decode
every block has a program of its own, and `merge_blocks` brings them together by the same formula. So what a row goes
through is a function of its own sequence and position, not of the batch, nor of how the prompt was cut.

Sums are fp32. Contraction into fused multiply-adds is off when these are compiled, because it would be for the compiler
to decide in each kernel anew. Lanes that do not exist have position -1 and see nothing.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(float("-inf"))
WRITTEN_ROWS = tl.constexpr(16)  # by one program


@triton.jit
def _seen(scores, tokens, positions, reach):
    """-inf where a lane does not look."""
    distance = positions[:, None] - tokens[None, :]
    return tl.where((distance >= 0) & (distance < reach), scores, NOTHING)


@triton.jit
def _places(sequence, head, tokens, exists, at, shape: tl.constexpr):
    """Where the keys of some tokens begin, in elements; int64."""
    table = at.page_table + sequence.to(tl.int64) * at.table_width
    pages = tl.load(table + tokens // shape.page_tokens, mask=exists, other=0).to(tl.int64)
    return pages * at.page_stride + (head * shape.page_tokens + tokens % shape.page_tokens) * shape.dim


@triton.jit
def _block(q, positions, span, at, look, shape: tl.constexpr):
    """(largest score, sum of weights, weighted values); span: sequence, KV head, first token of the block, last + 1."""
    sequence, head, start, end = span
    tokens = start + tl.arange(0, shape.block)
    inside = tokens < end  # nothing behind is added, not even garbage times 0
    dims = tl.arange(0, shape.padded_dim)
    offsets = _places(sequence, head, tokens, inside, at, shape)[:, None] + dims[None, :]
    mask = inside[:, None] & (dims < shape.dim)[None, :]
    keys = tl.load(at.pages + offsets, mask=mask, other=0.0)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * look.scale
    scores = _seen(scores, tokens, positions, look.reach)
    largest = tl.max(scores, 1)
    weights = tl.exp2(scores - _finite(largest)[:, None])
    values = tl.load(at.pages + shape.values_offset + offsets, mask=mask, other=0.0)
    return largest, tl.sum(weights, 1), tl.dot(weights.to(values.dtype), values, input_precision="ieee")


@triton.jit
def _finite(largest):
    """-inf - -inf is NaN, and where nothing is seen every weight is to be 0."""
    return tl.where(largest == NOTHING, 0.0, largest)


@triton.jit
def _merge(largest, total, out, largest_2, total_2, out_2):
    """What came before, and the next block."""
    both = tl.maximum(largest, largest_2)
    base = _finite(both)
    old, new = tl.exp2(largest - base), tl.exp2(largest_2 - base)
    return both, total * old + total_2 * new, out * old[:, None] + out_2 * new[:, None]


@triton.jit
def _nothing_yet(lanes: tl.constexpr, padded_dim: tl.constexpr):
    largest = tl.full([lanes], NOTHING, tl.float32)
    return largest, tl.zeros([lanes], tl.float32), tl.zeros([lanes, padded_dim], tl.float32)


@triton.jit
def prefill(q, out, at, look, shape: tl.constexpr):
    """Grid: tiles of the longest chunk, sequences, KV heads. A tile has as many rows as their heads fit its lanes."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # those that see most begin first
    sequence, head = tl.program_id(1), tl.program_id(2)
    first = tl.load(at.row_starts + sequence)
    count = tl.load(at.row_starts + sequence + 1) - first
    rows: tl.constexpr = shape.lanes // shape.group
    if tile * rows < count:
        lanes = tl.arange(0, shape.lanes)
        own = tile * rows + lanes // shape.group  # row of the chunk
        exists = (lanes < rows * shape.group) & (own < count)
        positions = tl.load(at.positions + first + own, mask=exists, other=-1)
        heads = head * shape.group + lanes % shape.group
        dims = tl.arange(0, shape.padded_dim)
        mask = exists[:, None] & (dims < shape.dim)[None, :]
        row = (first + own).to(tl.int64)
        source = q.data + (row * q.stride + heads * shape.dim)[:, None] + dims[None, :]
        query = tl.load(source, mask=mask, other=0.0).to(at.pages.dtype.element_ty)
        end = tl.max(positions, 0) + 1
        lowest = tl.min(tl.where(exists, positions, end), 0) - look.reach + 1
        largest, total, summed = _nothing_yet(shape.lanes, shape.padded_dim)
        for start in tl.range(tl.maximum(lowest, 0) // shape.block * shape.block, end, shape.block):
            largest_2, total_2, out_2 = _block(query, positions, (sequence, head, start, end), at, look, shape)
            largest, total, summed = _merge(largest, total, summed, largest_2, total_2, out_2)
        target = out + ((row * shape.kv_heads * shape.group + heads) * shape.dim)[:, None] + dims[None, :]
        tl.store(target, (summed / total[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def decode_block(q, parts, at, look, shape: tl.constexpr):
    """Grid: blocks of the longest context, sequences, KV heads. Every sequence has one row, or none."""
    block, sequence, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(at.row_starts + sequence)
    if row < tl.load(at.row_starts + sequence + 1):
        position, start = tl.load(at.positions + row), block * shape.block
        if (start <= position) & (start + shape.block > position - look.reach + 1):
            lanes, dims = tl.arange(0, shape.lanes), tl.arange(0, shape.padded_dim)
            exists = lanes < shape.group
            mask = exists[:, None] & (dims < shape.dim)[None, :]
            own = (head * shape.group + lanes) * shape.dim
            source = q.data + row.to(tl.int64) * q.stride + own[:, None] + dims[None, :]
            query = tl.load(source, mask=mask, other=0.0).to(at.pages.dtype.element_ty)
            positions = tl.where(exists, position, -1)
            largest, total, out = _block(query, positions, (sequence, head, start, position + 1), at, look, shape)
            place = ((block * tl.num_programs(1) + sequence) * shape.kv_heads + head) * shape.group + lanes
            tl.store(parts.largest + place, largest, mask=exists)
            tl.store(parts.total + place, total, mask=exists)
            tl.store(parts.out + place.to(tl.int64)[:, None] * shape.dim + dims[None, :], out, mask=mask)


@triton.jit
def merge_blocks(parts, out, at, look, shape: tl.constexpr):
    """Grid: sequences, KV heads."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(at.row_starts + sequence)
    if row < tl.load(at.row_starts + sequence + 1):
        position = tl.load(at.positions + row)
        lanes, dims = tl.arange(0, shape.padded_group), tl.arange(0, shape.padded_dim)
        exists = lanes < shape.group
        mask = exists[:, None] & (dims < shape.dim)[None, :]
        largest, total, summed = _nothing_yet(shape.padded_group, shape.padded_dim)
        first = tl.maximum(position - look.reach + 1, 0) // shape.block
        for block in tl.range(first, position // shape.block + 1):
            place = ((block * tl.num_programs(0) + sequence) * shape.kv_heads + head) * shape.group + lanes
            largest_2 = tl.load(parts.largest + place, mask=exists, other=NOTHING)
            total_2 = tl.load(parts.total + place, mask=exists, other=1.0)
            out_2 = tl.load(parts.out + place.to(tl.int64)[:, None] * shape.dim + dims[None, :], mask=mask, other=0.0)
            largest, total, summed = _merge(largest, total, summed, largest_2, total_2, out_2)
        own = (head * shape.group + lanes) * shape.dim
        target = out + row.to(tl.int64) * shape.kv_heads * shape.group * shape.dim + own[:, None] + dims[None, :]
        tl.store(target, (summed / total[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def write_kv(k, v, at, shape: tl.constexpr):
    """Grid: WRITTEN_ROWS each of the longest chunk, sequences, KV heads."""
    sequence, head = tl.program_id(1), tl.program_id(2)
    first = tl.load(at.row_starts + sequence)
    count = tl.load(at.row_starts + sequence + 1) - first
    own, dims = tl.program_id(0) * WRITTEN_ROWS + tl.arange(0, WRITTEN_ROWS), tl.arange(0, shape.padded_dim)
    exists = own < count
    tokens = tl.load(at.positions + first + own, mask=exists, other=0)
    target = at.pages + _places(sequence, head, tokens, exists, at, shape)[:, None] + dims[None, :]
    mask = exists[:, None] & (dims < shape.dim)[None, :]
    rows, columns = (first + own).to(tl.int64)[:, None], head * shape.dim + dims[None, :]
    keys = tl.load(k.data + rows * k.stride + columns, mask=mask, other=0.0)
    values = tl.load(v.data + rows * v.stride + columns, mask=mask, other=0.0)
    tl.store(target, keys.to(at.pages.dtype.element_ty), mask=mask)
    tl.store(target + shape.values_offset, values.to(at.pages.dtype.element_ty), mask=mask)
