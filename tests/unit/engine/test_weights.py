"""Weights: complete or refused, by file and tensor; one hash per content."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config_file import read_config
from engine.tensor_names import EMBEDDING, LM_HEAD
from engine.weights import Weights, fingerprint, load_weights, random_weights, weights_hash
from pdserve.errors import ConfigError
from tests.toy import write_toy_model

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def load(folder: Path) -> Weights:
    return load_weights(folder, read_config(folder))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sharded_equals_single(tmp_path: Path) -> None:
    single = load(write_toy_model(tmp_path / "single", seed=3))
    sharded = load(write_toy_model(tmp_path / "sharded", seed=3, num_shards=3))
    assert single.keys() == sharded.keys()
    assert all(torch.equal(single[name], sharded[name]) for name in single)
    assert weights_hash(single) == weights_hash(sharded)


def test_the_fingerprint_sees_config_values_and_dtype(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path / "a", seed=3)
    config, weights = read_config(folder), load(folder)
    first = fingerprint(config, weights)
    assert first == fingerprint(config, random_weights(config, 3))
    assert first != fingerprint(config, random_weights(config, 4))
    assert first != fingerprint(config, random_weights(config, 3, torch.bfloat16))
    assert first != fingerprint(read_config(write_toy_model(tmp_path / "b", seed=3, rope_theta=2e4)), weights)


def test_one_flipped_bit_changes_the_hash(tmp_path: Path) -> None:
    weights = dict(load(write_toy_model(tmp_path)))
    before = weights_hash(weights)
    flipped = weights[Q_PROJ].clone()
    flipped.view(torch.int32)[0, 0] ^= 1
    assert weights_hash(weights | {Q_PROJ: flipped}) != before


def test_missing_extra_and_misshapen_tensors(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path)
    change(folder, lambda tensors: tensors.pop(Q_PROJ))
    assert Q_PROJ in refusal(folder)
    change(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 32)}))
    assert all(part in refusal(folder) for part in (Q_PROJ, "(64, 32)", "(64, 64)", "model.safetensors"))
    change(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)}))
    assert "int8" in refusal(folder)
    change(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 64), "model.layers.3.x": torch.zeros(1)}))
    assert "model.layers.3.x" in refusal(folder)


def test_derived_tensors_of_old_files_are_passed_over(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path)
    change(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert len(load(folder)) == 3 + 3 * 9


def test_a_tied_head_may_be_stored_again_but_not_differ(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path, tie_word_embeddings=True)
    change(folder, lambda tensors: tensors.update({LM_HEAD: tensors[EMBEDDING].clone()}))
    assert LM_HEAD not in load(folder)
    change(folder, lambda tensors: tensors.update({LM_HEAD: tensors[EMBEDDING] + 1}))
    assert LM_HEAD in refusal(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_files(tmp_path: Path, kept: int) -> None:
    folder = write_toy_model(tmp_path)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:kept])
    assert "model.safetensors" in refusal(folder)


def test_corrupt_header(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:8] + b"\xff" + content[9:])
    assert "model.safetensors" in refusal(folder)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "model.safetensors" in refusal(folder)


def test_broken_indexes(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path, num_shards=2)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())["weight_map"]
    for content in ("{", "{}", '{"weight_map": [1]}'):
        index.write_text(content)
        assert "index.json" in refusal(folder)
    for shard in ("../elsewhere.safetensors", "evil.bin"):
        index.write_text(json.dumps({"weight_map": good | {Q_PROJ: shard}}))
        assert shard in refusal(folder)
    index.write_text(json.dumps({"weight_map": good | {Q_PROJ: "absent.safetensors"}}))
    assert "absent.safetensors" in refusal(folder)
    other = next(shard for shard in good.values() if shard != good[Q_PROJ])
    index.write_text(json.dumps({"weight_map": good | {Q_PROJ: other}}))
    assert Q_PROJ in refusal(folder)
