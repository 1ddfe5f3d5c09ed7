"""Pages: what is written is read, by both sets of kernels, and moves between caches as bytes."""

from dataclasses import replace

import pytest
import torch

from engine.batch import Batch, Chunk, build_batch
from engine.kernels import Kernels, choose_kernels, torch_kernels
from engine.kv_cache import PAGE_FORMAT, ROWS_FORMAT, KvCache, from_groups, place_in_group, to_groups
from pdserve.errors import ConfigError
from pdserve.model_card import KvLayout

CPU = torch.device("cpu")
LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, head_dim=32, page_tokens=16, dtype="bfloat16", page_format=PAGE_FORMAT)
DTYPES = ["bfloat16", "float32"]


def _batch() -> Batch:
    return build_batch([Chunk([1] * 37, 3, [3, 5, 7], True), Chunk([1] * 5, 20, [9, 1], False)], CPU)


def _filled(kernels: Kernels, layout: KvLayout) -> KvCache:
    torch.manual_seed(1)
    cache, batch = KvCache(layout, 11, CPU), _batch()
    k, v = torch.randn(2, batch.num_rows, layout.num_kv_heads, layout.head_dim)
    kernels.write_kv(k, v, cache, 1, batch)
    return cache


@pytest.mark.parametrize("page_tokens", [16, 48])
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_kernels_write_the_same_bytes(dtype: str, page_tokens: int) -> None:
    layout = replace(LAYOUT, dtype=dtype, page_tokens=page_tokens)
    native, torch_ = _filled(choose_kernels(CPU), layout), _filled(torch_kernels(), layout)
    assert torch_.pages.any()
    assert torch.equal(native.pages, torch_.pages)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_lies_where_the_format_says(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    cache = KvCache(layout, 4, CPU)
    k, v = torch.randn(2, 1, 3, 32)
    choose_kernels(CPU).write_kv(k, v, cache, 1, build_batch([Chunk([1], 21, [0, 2], True)], CPU))
    page = cache.pages[2, 1].view(2, 3, -1)
    keys, values = from_groups(page[0].view(3, 32, 16)), from_groups(page[1].view(3, 16, 32))
    assert torch.equal(keys[:, :, 5], k[0].to(keys.dtype))
    assert torch.equal(values[:, 5], v[0].to(keys.dtype))
    assert cache.pages.count_nonzero() == 2 * 3 * 32


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_lies_in_rows_where_the_device_wants_rows(dtype: str) -> None:
    cache = KvCache(replace(LAYOUT, dtype=dtype, page_format=ROWS_FORMAT), 4, CPU)
    k, v = torch.randn(2, 1, 3, 32)
    batch = build_batch([Chunk([1], 21, [0, 2], True)], CPU)
    torch_kernels().write_kv(k, v, cache, 1, batch)
    keys, values = cache.pages[2, 1].view(2, 3, 16, 32)
    assert torch.equal(keys[:, 5], k[0].to(keys.dtype))
    assert torch.equal(values[:, 5], v[0].to(keys.dtype))
    assert cache.pages.count_nonzero() == 2 * 3 * 32
    with pytest.raises(ValueError, match="pages of format groups16"):
        choose_kernels(CPU).write_kv(k, v, cache, 1, batch)


def test_rounding_to_bfloat16_is_torchs() -> None:
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, 3.4e38, 1.00390625, 1.01171875])
    k = torch.cat([special, torch.randn(88) * 1e3]).view(1, 3, 32)
    layouts, batch = replace(LAYOUT, num_layers=1), build_batch([Chunk([1], 0, [0], True)], CPU)
    caches = [KvCache(layouts, 1, CPU) for _ in range(2)]
    for kernels, cache in zip((choose_kernels(CPU), torch_kernels()), caches, strict=True):
        kernels.write_kv(k, k, cache, 0, batch)
    assert caches[0].pages.isnan().sum() == 2
    assert torch.equal(*(cache.pages.nan_to_num(7.0).view(torch.int16) for cache in caches))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_move_as_bytes(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    source, target = _filled(choose_kernels(CPU), layout), KvCache(layout, 20, CPU)
    payload = torch.empty(3 * layout.page_bytes + 5, dtype=torch.uint8)
    assert source.read_pages([5, 9, 3], payload) == 3 * layout.page_bytes
    target.write_pages([0, 19, 4], payload)
    assert torch.equal(target.pages[[0, 19, 4]], source.pages[[5, 9, 3]])
    assert not target.pages[[1, 2, 3, 5]].any()


def test_a_payload_that_is_too_small_is_refused() -> None:
    cache = KvCache(LAYOUT, 2, CPU)
    with pytest.raises(ValueError, match="2 pages need"):
        cache.read_pages([0, 1], torch.empty(LAYOUT.page_bytes, dtype=torch.uint8))
    with pytest.raises(ValueError, match="uint8"):
        cache.write_pages([0], torch.empty(LAYOUT.page_bytes))


@pytest.mark.parametrize("page_id", [-1, 2])
def test_a_page_that_is_not_there_is_neither_read_nor_written(page_id: int) -> None:
    cache, payload = KvCache(LAYOUT, 2, CPU), torch.ones(2 * LAYOUT.page_bytes, dtype=torch.uint8)
    with pytest.raises(IndexError, match="below 2"):
        cache.read_pages([0, page_id], payload)
    with pytest.raises(IndexError, match="below 2"):
        cache.write_pages([0, page_id], payload)
    assert not cache.pages.any()


def test_no_pages_is_no_bytes() -> None:
    cache = KvCache(LAYOUT, 2, CPU)
    assert cache.read_pages([], torch.empty(0, dtype=torch.uint8)) == 0
    cache.write_pages([], torch.empty(0, dtype=torch.uint8))


@pytest.mark.parametrize(
    "wrong", [{"page_tokens": 8}, {"head_dim": 24}, {"dtype": "float16"}, {"page_format": "other"}]
)
def test_a_layout_that_the_kernels_cannot_hold_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        KvCache(replace(LAYOUT, **wrong), 1, CPU)  # type: ignore[arg-type]


def test_groups_are_undone() -> None:
    x = torch.arange(96).view(3, 32)
    pairs = to_groups(x.to(torch.bfloat16))
    assert pairs[0, :4].tolist() == [0, 8, 1, 9]
    assert torch.equal(from_groups(pairs).long(), x)
    assert torch.equal(pairs[0, place_in_group(torch.arange(32), torch.bfloat16)].long(), x[0])
    assert torch.equal(to_groups(x.float()), x.float())


@pytest.mark.parametrize("page_ids", [[11], [-1], []])
def test_a_wrong_page_id_writes_nothing(page_ids: list[int]) -> None:
    cache, k = KvCache(LAYOUT, 11, CPU), torch.ones(1, 3, 32)
    with pytest.raises(IndexError, match="page"):
        choose_kernels(CPU).write_kv(k, k, cache, 0, build_batch([Chunk([1], 16, page_ids, True)], CPU))
    assert not cache.pages.any()


def test_k_of_the_wrong_shape_is_refused() -> None:
    k = torch.ones(2, 3, 32)
    with pytest.raises(ValueError, match="expected k and v"):
        choose_kernels(CPU).write_kv(k, k, KvCache(LAYOUT, 1, CPU), 0, build_batch([Chunk([1], 0, [0], True)], CPU))
