"""A GGUF file becomes a Hugging Face folder: config.json, model.safetensors, tokenizer.json, tokenizer_config.json.

Read the directory, check the sizes against each other, write the small files, then check and write the weights. No
torch in here: `pdserve up` does this before any worker starts. Whoever calls owns the folder and throws it
away when this raises (`cluster/model_store.py`).
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from engine.config_file import read_config
from engine.gguf_families import GGUF_FAMILIES, GgufFamily
from engine.gguf_file import GgufFile
from engine.gguf_tensors import write_weights
from engine.gguf_tokenizer import write_tokenizer
from engine.model_config import ModelConfig
from pdserve.errors import ConfigError

# Part of the name of a cached conversion: raise it when the same file would be converted to something else.
CONVERTER_VERSION = 1

# These would change what the model computes, in ways that we do not take over; value: what leaves it plain.
_PLAIN = {"expert_count": (0,), "rope.scaling.type": ("none",), "attention.causal": (True,)}


def convert_gguf(path: Path, folder: Path, progress: Callable[[float], None]) -> None:
    """Write the model in `path` into the existing `folder`; `progress` is told the fraction done, 0 to 1.

    Raises ConfigError, one line with the file's name, for a file that is corrupt, truncated or not supported, and
    OSError when the folder cannot be written.
    """
    source = GgufFile(path)
    family = _family(source)
    config = json.dumps(_config(source, family), indent=2)
    (folder / "config.json").write_text(config, encoding="utf-8")
    write_tokenizer(source, folder)
    write_weights(source, family, _read_back(source, folder), folder / "model.safetensors", progress)


def _family(source: GgufFile) -> GgufFamily:
    if (architecture := source.text("general.architecture")) not in GGUF_FAMILIES:
        source.fail(f"architecture {architecture!r} is not supported ({', '.join(GGUF_FAMILIES)} are)")
    for key, plain in _PLAIN.items():
        if source.metadata.get(f"{architecture}.{key}", plain[0]) not in plain:
            source.fail(f"{architecture}.{key} = {source.metadata[f'{architecture}.{key}']!r} is not supported")
    return GGUF_FAMILIES[architecture]


def _config(source: GgufFile, family: GgufFamily) -> dict[str, object]:
    """The sizes in the metadata, checked against each other, and what else the family's config.json has."""
    arch = family.architecture
    return (
        _sizes(source, arch)
        | family.settings(source)
        | {
            "vocab_size": _vocab_size(source),
            "tie_word_embeddings": "output.weight" not in source.tensors,
            "attention_bias": False,
            "max_position_embeddings": int(_positive(source, f"{arch}.context_length")),
            "rope_theta": _shortest(_positive(source, f"{arch}.rope.freq_base", 10000.0)),
            "rms_norm_eps": _shortest(_positive(source, f"{arch}.attention.layer_norm_rms_epsilon")),
            "bos_token_id": _token_id(source, "bos"),
            "eos_token_id": _token_id(source, "eos"),
            "torch_dtype": "bfloat16",
        }
    )


def _sizes(source: GgufFile, arch: str) -> dict[str, int]:
    hidden_size, num_heads = source.integer(f"{arch}.embedding_length"), source.integer(f"{arch}.attention.head_count")
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": source.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": source.integer(f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _integer_or(source, f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": _integer_or(source, f"{arch}.attention.key_length", hidden_size // max(num_heads, 1)),
    }
    if min(sizes.values()) < 1 or num_heads % sizes["num_key_value_heads"] or sizes["head_dim"] % 2:
        source.fail(f"corrupt: impossible sizes {sizes}")
    if sizes["num_hidden_layers"] > len(source.tensors):
        source.fail(f"corrupt: {sizes['num_hidden_layers']} layers, but only {len(source.tensors)} tensors")
    _check_head(source, arch, sizes["head_dim"])
    return sizes


def _check_head(source: GgufFile, arch: str, head_dim: int) -> None:
    turned = _integer_or(source, f"{arch}.rope.dimension_count", head_dim)
    values = _integer_or(source, f"{arch}.attention.value_length", head_dim)
    if (turned, values) != (head_dim, head_dim):
        source.fail(f"heads of {head_dim} with {turned} rotated and {values} value dimensions: not supported")


def _vocab_size(source: GgufFile) -> int:
    if "token_embd.weight" not in source.tensors:
        source.fail("tensor 'token_embd.weight' is missing")
    num_rows, num_tokens = source.tensors["token_embd.weight"].shape[0], len(source.texts("tokenizer.ggml.tokens"))
    if num_tokens > num_rows:
        source.fail(f"corrupt: {num_tokens} tokens, but only {num_rows} embeddings")
    return num_rows


def _read_back(source: GgufFile, folder: Path) -> ModelConfig:
    """What the engine makes of the config."""
    try:
        return read_config(folder)
    except ConfigError as error:
        source.fail(f"corrupt: {error}")


def _token_id(source: GgufFile, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    return source.integer(key) if key in source.metadata else None


def _positive(source: GgufFile, key: str, default: float | None = None) -> float:
    value = default if default is not None and key not in source.metadata else source.number(key)
    if value <= 0:
        source.fail(f"{key} = {value} should be above 0")
    return value


def _integer_or(source: GgufFile, key: str, default: int) -> int:
    return source.integer(key) if key in source.metadata else default


def _shortest(value: float) -> float:
    """GGUF has float32: 1e-5 reads as 9.999999747378752e-06; this is the short decimal that was meant."""
    return float(str(np.float32(value)))
