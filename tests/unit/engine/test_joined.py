"""A layer in one call gives the bits of its single calls, in every family."""

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.batch import Chunk
from engine.config_file import read_config
from engine.joined import PARTS, JoinedLayer, JoinedPass
from engine.kernels import Kernels, choose_kernels, torch_kernels
from engine.kv_cache import KvCache, kv_layout, page_format
from engine.layers import DecoderLayer
from engine.model import Model
from engine.runner import Runner
from engine.weights import random_weights
from tests.toy import write_toy_model
from tests.toy_families import FAMILIES

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(choose_kernels(CPU).compiled is None, reason="no C compiler")


def _runner(folder: Path, kernels: Kernels, dtype: str) -> Runner:
    config = read_config(folder)
    model = Model(config, random_weights(config, 0), kernels, getattr(torch, dtype), CPU)
    return Runner(model, KvCache(kv_layout(config, dtype, page_format(CPU)), 32, CPU))


def _outcome(runner: Runner) -> list[Tensor]:
    """Of prompts longer than a block of the MLP's rows, and decode steps beside a chunk: logits and pages."""
    prompt, short = [7 * i % 500 for i in range(230)], [11 * i % 500 for i in range(50)]
    first = runner.run([Chunk(prompt, 0, range(15), True), Chunk(short[:30], 0, range(15, 20), True)])
    second = runner.run([Chunk([3], 230, range(15), True), Chunk(short[30:], 30, range(15, 20), True)])
    return [bits.view(torch.int32) for bits in (first.clone(), second)] + [runner.cache.pages.view(torch.uint8)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_are_those_of_the_single_calls(tmp_path: Path, family: str, dtype: str) -> None:
    folder, kernels = write_toy_model(tmp_path, **FAMILIES[family]), choose_kernels(CPU)
    one, other = (_runner(folder, each, dtype) for each in (kernels, replace(kernels, compiled=None)))
    has_experts = any(layer.experts is not None for layer in one.model.config.layers)
    assert any(isinstance(layer, JoinedLayer) for layer in one.model.layers) or has_experts
    assert all(isinstance(layer, DecoderLayer) for layer in other.model.layers)
    for ours, theirs in zip(_outcome(one), _outcome(other), strict=True):
        assert torch.equal(ours, theirs)


def test_other_kernels_are_not_joined(tmp_path: Path) -> None:
    runner = _runner(write_toy_model(tmp_path), torch_kernels(), "float32")
    assert all(isinstance(layer, DecoderLayer) for layer in runner.model.layers)


def test_every_part_is_timed(tmp_path: Path) -> None:
    runner = _runner(write_toy_model(tmp_path), choose_kernels(CPU), "float32")
    forward, spent_s = runner.start([Chunk([1, 2, 3], 0, [0], True)]), (ctypes.c_double * len(PARTS))()
    layers = [layer for layer in runner.model.layers if isinstance(layer, JoinedLayer)]
    JoinedPass(layers, forward._batch, runner.cache, spent_s)(1, torch.randn(3, 64))
    assert all(seconds > 0 for seconds in spent_s)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    runner = _runner(write_toy_model(tmp_path), choose_kernels(CPU), "float32")
    layer, batch = runner.model.layers[0], runner.start([Chunk([1, 2, 3], 0, [0], True)])._batch
    for hidden in (torch.zeros(2, 64), torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(64, 3).t()):
        with pytest.raises(ValueError, match="expected"):
            layer(hidden, batch, runner.cache)
    with pytest.raises(IndexError, match="page table"):
        layer(torch.zeros(3, 64), replace(batch, page_table=batch.page_table + 32), runner.cache)
    with pytest.raises(IndexError, match="rotary tables"):
        layer(torch.zeros(3, 64), replace(batch, positions=batch.positions + 512), runner.cache)
