"""The model as a function: causal, and the same weights before and after."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch import Chunk, build_batch
from engine.config_file import read_config
from engine.kernels import choose_kernels, torch_kernels
from engine.kv_cache import KvCache
from engine.load import Engine
from engine.model import Model
from engine.runner import Runner
from engine.weights import load_weights, random_weights
from tests.toy import toy_config, toy_engine, write_toy_model

CPU = torch.device("cpu")
PROMPT = torch.randint(512, (70,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return toy_engine(write_toy_model(tmp_path_factory.mktemp("toy")))


def all_logits(engine: Engine, token_ids: list[int]) -> tuple[Tensor, KvCache]:
    """Logits after every token of a prompt, and a cache whose first pages hold its KV."""
    cache = KvCache(engine.cache.layout, 8, CPU)
    model = engine.runner.model
    batch = build_batch([Chunk(token_ids, 0, range(8), sample=True)], CPU)
    batch = replace(batch, sampled_rows=torch.arange(len(token_ids)))
    hidden = model.embed(batch)
    for layer in model.layers:
        hidden = layer(hidden, batch, cache)
    return model.logits(hidden, batch), cache


def with_other_token(position: int) -> list[int]:
    """The prompt with one token changed."""
    return [(token_id + (index == position)) % 512 for index, token_id in enumerate(PROMPT)]


def keys_and_values(cache: KvCache) -> tuple[Tensor, Tensor]:
    """By token: [layers, kv_heads, head_dim, tokens] and [layers, kv_heads, tokens, head_dim] (fp32 pages)."""
    layers, kv_heads, head_dim, num = cache.layout.num_layers, cache.layout.num_kv_heads, cache.layout.head_dim, 16
    rows = cache.pages.movedim(0, 3)  # [layers, 2, kv_heads, pages, page_tokens * head_dim]
    keys = rows[:, 0].reshape(layers, kv_heads, -1, head_dim, num).movedim(2, 3).flatten(3)
    values = rows[:, 1].reshape(layers, kv_heads, -1, head_dim)
    return keys, values


@pytest.mark.parametrize("changed", [0, 1, 15, 16, 33, 69])
def test_a_token_changes_nothing_before_it(engine: Engine, changed: int) -> None:
    other = with_other_token(changed)
    (logits, cache), (other_logits, other_cache) = all_logits(engine, PROMPT), all_logits(engine, other)
    assert torch.equal(logits[:changed], other_logits[:changed])
    assert not torch.equal(logits[changed], other_logits[changed])
    (keys, values), (other_keys, other_values) = keys_and_values(cache), keys_and_values(other_cache)
    assert torch.equal(keys[..., :changed], other_keys[..., :changed])
    assert torch.equal(values[:, :, :changed], other_values[:, :, :changed])
    assert not torch.equal(keys[..., changed], other_keys[..., changed])


def test_every_earlier_token_matters(engine: Engine) -> None:
    last = all_logits(engine, PROMPT)[0][-1]
    for position in range(len(PROMPT)):
        assert not torch.equal(all_logits(engine, with_other_token(position))[0][-1], last)


def tensors_inside(part: Any) -> Iterator[Tensor]:
    """All tensors that an object of ours holds, however deep."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, (list, tuple)):
        for item in part:
            yield from tensors_inside(item)
    elif type(part).__module__.startswith("engine."):
        for value in vars(part).values():
            yield from tensors_inside(value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inference_never_changes_weights(tmp_path: Path, dtype: Any) -> None:
    engine = toy_engine(write_toy_model(tmp_path), dtype)
    held = list(tensors_inside(engine.runner.model))
    assert sum(tensor.numel() for tensor in held) > 150_000  # all of them
    before = [tensor.clone() for tensor in held]
    for start in range(0, 60, 10):
        engine.runner.run([Chunk(PROMPT[start : start + 10], start, range(8), True), Chunk([start], 0, [9], True)])
    assert all(torch.equal(one, other) for one, other in zip(held, before, strict=True))


def test_the_model_owns_its_weights(tmp_path: Path) -> None:
    """The files may be overwritten while the engine serves."""
    engine = toy_engine(write_toy_model(tmp_path))
    before = all_logits(engine, PROMPT)[0]
    file = tmp_path / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.write(b"\x3f" * size)
    assert torch.equal(all_logits(engine, PROMPT)[0], before)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 1}, {"head_dim": 32}])
def test_the_kernels_of_the_device_agree_with_the_torch_twins(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = write_toy_model(tmp_path, **changes)
    config, layout = read_config(folder), toy_engine(folder).cache.layout
    weights = load_weights(folder, config)
    chunk = Chunk(PROMPT, 0, range(8), sample=True)
    found = [
        Runner(Model(config, weights, kernels, torch.float32, CPU), KvCache(layout, 8, CPU)).run([chunk])
        for kernels in (choose_kernels(CPU), torch_kernels())
    ]
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=0)


def test_float16_files_are_served(tmp_path: Path) -> None:
    engine = toy_engine(write_toy_model(tmp_path, dtype=torch.float16), "bfloat16")
    assert all_logits_close(engine, toy_engine(write_toy_model(tmp_path / "32"), "bfloat16"))


def all_logits_close(one: Engine, other: Engine) -> bool:
    chunk = Chunk(PROMPT, 0, range(8), sample=True)
    return torch.allclose(one.runner.run([chunk]), other.runner.run([chunk]), atol=0.3)


def test_random_weights_give_lively_logits(tmp_path: Path) -> None:
    config = toy_config(tmp_path)
    embedding = random_weights(config, 1)["lm_head.weight"]
    assert 1.8 < float(embedding.square().sum(1).mean().sqrt()) < 2.2
