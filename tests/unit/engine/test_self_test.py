"""The self-test passes for kernels that keep the promise, and fails for kernels that break it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.config_file import read_config
from engine.kernels import Kernels, choose_kernels
from engine.linear import Linear
from engine.load import Engine
from engine.model import Model
from engine.self_test import is_path_invariant
from engine.weights import load_weights
from tests.toy import toy_engine, write_toy_model

CPU = torch.device("cpu")


class CountsRows:
    """A linear layer whose last bits depend on the number of rows, as those of many libraries do."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        y = self._linear(x)
        return y * (1 + 2**-20) if x.shape[0] >= 16 else y


def model_with(engine: Engine, folder: Path, kernels: Kernels) -> Model:
    config = read_config(folder)
    return Model(config, load_weights(folder, config), kernels, torch.float32, CPU)


def test_native_kernels_are_exact(tmp_path: Path) -> None:
    kernels = choose_kernels(CPU)
    if not kernels.exact:
        pytest.skip("no C compiler here")
    for dtype in ("float32", "bfloat16"):
        assert toy_engine(write_toy_model(tmp_path), dtype).card.exact


def test_a_dependence_on_the_number_of_rows_is_found(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path)
    engine = toy_engine(folder)
    good = choose_kernels(CPU)
    bad = replace(good, linear=lambda weight, bias=None: CountsRows(good.linear(weight, bias)))
    assert is_path_invariant(model_with(engine, folder, good), engine.card.kv_layout, CPU) == engine.card.exact
    assert not is_path_invariant(model_with(engine, folder, bad), engine.card.kv_layout, CPU)


def test_short_windows_are_tested_too(tmp_path: Path) -> None:
    for window in (1, 2, 17):
        engine = toy_engine(write_toy_model(tmp_path / str(window), max_position_embeddings=window))
        assert engine.card.exact == choose_kernels(CPU).exact
