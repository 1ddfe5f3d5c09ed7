"""A toy model that loads in milliseconds: a Hugging Face folder of the Llama shape with seeded random weights."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from engine.config_file import read_config
from engine.load import Engine, EngineConfig, load_engine
from engine.model_config import ModelConfig
from engine.weights import Weights, random_weights

TOY_VOCAB_SIZE = 512
TOY_EOS_TOKEN_ID = 2


def toy_config_json(**changes: Any) -> dict[str, Any]:
    """The config.json of the toy model; a change to None takes the key out."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": TOY_VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": TOY_EOS_TOKEN_ID,
        "torch_dtype": "float32",
    }
    return {key: value for key, value in (config | changes).items() if value is not None}


def write_toy_model(
    folder: Path, *, seed: int = 0, num_shards: int = 1, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Write config.json and the weights into `folder`; `changes` go into config.json. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(toy_config_json(**changes), indent=2))
    weights = random_weights(read_config(folder), seed, dtype)
    if num_shards == 1:
        save_file(dict(weights), folder / "model.safetensors")
    else:
        _write_shards(folder, weights, num_shards)
    return folder


def toy_config(folder: Path, **changes: Any) -> ModelConfig:
    """The toy model's config without its weights; `folder` is a place to write config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(toy_config_json(**changes)))
    return read_config(folder)


def toy_engine(folder: Path, dtype: Literal["float32", "bfloat16"] = "float32", num_pages: int = 64) -> Engine:
    """The engine of a folder that `write_toy_model` wrote."""
    return load_engine(EngineConfig(str(folder), "toy", dtype, num_pages=num_pages))


def _write_shards(folder: Path, weights: Weights, num_shards: int) -> None:
    weight_map: dict[str, str] = {}
    for index in range(num_shards):
        shard = f"model-{index + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: weights[name] for name in sorted(weights)[index::num_shards]}
        save_file(part, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
