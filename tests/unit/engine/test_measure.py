"""The machine's rates. How high they are is nobody's business here."""

import pytest
import torch

from engine import measure as module
from engine.load import EngineConfig
from engine.measure import measure


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_rate_is_measured_and_the_best_product_is_the_limit(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(module, "_PRODUCT", {"cpu": (16, 64, 64)})
    found = measure(EngineConfig("", "", dtype), read_bytes=2**20, repeats=1)  # type: ignore[arg-type]
    assert found.read_bytes_per_s > 0
    assert found.copy_bytes_per_s > 0
    assert any(name.startswith("torch ") for name in found.flops_per_s)
    assert min(found.flops_per_s.values()) > 0
    assert found.limits.flops_per_s == max(found.flops_per_s.values())
    assert torch.get_num_threads() == 1


def test_a_rate_is_that_of_the_shortest_try(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, 1, 10, 19, 20, 24, 30, 35])  # the first is a warm-up
    monkeypatch.setattr("engine.measure.time.perf_counter", lambda: next(clock))
    assert module._best_s(lambda: None, torch.device("cpu"), repeats=3) == 4
