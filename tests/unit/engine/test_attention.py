"""Attention over pages: equal to plain softmax attention, and a row's bits are a function of its own sequence alone."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from engine.attention import Look
from engine.batch import Chunk, build_batch
from engine.kernels import Kernels, choose_kernels, torch_kernels
from engine.kv_cache import PAGE_FORMAT, ROWS_FORMAT, KvCache
from pdserve.model_card import KvLayout

CPU = torch.device("cpu")
LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, head_dim=64, page_tokens=16, dtype="bfloat16", page_format=PAGE_FORMAT)
HEADS = 9
LOOK = Look(64**-0.5)


@dataclass(frozen=True)
class Sequence:
    q: Tensor  # [T, heads, head_dim]
    k: Tensor  # [T, kv_heads, head_dim]
    v: Tensor
    page_ids: list[int]

    def chunk(self, start: int, end: int) -> Chunk:
        return Chunk([0] * (end - start), start, self.page_ids, True)


def _sequence(length: int, first_page: int, layout: KvLayout = LAYOUT, heads: int = HEADS) -> Sequence:
    generator = torch.Generator().manual_seed(length)
    shape = (length, layout.num_kv_heads, layout.head_dim)
    q = torch.randn(length, heads, layout.head_dim, generator=generator) * 3
    pages = [first_page + page for page in range(layout.pages_for(length))]
    return Sequence(q, torch.randn(shape, generator=generator), torch.randn(shape, generator=generator), pages[::-1])


def _cache(layout: KvLayout = LAYOUT) -> KvCache:
    cache = KvCache(layout, 60, CPU)
    cache.pages.fill_(float("nan"))  # unused slots hold anything
    return cache


def _forward(
    kernels: Kernels, cache: KvCache, parts: list[tuple[Sequence, int, int]], look: Look = LOOK
) -> list[Tensor]:
    """Write and attend the given rows of some sequences in one batch; the outputs by sequence."""
    batch = build_batch([sequence.chunk(start, end) for sequence, start, end in parts], CPU)
    q, k, v = (torch.cat([getattr(s, name)[start:end] for s, start, end in parts]) for name in ("q", "k", "v"))
    kernels.write_kv(k, v, cache, 1, batch)
    return list(kernels.attend(q, cache, 1, batch, look).split([end - start for _, start, end in parts]))


def _expected(sequence: Sequence, dtype: torch.dtype, look: Look) -> Tensor:
    group = sequence.q.shape[1] // sequence.k.shape[1]
    k, v = (x.to(dtype).double().repeat_interleave(group, 1) for x in (sequence.k, sequence.v))
    scores = torch.einsum("qhd,khd->hqk", sequence.q.double(), k) * look.scale
    positions = torch.arange(len(sequence.q))
    distance = positions[:, None] - positions
    mask = (distance >= 0) & (distance < (look.reach or len(positions)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


SHAPES = [(9, 3, 64, 16), (4, 4, 16, 16), (8, 1, 80, 32), (60, 1, 32, 48), (2, 1, 256, 128)]  # heads, kv, dim, page


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equal_to_plain_attention(shape: tuple[int, int, int, int], dtype: str) -> None:
    heads, kv_heads, dim, page_tokens = shape
    layout = replace(LAYOUT, num_kv_heads=kv_heads, head_dim=dim, page_tokens=page_tokens, dtype=dtype)
    sequence = _sequence(150, 5, layout, heads)
    for kernels in (choose_kernels(CPU), torch_kernels()):
        for look in (Look(dim**-0.5), Look(0.3, 1), Look(0.1, 16), Look(0.1, 63), Look(0.1, 65), Look(0.1, 149)):
            cache = _cache(layout)
            (out,) = _forward(kernels, cache, [(sequence, 0, 150)], look)
            expected = _expected(sequence, cache.pages.dtype, look)
            torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_twin_gives_the_same_over_pages_of_rows(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    sequence, other = _sequence(70, 5, layout), _sequence(20, 11, layout)
    outputs = [
        _forward(torch_kernels(), _cache(replace(layout, page_format=name)), [(sequence, 0, 70), (other, 0, 20)])
        for name in (PAGE_FORMAT, ROWS_FORMAT)
    ]
    assert all(torch.equal(one, another) for one, another in zip(*outputs, strict=True))


@pytest.mark.parametrize("reach", [None, 1, 17, 64, 100])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_row_of_a_prefill_equals_the_row_alone(dtype: str, reach: int | None) -> None:
    layout, kernels, look = replace(LAYOUT, dtype=dtype), choose_kernels(CPU), replace(LOOK, reach=reach)
    sequence, cache = _sequence(300, 7, layout), _cache(layout)
    (whole,) = _forward(kernels, _cache(layout), [(sequence, 0, 300)], look)
    for row in range(300):  # token after token: pages fill as in decode
        (alone,) = _forward(kernels, cache, [(sequence, row, row + 1)], look)
        assert torch.equal(alone[0], whole[row]), row


@pytest.mark.parametrize("reach", [None, 1, 33, 64, 65, 130, 299])
@pytest.mark.parametrize("cuts", [[100, 200], [1, 2, 17, 64, 65, 128, 290], [63, 126, 189, 252], [299]])
def test_chunks_do_not_change_bits(cuts: list[int], reach: int | None) -> None:
    kernels, sequence, cache, look = choose_kernels(CPU), _sequence(300, 7), _cache(), replace(LOOK, reach=reach)
    (whole,) = _forward(kernels, _cache(), [(sequence, 0, 300)], look)
    parts = zip([0, *cuts], [*cuts, 300], strict=True)
    chunked = [_forward(kernels, cache, [(sequence, start, end)], look)[0] for start, end in parts]
    assert torch.equal(torch.cat(chunked), whole)


@pytest.mark.parametrize("reach", [1, 20, 64, 90])
def test_tokens_beyond_the_reach_do_not_change_bits(reach: int) -> None:
    look, sequence = replace(LOOK, reach=reach), _sequence(200, 3)
    changed = replace(sequence, k=sequence.k.clone(), v=sequence.v.clone())
    changed.k[50], changed.v[50] = 1e4, -1e4
    for kernels in (choose_kernels(CPU), torch_kernels()):
        (before,), (after,) = (_forward(kernels, _cache(), [(s, 0, 200)], look) for s in (sequence, changed))
        differs = (before != after).flatten(1).any(1).nonzero().flatten()
        assert (int(differs.min()), int(differs.max())) == (50, 50 + reach - 1)


def test_a_reach_of_everything_is_no_reach() -> None:
    kernels, sequence = choose_kernels(CPU), _sequence(150, 3)
    outputs = [_forward(kernels, _cache(), [(sequence, 0, 150)], replace(LOOK, reach=n))[0] for n in (None, 150, 999)]
    assert all(torch.equal(out, outputs[0]) for out in outputs)


def test_other_sequences_in_the_batch_do_not_change_bits() -> None:
    kernels, cache = choose_kernels(CPU), _cache()
    first, second, third = _sequence(300, 0), _sequence(97, 20), _sequence(33, 30)
    alone = [_forward(kernels, _cache(), [(s, 0, len(s.q))])[0] for s in (first, second, third)]
    _forward(kernels, cache, [(second, 0, 96), (first, 0, 120)])
    mixed = _forward(kernels, cache, [(third, 0, 33), (second, 96, 97), (first, 120, 300)])
    assert torch.equal(mixed[0], alone[2])
    assert torch.equal(mixed[1][0], alone[1][96])
    assert torch.equal(mixed[2], alone[0][120:])


def test_what_lies_behind_a_row_does_not_change_bits() -> None:
    kernels, sequence = choose_kernels(CPU), _sequence(130, 3)
    outputs = []
    for garbage in (0.0, float("nan"), float("inf"), -1e30):
        cache = _cache()
        cache.pages.fill_(garbage)
        outputs.append(torch.cat([_forward(kernels, cache, [(sequence, row, row + 1)])[0] for row in range(130)]))
    assert outputs[0].isfinite().all()
    assert all(torch.equal(out, outputs[0]) for out in outputs)


def test_later_tokens_do_not_change_bits_of_earlier_rows() -> None:
    kernels, sequence = choose_kernels(CPU), _sequence(200, 3)
    changed = replace(sequence, k=sequence.k.clone(), v=sequence.v.clone())
    changed.k[100], changed.v[100] = float("inf"), float("nan")
    (before,), (after,) = (_forward(kernels, _cache(), [(s, 0, 200)]) for s in (sequence, changed))
    assert torch.equal(after[:100], before[:100])
    assert after[100:].isnan().any(-1).all()


def test_a_changed_key_is_noticed() -> None:
    kernels, sequence, cache = choose_kernels(CPU), _sequence(70, 3), _cache()
    (before,) = _forward(kernels, cache, [(sequence, 0, 70)])
    cache.pages[sequence.page_ids[1], 1, 0, 0, 0] += 1  # one element of K, first KV head
    again = kernels.attend(sequence.q, cache, 1, build_batch([sequence.chunk(0, 70)], CPU), LOOK)
    assert torch.equal(again[:16], before[:16])
    assert not torch.equal(again[69, :3], before[69, :3])
    assert torch.equal(again[69, 3:], before[69, 3:])


def test_extreme_scores_stay_finite() -> None:
    sequence = _sequence(100, 3)
    sequence.q.mul_(1e4)
    for kernels in (choose_kernels(CPU), torch_kernels()):
        (out,) = _forward(kernels, _cache(), [(sequence, 0, 100)])
        assert out.isfinite().all()


def test_q_may_be_a_view_of_the_fused_projection() -> None:
    kernels, cache = choose_kernels(CPU), _cache()
    batch, qkv = build_batch([Chunk([0] * 20, 0, [3, 4], True)], CPU), torch.randn(20, 15, 64)
    q, k, v = qkv.split([9, 3, 3], dim=1)
    kernels.write_kv(k, v, cache, 0, batch)
    fused = kernels.attend(q, cache, 0, batch, LOOK)
    kernels.write_kv(k.contiguous(), v.contiguous(), cache, 1, batch)
    assert torch.equal(kernels.attend(q.contiguous(), cache, 1, batch, LOOK), fused)


def test_wrong_pages_and_shapes_are_refused() -> None:
    kernels, cache = choose_kernels(CPU), _cache()
    with pytest.raises(IndexError, match="page"):
        kernels.attend(torch.randn(1, 9, 64), cache, 0, build_batch([Chunk([0], 40, [1, 2, 60], True)], CPU), LOOK)
    with pytest.raises(IndexError, match="page"):
        kernels.attend(torch.randn(1, 9, 64), cache, 2, build_batch([Chunk([0], 0, [1], True)], CPU), LOOK)
    with pytest.raises(ValueError, match="does not fit"):
        kernels.attend(torch.randn(1, 8, 64), cache, 0, build_batch([Chunk([0], 0, [1], True)], CPU), LOOK)
