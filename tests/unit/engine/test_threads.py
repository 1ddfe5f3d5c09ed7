"""Kernels on several threads: the bits of one thread, small work left alone, and compilers without OpenMP."""

import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import native
from engine.attention import Look
from engine.batch import Chunk, build_batch
from engine.kernels import Kernels, native_kernels
from engine.kv_cache import PAGE_FORMAT, KvCache
from engine.load import EngineConfig, load_engine
from pdserve.model_card import KvLayout
from tests.toy import write_toy_model

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float32]
QUICK = [flag for flag in native.FLAGS if flag != "-O3"]  # to compile; bits are the same
SHAPES = [(16, 1, 5), (7, 576, 200), (1000, 37, 50), (33, 64, 1), (3, 3000, 40), (2050, 51, 3), (20, 30, 0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("libraries")


def _kernels(folder: Path, threads: int, flags: Sequence[str] = ("-DSMALL_WORK=0",)) -> Kernels:
    library = native.load(flags=[*QUICK, *flags], cache=folder, threads=threads)
    assert library is not None
    assert library.threads == threads
    return native_kernels(library)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)  # out, in, rows
def test_linear_layers_give_the_bits_of_one_thread(
    folder: Path, shape: tuple[int, int, int], dtype: torch.dtype, threads: int
) -> None:
    out, width, rows = shape
    weight, bias, x = torch.randn(out, width).to(dtype), torch.randn(out), torch.randn(rows, width)
    expected = _kernels(folder, 1).linear(weight, bias)(x)
    linear = _kernels(folder, threads).linear(weight, bias)
    for _ in range(5):
        assert torch.equal(linear(x), expected)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_gives_the_bits_of_one_thread(folder: Path, dtype: torch.dtype, threads: int) -> None:
    one, many = _kernels(folder, 1), _kernels(folder, threads)
    for heads in (6, 2, 100):
        expected = _attend(one, dtype, heads)
        for _ in range(3):
            assert torch.equal(_attend(many, dtype, heads), expected)


def _attend(kernels: Kernels, dtype: torch.dtype, heads: int) -> Tensor:
    """Prompts of 150 and 33 tokens, a later piece of one, and decoding rows between them."""
    pieces = [(0, 150), (77, 78), (0, 33), (40, 130), (0, 1)]  # first and last position
    chunks = [
        Chunk([0] * (end - start), start, range(i * 10, i * 10 + 10), True) for i, (start, end) in enumerate(pieces)
    ]
    batch, generator = build_batch(chunks, CPU), torch.Generator().manual_seed(heads)
    cache = KvCache(KvLayout(1, 2, 32, 16, str(dtype).removeprefix("torch."), PAGE_FORMAT), 50, CPU)
    k, v, q = (torch.randn(batch.num_rows, n, 32, generator=generator) for n in (2, 2, heads))
    kernels.write_kv(k, v, cache, 0, batch)
    return torch.cat([kernels.attend(q, cache, 0, batch, Look(0.1, reach)) for reach in (None, 50)])


def test_a_model_gives_the_bits_of_one_thread(tmp_path: Path) -> None:
    model, logits = write_toy_model(tmp_path), []
    chunks = [Chunk(list(range(1, 301)), 0, range(19), True), Chunk([7] * 30, 0, range(20, 22), True)]
    for threads in (1, 3):
        engine = load_engine(EngineConfig(str(model), "toy", num_pages=64, threads=threads))
        assert engine.card.exact
        logits.append(engine.runner.run(chunks))
    torch.set_num_threads(1)
    assert torch.equal(*logits)


def test_only_large_work_takes_threads(folder: Path) -> None:
    x, many, one = torch.randn(8, 256), _kernels(folder, 3, ()), _kernels(folder, 1, ())
    small, large = torch.randn(64, 256), torch.randn(2048, 256)
    assert _started(lambda: many.linear(large)(x)) == 2
    assert _started(lambda: many.linear(small)(x)) == 0
    assert _started(lambda: one.linear(large)(x)) == 0
    assert _started(lambda: _attend(many, torch.float32, 6)) == 2


def _started(call: Callable[[], object]) -> int:
    """Threads that a call starts, on a thread that has no team yet."""
    new: set[str] = set()

    def watch() -> None:
        before = set(os.listdir("/proc/self/task"))
        call()
        new.update(set(os.listdir("/proc/self/task")) - before)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    return len(new)


def test_fewer_threads_than_asked_for_do_all_the_work(folder: Path) -> None:
    one = native.load(flags=[*QUICK, "-DSMALL_WORK=0"], cache=folder)
    assert one is not None
    expected = _attend(native_kernels(one), torch.float32, 6)
    one.threads = 3  # compiled without OpenMP
    assert torch.equal(_attend(native_kernels(one), torch.float32, 6), expected)
    assert native_kernels(one).linear(torch.eye(512))(torch.eye(512)).equal(torch.eye(512))


def test_a_compiler_without_openmp_gives_one_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiler = tmp_path / "cc"
    words = "echo OpenMP is not for me >&2; exit 1"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-fopenmp*) {words};; esac\nexec {shutil.which("cc")} "$@"\n')
    compiler.chmod(0o755)
    with caplog.at_level(logging.WARNING):
        library = native.load(str(compiler), QUICK, tmp_path, threads=2)
    assert library is not None
    assert library.threads == 1
    (record,) = caplog.records
    assert "threads: 1 instead of 2" in record.getMessage()
    assert "OpenMP is not for me" in record.getMessage()


def test_a_compiler_that_fails_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert native.load(flags=["--no-such-flag"], cache=tmp_path, threads=2) is None
    (record,) = caplog.records
    assert "torch kernels serve instead" in record.getMessage()
