"""What this machine allows: the floors that every figure stands beside. One thread, as a worker has.

decode  a step reads every weight once: weight bytes / bytes per second of a summing read
prefill a token costs 2 FLOPs per weight: FLOPs / FLOPs per second of a large fp32 matrix product
        (torch's own; where our kernels are quicker than that it is a yardstick, and no floor)
"""

import json
import sys
import time
from collections.abc import Callable
from statistics import median

import torch

REPEATS = 5


def seconds(work: Callable[[], object]) -> float:
    """Median wall time of `work` after one warm-up."""
    work()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times)


def measure() -> dict[str, float]:
    """Bytes per second of a read, FLOPs per second of a product."""
    torch.set_num_threads(1)
    data = torch.ones(256 * 2**20)  # 1 GiB of fp32: far larger than any cache
    vector = torch.ones(1024)
    matrix = data.view(-1, 1024)
    read_s = seconds(lambda: matrix @ vector)
    left, right = torch.randn(512, 1536), torch.randn(1536, 1536)
    product_s = seconds(lambda: left @ right)
    return {"read_bytes_per_s": data.nbytes / read_s, "flops_per_s": 2 * 512 * 1536 * 1536 / product_s}


if __name__ == "__main__":
    json.dump(measure(), sys.stdout)
