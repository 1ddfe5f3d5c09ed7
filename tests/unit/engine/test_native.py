"""Compiling the kernels: concurrent first use, no compiler, bad compiler, and bits that no width of vectors changes."""

import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine import native
from engine.attention import Look
from engine.batch import Chunk, build_batch
from engine.kernels import Kernels, choose_kernels, native_kernels, torch_kernels
from engine.kv_cache import PAGE_FORMAT, KvCache
from pdserve.model_card import KvLayout

CPU = torch.device("cpu")
QUICK = tuple("-O0" if flag == "-O3" else flag for flag in native.FLAGS)  # to compile; bits are the same


def _load(cache: Path, flags: Sequence[str] = QUICK) -> native.Library:
    library = native.load(flags=flags, cache=cache)
    assert library is not None
    return library


def test_the_machine_of_the_tests_has_a_compiler() -> None:
    kernels = choose_kernels(CPU)
    assert (kernels.name, kernels.exact) == ("native", True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the library."""
    cache = tmp_path_factory.mktemp("compiled")
    _load(cache)
    return cache


def test_a_second_load_compiles_nothing(compiled: Path) -> None:
    (library,) = compiled.glob("*.so")
    written = library.stat().st_mtime_ns
    _load(compiled)
    assert [file.stat().st_mtime_ns for file in compiled.glob("*.so")] == [written]


def test_processes_that_start_together_share_one_library(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from engine import native;"
        f"sys.exit(native.load(flags={QUICK!r}, cache=pathlib.Path({str(tmp_path)!r})) is None)"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code], cwd=_root()) for _ in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    assert len(list(tmp_path.glob("*.so"))) == 1
    assert not list(tmp_path.glob("build-*"))


def test_without_a_compiler_there_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert native.load(compiler="no-such-compiler", cache=tmp_path) is None
    assert "no C compiler (no-such-compiler)" in caplog.text


def test_a_compiler_that_fails_is_a_warning_with_its_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert native.load(flags=["--no-such-flag"], cache=tmp_path) is None
    assert "no-such-flag" in caplog.text
    assert not list(tmp_path.glob("*.so"))


def test_a_broken_library_in_the_cache_is_a_warning(
    compiled: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (library,) = compiled.glob("*.so")
    (tmp_path / library.name).write_bytes(b"not a library")
    with caplog.at_level(logging.WARNING):
        assert native.load(flags=QUICK, cache=tmp_path) is None
    assert "torch kernels serve instead" in caplog.text


def test_a_cache_that_cannot_be_written_is_done_without(compiled: Path, tmp_path: Path) -> None:
    (library,), compiler = compiled.glob("*.so"), tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\nfor each; do\n[ "$last" = -o ] && exec cp {library} "$each"\nlast=$each\ndone\n')
    compiler.chmod(0o755)
    assert native.load(str(compiler), QUICK, cache=compiler / "cache") is not None


def test_other_devices_get_the_twins() -> None:
    kernels = choose_kernels(torch.device("meta"))
    assert (kernels.name, kernels.exact) == ("torch", False)
    assert kernels == torch_kernels()


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_vectors_of_every_width_give_the_same_bits(tmp_path: Path, lanes: int) -> None:
    other, ours = native_kernels(_load(tmp_path, [*QUICK, f"-DLANES={lanes}"])), choose_kernels(CPU)
    x, weight = torch.randn(9, 50), torch.randn(70, 50)
    assert torch.equal(other.rms_norm(x, x[0], 1e-5), ours.rms_norm(x, x[0], 1e-5))
    assert torch.equal(other.silu_mul(x), ours.silu_mul(x))
    assert torch.equal(other.gelu_mul(x), ours.gelu_mul(x))
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(other.linear(weight.to(dtype))(x), ours.linear(weight.to(dtype))(x))
        assert torch.equal(_attend(other, dtype), _attend(ours, dtype))


def _attend(kernels: Kernels, dtype: torch.dtype) -> torch.Tensor:
    """A prompt of 150 tokens, and one row that sees the first 78 of them."""
    batch = build_batch([Chunk([0] * 150, 0, list(range(10)), True), Chunk([0], 77, list(range(5)), True)], CPU)
    cache = KvCache(KvLayout(1, 2, 32, 16, str(dtype).removeprefix("torch."), PAGE_FORMAT), 10, CPU)
    k, q, v = (torch.randn(151, heads, 32, generator=torch.Generator().manual_seed(heads)) for heads in (2, 6, 2))
    kernels.write_kv(k, v, cache, 0, batch)
    return torch.cat([kernels.attend(q, cache, 0, batch, Look(0.2, reach)) for reach in (None, 70)])


def _root() -> Path:
    return Path(native.__file__).parents[1]
