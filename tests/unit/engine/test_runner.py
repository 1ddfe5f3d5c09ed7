"""The runner, and what load_engine puts together around it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import load
from engine.batch import Chunk
from engine.load import Engine, EngineConfig, load_engine
from engine.sampler import Step, sample
from engine.weights import fingerprint, random_weights
from pdserve.errors import ConfigError
from pdserve.request import Sampling, WorkRequest
from tests.toy import toy_config, toy_engine, write_toy_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return toy_engine(folder)


def test_only_chunks_that_ask_get_logits(engine: Engine) -> None:
    chunks = [Chunk([1, 2], 0, [0], True), Chunk([3], 0, [1], False), Chunk([4, 5, 6], 0, [2], True)]
    logits = engine.runner.run(chunks)
    assert (logits.shape, logits.dtype) == ((2, 512), torch.float32)
    assert torch.equal(logits[1], engine.runner.run(chunks[2:])[0])
    assert engine.runner.run([Chunk([3], 0, [1], False)]).shape == (0, 512)


def test_progress_grows_by_one_per_layer(engine: Engine) -> None:
    before = engine.runner.progress
    engine.runner.run([Chunk([1], 0, [0], True)])
    assert engine.runner.progress == before + 3


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk([512], 0, [0], True),
        Chunk([-1], 0, [0], True),
        Chunk([1], -1, [0], True),
        Chunk([1], 512, range(64), True),
        Chunk([1], 16, [0], True),
        Chunk([1], 0, [64], True),
        Chunk([1], 0, [-1], True),
    ],
)
def test_what_would_touch_foreign_memory_stops(engine: Engine, chunk: Chunk) -> None:
    with pytest.raises(AssertionError):
        engine.runner.run([chunk])


def test_the_last_position_of_the_window_works(engine: Engine) -> None:
    assert engine.runner.run([Chunk([1], 511, range(32), True)]).isfinite().all()


def test_the_card_describes_the_model(folder: Path, engine: Engine) -> None:
    card, config = engine.card, toy_config(folder / "again")
    assert (card.name, card.vocab_size, card.window, card.eos_token_ids) == ("toy", 512, 512, (2,))
    assert card.fingerprint == fingerprint(config, random_weights(config, 0))
    assert (card.kv_layout.page_tokens, card.kv_layout.page_bytes) == (16, 3 * 2 * 2 * 16 * 16 * 4)
    bf16 = toy_engine(folder, "bfloat16").card
    assert bf16.fingerprint == card.fingerprint
    assert bf16.kv_layout == replace(card.kv_layout, dtype="bfloat16")


def test_logits_become_tokens(engine: Engine) -> None:
    request = WorkRequest("label", (5, 6, 7), 3, Sampling(temperature=0.0), max_tokens=1)
    logits = engine.runner.run([Chunk(request.token_ids, 0, [0], True)])
    token = sample(logits, [Step(request, 0)])[0]
    assert (token.number, token.token_id, token.finish) == (0, int(logits.argmax()), "length")


def test_pages_as_configured_or_by_window(folder: Path, engine: Engine) -> None:
    assert engine.cache.num_pages == 64
    assert load_engine(EngineConfig(str(folder), "toy", "float32")).cache.num_pages == 16384 // 16


def test_too_little_memory_is_refused_with_the_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page_bytes = 12288
    monkeypatch.setattr(load, "_available_bytes", lambda _device: 4 * 40 * page_bytes)
    assert load_engine(EngineConfig(str(folder), "toy", "float32")).cache.num_pages == 40
    monkeypatch.setattr(load, "_available_bytes", lambda _device: 4 * 31 * page_bytes)
    with pytest.raises(ConfigError, match=r"512 tokens needs 0 MiB.*num_pages"):
        load_engine(EngineConfig(str(folder), "toy", "float32"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_a_device_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="cuda"):
        load_engine(EngineConfig(str(folder), "toy", device="cuda"))


@pytest.mark.parametrize("changes", [{"head_dim": 8}, {"head_dim": 20}])
def test_sizes_that_the_pages_cannot_hold_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="head_dim"):
        toy_engine(write_toy_model(tmp_path, **changes))
