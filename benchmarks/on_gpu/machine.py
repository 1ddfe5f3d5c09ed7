"""The rates that are floors: a copy on the device, copies to and from pinned memory, a large matrix product."""

import platform
from collections.abc import Iterator

import torch

from benchmarks.on_gpu.report import Context, Rates, Row

PART = "machine"


def rates(context: Context) -> Iterator[Row | Rates]:
    """Rates for the other parts, and what the versions of this machine can do."""
    device = context.device
    size = 2**20 if context.is_dry else 4 * 2**30
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = context.best_s(lambda: target.copy_(source))
    host = torch.empty(size // 16, dtype=torch.uint8, pin_memory=not context.is_dry)
    to_host_s = context.best_s(lambda: host.copy_(source[: len(host)], non_blocking=True))
    from_host_s = context.best_s(lambda: target[: len(host)].copy_(host, non_blocking=True))
    edge = 64 if context.is_dry else 8192
    left, right = (torch.randn(edge, edge, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_s = context.best_s(lambda: left @ right, 20)
    name = platform.processor() or "CPU" if context.is_dry else torch.cuda.get_device_name()
    yield Rates(name, 2 * size / copy_s, len(host) / to_host_s, len(host) / from_host_s, 2 * edge**3 / product_s)
    if not context.is_dry:
        free, total = torch.cuda.mem_get_info()
        yield Row(PART, "memory free", free / 1e9, "GB", note=f"of {total / 1e9:.0f}; CUDA {torch.version.cuda}")
