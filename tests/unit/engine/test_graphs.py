"""Decode steps that are recorded and repeated: what a step of this size gives does not depend on the steps before."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.batch import Chunk
from engine.cuda.graphs import StepGraphs
from engine.kernels import torch_kernels
from engine.kv_cache import ROWS_FORMAT, KvCache
from engine.load import step_graphs
from engine.model import Model
from engine.runner import Runner
from engine.weights import random_weights
from pdserve.model_card import KvLayout
from tests.toy import toy_config

CPU = torch.device("cpu")
LAYOUT = KvLayout(3, 2, 16, 16, "float32", ROWS_FORMAT)
PROMPTS = ([5, 6, 7], list(range(20, 60)), [9])
PAGES = ([4], [1, 7, 2, 9], [3, 5])


class Recorder:
    """In the place of CUDA's: repeating computes again, from the same buffers."""

    def __init__(self) -> None:
        self.sizes = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.sizes += 1
        work()
        return work


@pytest.fixture
def model(tmp_path: Path) -> Model:
    config = toy_config(tmp_path)
    return Model(config, random_weights(config, 0), torch_kernels(), torch.float32, CPU)


def run(runner: Runner, cut: list[int]) -> list[torch.Tensor]:
    """Prefill, then steps of the sequences named, one token further each time."""
    prompts = [Chunk(prompt, 0, pages, True) for prompt, pages in zip(PROMPTS, PAGES, strict=True)]
    rows, lengths = [runner.run(prompts)], [len(prompt) for prompt in PROMPTS]
    for step, count in enumerate(cut):
        chunks = [Chunk([30 + step + index], lengths[index], PAGES[index], True) for index in range(count)]
        rows.append(runner.run(chunks).clone())
        for index in range(count):
            lengths[index] += 1
    return rows


def test_recorded_steps_equal_those_that_are_computed(model: Model) -> None:
    recorder, cuts = Recorder(), [3, 3, 1, 2, 3, 2, 1]
    plain = Runner(model, KvCache(LAYOUT, 12, CPU))
    cache = KvCache(LAYOUT, 12, CPU)
    repeated = Runner(model, cache, StepGraphs(model, cache, recorder))
    for one, other in zip(run(repeated, cuts), run(plain, cuts), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache.pages, plain.cache.pages, atol=1e-6, rtol=1e-5)
    assert recorder.sizes == 3  # 1, 2 and 4 sequences
    assert (repeated.progress, repeated.tally.work(0, 0)) == (plain.progress, plain.tally.work(0, 0))


def test_sequences_that_fill_a_batch_up_write_nowhere(model: Model) -> None:
    cache = KvCache(LAYOUT, 12, CPU)
    runner = Runner(model, cache, StepGraphs(model, cache, Recorder()))
    run(runner, [3, 3])
    before = cache.pages.clone()
    runner.run([Chunk([1], 43, PAGES[1], True)] * 3)  # the fourth is none
    changed = (before != cache.pages).flatten(1).any(1).nonzero().flatten()
    assert changed.tolist() == [2]


def test_a_wrong_chunk_is_refused(model: Model) -> None:
    cache = KvCache(LAYOUT, 12, CPU)
    runner = Runner(model, cache, StepGraphs(model, cache, Recorder()))
    with pytest.raises(AssertionError, match="page outside"):
        runner.run([Chunk([1], 0, [12], True)])


def test_only_cuda_records(model: Model) -> None:
    assert step_graphs(model, KvCache(LAYOUT, 1, CPU), torch_kernels()) is None
