"""The Triton kernels by Triton's interpreter, on the CPU: equal to their twins, and in bits where they promise it.

They are skipped where triton is not installed; that Hopper's compiler takes them is a test of its own.
"""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.attention import Look
from engine.batch import Chunk, build_batch
from engine.cuda.graphs import StepGraphs
from engine.kernels import Kernels, torch_kernels
from engine.kv_cache import ROWS_FORMAT, KvCache
from engine.model import Model
from engine.runner import Runner
from engine.weights import random_weights
from pdserve.model_card import KvLayout
from tests.toy import toy_config
from tests.triton_interpreter import interpreted_kernels

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
OURS = interpreted_kernels()
CPU = torch.device("cpu")
LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=64, page_tokens=16, dtype="bfloat16", page_format=ROWS_FORMAT)
LOOK = Look(64**-0.5)
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
Part = tuple[int, int]


class Sequences:
    """Random rows of some sequences, on pages in any order."""

    def __init__(self, layout: KvLayout, lengths: list[int], heads: int = 6) -> None:
        generator = torch.Generator().manual_seed(sum(lengths))
        counts = [layout.pages_for(length) for length in lengths]
        ids = torch.randperm(sum(counts), generator=generator).tolist()
        self.page_ids = [[ids.pop() for _ in range(count)] for count in counts]
        self.layout, self.heads = layout, heads
        shape = heads + 2 * layout.num_kv_heads, layout.head_dim
        dtype = getattr(torch, layout.dtype)
        self._qkv = [torch.randn(length, *shape, generator=generator).to(dtype) for length in lengths]

    def cache(self) -> KvCache:
        cache = KvCache(self.layout, sum(map(len, self.page_ids)) + 1, CPU)
        cache.pages.fill_(float("nan"))  # unused slots hold anything
        return cache

    def attend(self, kernels: Kernels, cache: KvCache, parts: list[Part], look: Look = LOOK) -> list[Tensor]:
        """Write and attend rows `parts` of the sequences; those with none are left out."""
        busy = [(index, part) for index, part in enumerate(parts) if part[0] < part[1]]
        chunks = [Chunk([0] * (end - start), start, self.page_ids[index], True) for index, (start, end) in busy]
        batch = build_batch(chunks, CPU)
        qkv = torch.cat([self._qkv[index][start:end] for index, (start, end) in busy])
        k, v = qkv[:, self.heads :].split(self.layout.num_kv_heads, 1)
        kernels.write_kv(k, v, cache, 1, batch)
        out = kernels.attend(qkv[:, : self.heads], cache, 1, batch, look)
        return list(out.split([end - start for _, (start, end) in busy]))


def close(ours: list[Tensor], twins: list[Tensor], dtype: str) -> bool:
    difference = torch.cat(ours).float() - torch.cat(twins).float()
    return bool(difference.abs().max() <= TOLERANCE[dtype])


@pytest.mark.parametrize("look", [LOOK, Look(0.3, 1), Look(0.1, 20)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_prefill_and_decode_equal_the_twin(dtype: str, look: Look) -> None:
    sequences = Sequences(replace(LAYOUT, dtype=dtype), [50, 17, 1, 16, 35], heads=4)
    caches = sequences.cache(), sequences.cache()
    steps: list[list[Part]] = [
        [(0, 20), (0, 16), (0, 0), (0, 15), (0, 1)],  # chunks of several lengths
        [(20, 49), (16, 16), (0, 1), (15, 16), (1, 34)],
        [(49, 50), (16, 17), (0, 0), (0, 0), (34, 35)],  # decode
    ]
    for parts in steps:
        ours, twins = (
            sequences.attend(kernels, cache, parts, look)
            for kernels, cache in zip((OURS, torch_kernels()), caches, strict=True)
        )
        assert close(ours, twins, dtype)
    assert torch.equal(*(cache.pages.view(torch.uint8) for cache in caches))


# heads, kv heads, head_dim, page tokens: a group of three, one head each, wide heads, odd sizes, very many heads
SHAPES = [(3, 1, 128, 16), (2, 2, 16, 32), (2, 1, 256, 16), (2, 1, 80, 48), (66, 1, 16, 16)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: tuple[int, int, int, int], dtype: str) -> None:
    heads, kv_heads, dim, page_tokens = shape
    layout = replace(LAYOUT, num_kv_heads=kv_heads, head_dim=dim, page_tokens=page_tokens, dtype=dtype)
    sequences, look = Sequences(layout, [37, 3], heads), Look(dim**-0.5)
    caches = sequences.cache(), sequences.cache()
    for parts in ([(0, 36), (0, 2)], [(36, 37), (2, 3)]):
        ours, twins = (
            sequences.attend(kernels, cache, parts, look)
            for kernels, cache in zip((OURS, torch_kernels()), caches, strict=True)
        )
        assert close(ours, twins, dtype)


@pytest.mark.parametrize("reach", [None, 33, 140])
def test_a_row_has_the_same_bits_on_every_path(reach: int | None) -> None:
    """Across blocks of 128 keys, whole, in chunks, and alone beside others."""
    layout, kernels, look = replace(LAYOUT, num_kv_heads=1), OURS, replace(LOOK, reach=reach)
    sequences = Sequences(layout, [270, 9], heads=2)
    whole, other = sequences.attend(kernels, sequences.cache(), [(0, 270), (0, 9)], look)
    cache = sequences.cache()
    chunks = [sequences.attend(kernels, cache, [part, (0, 0)], look)[0] for part in ((0, 100), (100, 266))]
    assert torch.equal(torch.cat(chunks), whole[:266])
    for row in range(266, 270):
        own, second = sequences.attend(kernels, cache, [(row, row + 1), (row - 266, row - 265)], look)
        assert torch.equal(own[0], whole[row])
        assert torch.equal(second[0], other[row - 266])


def test_a_sequence_without_rows_is_passed_over() -> None:
    sequences, kernels = Sequences(LAYOUT, [40, 1]), OURS
    cache = sequences.cache()
    (whole,) = sequences.attend(kernels, cache, [(0, 40), (0, 0)])
    batch = build_batch([Chunk([0], 39, sequences.page_ids[0], True)], CPU)
    wider = replace(
        batch,
        positions=torch.tensor([39, 5], dtype=torch.int32),
        row_starts=torch.tensor([0, 1, 1], dtype=torch.int32),
        page_table=torch.nn.functional.pad(batch.page_table, (0, 13, 0, 1)),
        token_ids=torch.zeros(2, dtype=torch.int64),
        longest_context=256,
    )
    q = sequences._qkv[0][39:40, : sequences.heads]
    out = kernels.attend(torch.cat([q, q]), cache, 1, wider, LOOK)
    assert torch.equal(out[0], whole[39])


def test_wrong_shapes_and_formats_are_refused() -> None:
    kernels, batch = OURS, build_batch([Chunk([0], 0, [0], True)], CPU)
    cache, q = KvCache(LAYOUT, 1, CPU), torch.zeros(1, 6, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.attend(q[:, :5], cache, 0, batch, LOOK)
    with pytest.raises(ValueError, match="behind one another"):
        kernels.attend(q.repeat(1, 1, 2)[:, :, ::2], cache, 0, batch, LOOK)
    with pytest.raises(ValueError, match="pages of format rows"):
        kernels.attend(q, KvCache(replace(LAYOUT, page_format="groups16"), 1, CPU), 0, batch, LOOK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [48, 100])
def test_row_routines_equal_their_twins(width: int, dtype: torch.dtype) -> None:
    ours, twins, tolerance = OURS, torch_kernels(), 1e-5 if dtype == torch.float32 else 3e-2
    x, weight = (torch.randn(5, 2 * width) * 3).to(dtype), torch.randn(3, width)
    narrow = x[:, :width]
    heads, angles = torch.randn(5, 5, width).to(dtype), torch.randn(60, width // 4)
    positions = torch.tensor([0, 59, 3, 4, 5], dtype=torch.int32)
    found = []
    for kernels in (ours, twins):
        qkv = heads.clone()
        kernels.norm_heads(qkv[:, :3], weight, 1e-6)
        kernels.rotate(qkv[:, :3], angles.cos(), angles.sin(), positions)
        found.append((kernels.rms_norm(narrow, weight[0], 1e-5), kernels.silu_mul(x), kernels.gelu_mul(x), qkv))
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype == dtype
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def test_activations_of_extremes_stay_finite() -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, 0.0, 100.0, 1e30])
    gate_up, kernels = torch.cat([gate, torch.ones(6)])[None], OURS
    torch.testing.assert_close(kernels.silu_mul(gate_up)[0], torch.nn.functional.silu(gate), atol=1e-30, rtol=1e-6)
    torch.testing.assert_close(kernels.gelu_mul(gate_up)[0], gate.clamp(min=0), atol=1e-30, rtol=1e-6)


def test_a_model_runs_on_them_whole_and_in_recorded_steps(tmp_path: Path) -> None:
    config = toy_config(tmp_path, num_hidden_layers=2)
    layout = KvLayout(2, 2, 16, 16, "float32", ROWS_FORMAT)
    logits = []
    for kernels in (OURS, torch_kernels()):
        model, cache = Model(config, random_weights(config, 0), kernels, torch.float32, CPU), KvCache(layout, 8, CPU)
        runner = Runner(model, cache, StepGraphs(model, cache, lambda work: (work(), work)[1]))
        rows = [runner.run([Chunk(range(5, 25), 0, [3, 1], True), Chunk([7], 0, [0], True)])]
        for step in range(2):
            chunks = [Chunk([9 + step], 20 + step, [3, 1], True), Chunk([8], 1 + step, [0], True)]
            rows.append(runner.run(chunks).clone())
        logits.append(torch.cat(rows))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


def test_hopper_takes_them(tmp_path: Path) -> None:
    """Compiled to machine code for compute capability 9.0, in a process without the interpreter; no GPU needed."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.unit.engine.compile_for_hopper"]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "prefill" in done.stdout
