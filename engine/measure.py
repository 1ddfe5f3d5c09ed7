"""What this machine allows to one worker, measured: the best of a few tries, with the worker's device and threads.

read    bytes per second of a sum over far more than any cache holds
copy    the same of a copy, counting what is read and what is written
product FLOPs per second of a large matrix product: by torch, and by the linear layer that the model would run with
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import choose_kernels
from engine.load import EngineConfig
from engine.onednn import has_bf16_units
from pdserve.speed import Limits

READ_BYTES = 2**30
REPEATS = 5
_COLUMNS = 1024
_PRODUCT = {"cpu": (512, 1536, 1536), "cuda": (8192, 8192, 8192)}  # rows, in, out


@dataclass(frozen=True)
class Measured:
    """Rates, in units per second."""

    read_bytes_per_s: float
    copy_bytes_per_s: float
    flops_per_s: Mapping[str, float]  # by who multiplies

    @property
    def limits(self) -> Limits:
        """The most of each."""
        return Limits(self.read_bytes_per_s, max(self.flops_per_s.values()))


def measure(config: EngineConfig, read_bytes: int = READ_BYTES, repeats: int = REPEATS) -> Measured:
    """Takes about two seconds on a quiet machine. What else runs on it makes it look slower than it is."""
    torch.set_num_threads(config.threads)
    device = torch.device(config.device)
    data = torch.ones(read_bytes // 4 // _COLUMNS, _COLUMNS, device=device)
    vector, half = torch.ones(_COLUMNS, device=device), len(data) // 2
    read_s = min(_best_s(work, device, repeats) for work in (data.sum, lambda: data @ vector))
    copy_s = _best_s(lambda: data[:half].copy_(data[half : 2 * half]), device, repeats)
    flops = {name: _flops_per_s(product, device, repeats) for name, product in _products(config, device).items()}
    return Measured(data.nbytes / read_s, 2 * data[:half].nbytes / copy_s, flops)


def _products(config: EngineConfig, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """By name: torch in the dtype that it computes this model in, and the linear layer of the chosen kernels."""
    rows, inputs, outputs = _PRODUCT[device.type]
    dtype: torch.dtype = getattr(torch, config.dtype)
    x, weight = torch.randn(rows, inputs, device=device), torch.randn(outputs, inputs, device=device, dtype=dtype)
    is_emulated = device.type == "cpu" and not has_bf16_units()
    left, right = (x, weight.float()) if is_emulated else (x.to(dtype), weight)
    transposed = right.t()
    products: dict[str, Callable[[], Tensor]] = {f"torch {left.dtype}".replace("torch.", ""): lambda: left @ transposed}
    kernels = choose_kernels(device, fast=config.fast, threads=config.threads)
    if kernels.name != "torch":
        linear = kernels.linear(weight)
        products[f"{kernels.name} {config.dtype}"] = lambda: linear(x)
    return products


def _flops_per_s(product: Callable[[], Tensor], device: torch.device, repeats: int) -> float:
    rows, inputs, outputs = _PRODUCT[device.type]
    return 2 * rows * inputs * outputs / _best_s(product, device, repeats)


def _best_s(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The shortest wall time of `work` after a warm-up."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])
