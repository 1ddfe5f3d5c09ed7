"""The numeric routines that a model is built from, chosen once for a device.

`choose_kernels` returns the native ones (C, compiled at first use) on a CPU, those of Triton on CUDA, or where the
compiler is missing their torch twins. The native ones are path-invariant by construction: a row's result does not
depend, in any bit, on the other rows of the call. On a CPU activations are fp32 whatever the dtype of weights and
pages; on CUDA they have the model's dtype.
"""

import logging
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from engine import attention, linear, native, onednn, ops
from engine.attention import Look
from engine.batch import Batch
from engine.kv_cache import KvCache

log = logging.getLogger(__name__)


class MakeLinear(Protocol):
    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> linear.Linear:
        """Pack weight [out, in] (float32 or bfloat16) once."""


class WriteKv(Protocol):
    def __call__(self, k: Tensor, v: Tensor, cache: KvCache, layer: int, batch: Batch) -> None:
        """Put k and v, both [T, kv_heads, head_dim] (rows may be strided), into the batch's pages."""


class Attend(Protocol):
    def __call__(self, q: Tensor, cache: KvCache, layer: int, batch: Batch, look: Look) -> Tensor:
        """[T, heads, head_dim] to the same; the row at position p sees the keys up to p as far as `look` reaches."""


class RmsNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight along the last dimension of x [T, n]; weight [n] fp32."""


class NormHeads(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """`RmsNorm` of every head of x [T, heads, head_dim] in place; weight [heads, head_dim]."""


class GateMul(Protocol):
    def __call__(self, gate_up: Tensor) -> Tensor:
        """activation(gate) * up, where gate_up [T, 2 n] is both side by side; gives [T, n]."""


class Rotate(Protocol):
    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """Rotary embedding of x [T, heads, head_dim] in place.

        cos and sin [window, n] fp32, positions [T] int32. Of a head the first n elements turn against the next n.
        """


@dataclass(frozen=True)
class Kernels:
    """One consistent set; every routine works on tensors of the device that it was chosen for."""

    name: str  # "native" | "onednn" | "triton" | "torch"
    exact: bool  # path-invariant by construction
    linear: MakeLinear
    head: MakeLinear  # of the vocabulary, and for choices among experts: sums and returns fp32 in every dtype
    write_kv: WriteKv
    attend: Attend
    rms_norm: RmsNorm
    norm_heads: NormHeads
    silu_mul: GateMul
    gelu_mul: GateMul  # with the tanh form of gelu
    rotate: Rotate
    compiled: native.Library | None = None  # that they are of: a whole layer can be one call of it (engine/joined.py)
    capturable: bool = False  # no routine waits for the device, so that a CUDA graph can hold a whole step


def choose_kernels(device: torch.device, *, fast: bool = False, threads: int = 1) -> Kernels:
    """Native ones on a CPU with a C compiler, Triton's on CUDA where it is installed, else torch.

    With `fast`, oneDNN's linear layers where they are faster. `threads` share one call of the native ones, which
    changes no bits; torch and oneDNN have torch's own setting.
    """
    if device.type == "cuda" and find_spec("triton") is not None:
        from engine.cuda.kernels import triton_kernels  # compiles for the device at first use

        return triton_kernels()
    if device.type == "cuda":
        log.warning("triton is not installed: the slower torch kernels serve instead; pip install triton")
    library = native.load(threads=threads) if device.type == "cpu" else None
    if library is None:
        return torch_kernels()
    kernels = native_kernels(library)
    if fast and onednn.has_bf16_units():
        return replace(kernels, name="onednn", exact=False, linear=onednn.OneDnnLinear)
    return kernels


def torch_kernels() -> Kernels:
    """The twins, for any device."""
    return Kernels(
        name="torch",
        exact=False,
        linear=linear.TorchLinear,
        head=linear.TorchLinear,
        write_kv=attention.torch_write_kv,
        attend=attention.torch_attend,
        rms_norm=ops.torch_rms_norm,
        norm_heads=ops.torch_norm_heads,
        silu_mul=ops.torch_silu_mul,
        gelu_mul=ops.torch_gelu_mul,
        rotate=ops.torch_rotate,
    )


def native_kernels(library: native.Library) -> Kernels:
    """Those of the compiled library, for CPU tensors."""
    pages, rows = attention.NativeAttention(library), ops.NativeOps(library)
    return Kernels(
        name="native",
        exact=True,
        linear=linear.native_linear(library),
        head=linear.native_linear(library),
        write_kv=pages.write_kv,
        attend=pages.attend,
        rms_norm=rows.rms_norm,
        norm_heads=rows.norm_heads,
        silu_mul=rows.silu_mul,
        gelu_mul=rows.gelu_mul,
        rotate=rows.rotate,
        compiled=library,
    )
