"""benchmarks.engine accounts for a whole step, with joined layers and call by call."""

import argparse
from pathlib import Path

import pytest

from benchmarks.engine import SAMPLINGS, profile, table
from benchmarks.stopwatch import LINEARS, bench_of
from engine.load import EngineConfig
from engine.measure import Measured
from tests.toy import write_toy_model


@pytest.mark.parametrize("by_call", [False, True])
def test_every_part_has_its_time(tmp_path: Path, by_call: bool) -> None:
    config = EngineConfig(str(write_toy_model(tmp_path, vocab_size=600)), "toy", "float32", num_pages=64)
    given = argparse.Namespace(batches=[3], context=40, prompt=300, steps=4)
    result = profile(bench_of(config, by_call=by_call), Measured(1e9, 1e9, {"us": 1e9}), given)
    for column in result["columns"].values():
        parts = column["parts"]
        named = {"norms", "rotation", "KV into pages", "attention", "activation", *LINEARS}
        assert all(parts[name] > 0 for name in named)
        assert sum(parts[name] for name in named) < parts["forward"]
    decode = result["columns"]["decode, 3 x 40"]["parts"]
    assert decode["forward"] < decode["step"]
    assert all(decode[name] > 0 for name in SAMPLINGS)
    assert "| linear: gate, up |" in table(result)
