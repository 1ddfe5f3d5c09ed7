"""Compiles every Triton kernel for compute capability 9.0 and prints what it takes of a multiprocessor.

    python -m tests.unit.engine.compile_for_hopper [--all]

Launches are turned into compilations, so kernels, shapes and options are those of the engine.
"""

import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
from triton import JITFunction, knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from engine.attention import Look
from engine.batch import Chunk, build_batch
from engine.cuda.kernels import triton_kernels
from engine.kv_cache import ROWS_FORMAT, KvCache
from pdserve.model_card import KvLayout

CPU = torch.device("cpu")
SHARED_LIMIT = 227 * 1024


class Hopper:
    """A driver that knows its device and nothing else."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiling(kernel: Any, grid: Any) -> Any:
    """In the place of a launch."""

    def compile_(*args: Any, **options: Any) -> None:
        compiled = kernel.warmup(*args, grid=grid, **options)
        shared = compiled.metadata.shared
        assert shared <= SHARED_LIMIT, f"{kernel.__name__} takes {shared} bytes of shared memory"
        print(f"{kernel.__name__}: {shared} bytes of shared memory; {registers(compiled.asm['cubin'])}")

    return compile_


def registers(cubin: bytes) -> str:
    """What a program of it takes, as the disassembler says."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name], capture_output=True)
    return b" ".join(re.findall(rb"(?:REG|STACK|LOCAL):\d+", said.stdout)).decode()


def attention(heads: int, kv_heads: int, dim: int, dtype: str) -> None:
    kernels, cache = triton_kernels(), KvCache(KvLayout(1, kv_heads, dim, 16, dtype, ROWS_FORMAT), 64, CPU)
    for tokens in (1, 40):
        batch = build_batch([Chunk([0] * tokens, 700, list(range(64)), True)], CPU)
        qkv = torch.zeros(tokens, heads + 2 * kv_heads, dim, dtype=getattr(torch, dtype))
        print(f"{heads} x {dim} over {kv_heads}, {dtype}, {tokens} rows")
        k, v = qkv[:, heads:].split(kv_heads, 1)
        kernels.write_kv(k, v, cache, 0, batch)
        kernels.attend(qkv[:, :heads], cache, 0, batch, Look(0.1))


def rows() -> None:
    kernels, x = triton_kernels(), torch.zeros(2, 8192, dtype=torch.bfloat16)
    kernels.rms_norm(x, torch.zeros(8192), 1e-5)
    kernels.silu_mul(x)
    kernels.gelu_mul(x)
    heads, table = x.view(2, 64, 128), torch.zeros(16, 64)
    kernels.norm_heads(heads, torch.zeros(64, 128), 1e-6)
    kernels.rotate(heads, table, table, torch.zeros(2, dtype=torch.int32))


if __name__ == "__main__":
    driver.set_active(Hopper())
    JITFunction.__getitem__ = compiling
    rows()
    attention(32, 8, 128, "bfloat16")
    if "--all" in sys.argv:
        attention(4, 1, 256, "bfloat16")
        attention(9, 3, 64, "bfloat16")
    attention(8, 2, 64, "float32")
