"""The tensors of a model, under the names that Hugging Face gives them.

Read from safetensors files only (a pickle may run code), checked against the config name by name before anything is
computed, hashed into the fingerprint, and handed to the layers, which keep copies: the mapped files may go.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model_config import ModelConfig
from engine.tensor_names import EMBEDDING, LM_HEAD, expected_shapes
from pdserve.errors import ConfigError

Weights = Mapping[str, Tensor]

_SINGLE_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")  # old files store what follows from the config


def load_weights(folder: Path, config: ModelConfig) -> Weights:
    """The model's tensors in their stored dtypes, mapped from the files; ConfigError names file and tensor."""
    expected = expected_shapes(config)
    weights: dict[str, Tensor] = {}
    for path, name, tensor in _stored_tensors(folder):
        if _DERIVED.fullmatch(name):
            continue
        if name in weights:
            raise ConfigError(f"{path}: {name} is in another file already")
        tied_head = config.tie_embeddings and name == LM_HEAD
        _check_tensor(path, name, tensor, expected.get(EMBEDDING if tied_head else name))
        weights[name] = tensor
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        raise ConfigError(f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
    return _without_tied_head(folder, weights) if config.tie_embeddings else weights


def random_weights(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> Weights:
    """Weights for tests and benchmarks; activations keep their size, and logits spread by about 2."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        if name.endswith(".bias"):
            values *= 0.5
        elif len(shape) == 1:
            values = 1 - config.norm_offset + 0.1 * values
        else:
            values *= (2.0 if name in (EMBEDDING, LM_HEAD) else 1.0) / math.sqrt(shape[1])
        weights[name] = values.to(dtype)
    return weights


def weights_hash(weights: Weights) -> str:
    """Over names, shapes, dtypes and bytes; the same however the tensors were spread over files."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fingerprint(config: ModelConfig, weights: Weights) -> str:
    """What two workers must have in common to compute the same model. The dtype it is served in is the KvLayout's."""
    canonical = json.dumps(asdict(config), sort_keys=True)
    return hashlib.sha256(f"{canonical}\n{weights_hash(weights)}".encode()).hexdigest()


def _stored_tensors(folder: Path) -> Iterator[tuple[Path, str, Tensor]]:
    """(file, name, tensor) of everything in the folder's safetensors files."""
    for path, names in _files(folder).items():
        try:
            with safe_open(path, framework="pt") as file:
                stored = sorted(file.keys())
                absent = sorted(names - set(stored))
                if absent:
                    raise ConfigError(f"{path}: {absent[0]} should be here, says {_INDEX_FILE}")
                for name in stored:
                    yield path, name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: cannot be read as safetensors: {error}") from error


def _files(folder: Path) -> dict[Path, set[str]]:
    """The files with weights, each with the names that the index, if there is one, puts there."""
    if not (folder / _INDEX_FILE).exists():
        if not (folder / _SINGLE_FILE).exists():
            raise ConfigError(f"{folder}: has neither {_SINGLE_FILE} nor {_INDEX_FILE}")
        return {folder / _SINGLE_FILE: set()}
    files: dict[Path, set[str]] = {}
    for name, shard in _weight_map(folder / _INDEX_FILE).items():
        files.setdefault(folder / shard, set()).add(name)
    return files


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> file name, as the index of a sharded model has it."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        shards = {str(name): str(shard) for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: cannot be read as an index with a weight_map: {error}") from error
    for shard in sorted(set(shards.values())):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ConfigError(f"{path}: names the file {shard!r}; only .safetensors files beside it are read")
    return shards


def _check_tensor(path: Path, name: str, tensor: Tensor, shape: tuple[int, ...] | None) -> None:
    if shape is None:
        raise ConfigError(f"{path}: {name} is not part of this architecture")
    if tuple(tensor.shape) != shape:
        raise ConfigError(f"{path}: {name} has shape {tuple(tensor.shape)}, config.json asks for {shape}")
    if tensor.dtype not in _FLOATS:
        raise ConfigError(f"{path}: {name} has dtype {tensor.dtype}, supported are float32, bfloat16 and float16")


def _without_tied_head(folder: Path, weights: dict[str, Tensor]) -> Weights:
    """Some files store the tied head once more: fine where it is the same."""
    head = weights.pop(LM_HEAD, None)
    if head is not None and not torch.equal(head, weights[EMBEDDING]):
        raise ConfigError(f"{folder}: {LM_HEAD} differs from {EMBEDDING}, but config.json has tie_word_embeddings true")
    return weights
