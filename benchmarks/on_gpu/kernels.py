"""The Triton kernels against their torch twins, in bits where they promise bits, and beside the floors."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.on_gpu.report import Context, Row, ms, ratio_s
from engine.attention import Look
from engine.batch import Batch, Chunk, build_batch
from engine.kernels import Kernels, choose_kernels, torch_kernels
from engine.kv_cache import ROWS_FORMAT, KvCache
from pdserve.model_card import KvLayout

PART = "kernels"
HEADS, KV_HEADS, DIM = 32, 8, 128  # of an 8B Llama
Part = tuple[int, int]  # rows of a sequence, from and to


def rows(context: Context) -> Iterator[Row]:
    """Correctness first."""
    kernels = device_kernels(context)
    if kernels.name != "triton":
        yield Row(PART, f"kernels: {kernels.name}", None, "", note="triton is not installed")
        return
    for dtype in ("bfloat16", "float32"):
        for look in (Look(DIM**-0.5), Look(DIM**-0.5, 48)):
            yield _difference(context, kernels, dtype, look)
            yield _same_bits(context, kernels, dtype, look)
    yield from _row_routines(context, kernels)
    yield from _speed(context, kernels)


def device_kernels(context: Context) -> Kernels:
    """Those of CUDA; in a dry run the same by Triton's interpreter, where it is installed."""
    if not context.is_dry:
        return choose_kernels(context.device)
    try:
        from engine.cuda.kernels import triton_kernels
    except ImportError:
        return torch_kernels()
    return triton_kernels()


class _Bench:
    """Sequences with all their rows, and a cache for them."""

    def __init__(self, context: Context, dtype: str, lengths: list[int]) -> None:
        self._device = context.device
        self._kv_heads, self._heads, dim = (1, 2, 16) if context.is_dry else (KV_HEADS, HEADS, DIM)
        self.layout = KvLayout(1, self._kv_heads, dim, 16, dtype, ROWS_FORMAT)
        self.lengths = lengths
        counts = [self.layout.pages_for(length) for length in lengths]
        ids = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
        self._page_ids = [[ids.pop() for _ in range(count)] for count in counts]
        generator = torch.Generator(self._device).manual_seed(2)
        heads = self._heads + 2 * self._kv_heads
        self._qkv = [
            torch.randn(length, heads, dim, generator=generator, device=self._device).to(getattr(torch, dtype))
            for length in lengths
        ]

    def cache(self) -> KvCache:
        """An empty one."""
        cache = KvCache(self.layout, sum(map(len, self._page_ids)), self._device)
        cache.pages.fill_(float("nan"))
        return cache

    def batch(self, parts: list[Part]) -> tuple[Batch, Tensor]:
        """These rows of all sequences, and their query, key and value heads."""
        chunks = [
            Chunk([0] * (end - start), start, ids, sample=True)
            for (start, end), ids in zip(parts, self._page_ids, strict=True)
        ]
        own = [qkv[start:end] for qkv, (start, end) in zip(self._qkv, parts, strict=True)]
        return build_batch(chunks, self._device), torch.cat(own)

    def attend(self, kernels: Kernels, cache: KvCache, parts: list[Part], look: Look) -> Tensor:
        """Write these rows, and what attention gives for them."""
        batch, qkv = self.batch(parts)
        k, v = qkv[:, self._heads :].split(self._kv_heads, 1)
        kernels.write_kv(k, v, cache, 0, batch)
        return kernels.attend(qkv[:, : self._heads], cache, 0, batch, look)


def _lengths(context: Context) -> list[int]:
    return [33, 17] if context.is_dry else [1000, 129, 16, 257]


def _difference(context: Context, kernels: Kernels, dtype: str, look: Look) -> Row:
    """Of a prefill and of one more row each."""
    bench, worst = _Bench(context, dtype, _lengths(context)), 0.0
    caches = bench.cache(), bench.cache()
    for parts in ([(0, n - 1) for n in bench.lengths], [(n - 1, n) for n in bench.lengths]):
        ours, twin = (
            bench.attend(each, cache, parts, look)
            for each, cache in zip((kernels, torch_kernels()), caches, strict=True)
        )
        worst = max(worst, float((ours - twin).float().norm() / twin.float().norm()))
    limit = 1e-2 if dtype == "bfloat16" else 1e-5
    verdict = "as it should be" if worst < limit else f"WRONG: more than {limit:g}"  # NaN is wrong as well
    return Row(PART, f"attention {dtype}, reach {look.reach}: error against torch", worst, "", note=verdict)


def _same_bits(context: Context, kernels: Kernels, dtype: str, look: Look) -> Row:
    """Rows of a whole prefill beside the same rows in chunks, and one by one as decode computes them."""
    bench, num_steps = _Bench(context, dtype, _lengths(context)), 3 if context.is_dry else 40
    whole = bench.attend(kernels, bench.cache(), [(0, n) for n in bench.lengths], look).split(bench.lengths)
    cache, differing, total = bench.cache(), 0, 0
    middles = [n - min(num_steps, n - 1) for n in bench.lengths]
    steps = [[(0, n // 3) for n in middles], [(n // 3, n) for n in middles]]
    most = max(n - middle for n, middle in zip(bench.lengths, middles, strict=True))
    for step in range(most):  # who has no row left repeats its last one
        ends = [min(middle + step + 1, n) for middle, n in zip(middles, bench.lengths, strict=True)]
        steps.append([(end - 1, end) for end in ends])
    for parts in [[(start, max(start + 1, end)) for start, end in step] for step in steps]:
        own = bench.attend(kernels, cache, parts, look).split([end - start for start, end in parts])
        for (start, end), one, other in zip(parts, own, whole, strict=True):
            differing += int((one != other[start:end]).flatten(1).any(1).sum())
            total += end - start
    what = f"attention {dtype}, reach {look.reach}: rows whose bits depend on the path"
    return Row(PART, what, differing / total, "", note=f"{differing} of {total}")


def _row_routines(context: Context, kernels: Kernels) -> Iterator[Row]:
    """Norm, activations and rotation."""
    num, width, twins = (3, 32, torch_kernels()) if context.is_dry else (257, 4096, torch_kernels())
    x = torch.randn(num, 2 * width, device=context.device, dtype=torch.bfloat16)
    weight = torch.rand(width, device=context.device)
    angles = torch.rand(num, 8, device=context.device)
    positions = torch.arange(num, dtype=torch.int32, device=context.device)
    for name in ("rms_norm", "silu_mul", "gelu_mul", "rotate"):
        found = []
        for each in (kernels, twins):
            if name == "rms_norm":
                found.append(each.rms_norm(x[:, :width], weight, 1e-5))
            elif name == "rotate":
                found.append(x.view(num, -1, 16).clone())
                each.rotate(found[-1], angles.cos(), angles.sin(), positions)
            else:
                found.append((each.silu_mul if name == "silu_mul" else each.gelu_mul)(x))
        error = float((found[0].double() - found[1].double()).norm() / found[1].double().norm())
        yield Row(PART, f"{name} bfloat16: error against torch", error, "", note="" if error < 1e-2 else "WRONG")


def _speed(context: Context, kernels: Kernels) -> Iterator[Row]:
    """Attention alone, of one layer."""
    look = Look(DIM**-0.5)
    cases = [([40, 40], True)] if context.is_dry else [([1000], True), ([1000] * 128, True), ([8000], False)]
    for lengths, is_decode in cases:
        bench = _Bench(context, "bfloat16", lengths)
        cache = bench.cache()
        bench.attend(kernels, cache, [(0, n) for n in lengths], look)
        batch, qkv = bench.batch([(n - 1 if is_decode else 0, n) for n in lengths])
        q = qkv[:, : bench._heads]
        seconds = context.median_s(partial(kernels.attend, q, cache, 0, batch, look), 20)
        if is_decode:
            floor = ratio_s(sum(lengths) * bench.layout.token_bytes, context.rates.copy_bytes)
            what = f"decode attention, {len(lengths)} x {lengths[0]}, one layer"
        else:
            pairs = sum(n * (n + 1) // 2 for n in lengths)
            floor = ratio_s(4 * pairs * q.shape[1] * q.shape[2], context.rates.flops)
            what = f"prefill attention, {lengths[0]} tokens, one layer"
        yield Row(PART, what, ms(seconds), "ms", ms(floor), "started from Python")
