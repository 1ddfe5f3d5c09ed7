"""A GGUF file becomes a Hugging Face folder: config.json, model.safetensors, tokenizer.json, tokenizer_config.json.

Read the directory, check the sizes against each other, write the small files, then check and write the weights. No
torch in here: `pdserve up` does this before any worker starts. Whoever calls owns the folder and throws it
away when this raises (`cluster/model_store.py`).
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from engine.gguf_file import GgufFile
from engine.gguf_tensors import LlamaShape, write_weights
from engine.gguf_tokenizer import write_tokenizer

# Part of the name of a cached conversion: raise it when the same file would be converted to something else.
CONVERTER_VERSION = 1

# These would change what the model computes, in ways that the engine does not know; value: what leaves it plain.
_PLAIN = {"llama.expert_count": (0,), "llama.rope.scaling.type": ("none",), "llama.attention.causal": (True,)}


def convert_gguf(path: Path, folder: Path, progress: Callable[[float], None]) -> None:
    """Write the model in `path` into the existing `folder`; `progress` is told the fraction done, 0 to 1.

    Raises ConfigError, one line with the file's name, for a file that is corrupt, truncated or not supported, and
    OSError when the folder cannot be written.
    """
    source = GgufFile(path)
    shape = llama_shape(source)
    config = json.dumps(_config(source, shape), indent=2)
    (folder / "config.json").write_text(config, encoding="utf-8")
    write_tokenizer(source, folder)
    write_weights(source, shape, folder / "model.safetensors", progress)


def llama_shape(source: GgufFile) -> LlamaShape:
    """The sizes in the metadata, checked against each other."""
    _check_architecture(source)
    hidden_size, num_heads = source.integer("llama.embedding_length"), source.integer("llama.attention.head_count")
    head_dim = _integer_or(source, "llama.attention.key_length", hidden_size // max(num_heads, 1))
    shape = LlamaShape(
        vocab_size=_vocab_size(source),
        hidden_size=hidden_size,
        intermediate_size=source.integer("llama.feed_forward_length"),
        num_layers=source.integer("llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=_integer_or(source, "llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        tie_embeddings="output.weight" not in source.tensors,
    )
    _check_shape(source, shape)
    return shape


def _check_architecture(source: GgufFile) -> None:
    if (architecture := source.text("general.architecture")) != "llama":
        source.fail(f"architecture {architecture!r} is not supported (llama is)")
    for key, plain in _PLAIN.items():
        if source.metadata.get(key, plain[0]) not in plain:
            source.fail(f"{key} = {source.metadata[key]!r} is not supported")


def _vocab_size(source: GgufFile) -> int:
    if "token_embd.weight" not in source.tensors:
        source.fail("tensor 'token_embd.weight' is missing")
    num_rows, num_tokens = source.tensors["token_embd.weight"].shape[0], len(source.texts("tokenizer.ggml.tokens"))
    if num_tokens > num_rows:
        source.fail(f"corrupt: {num_tokens} tokens, but only {num_rows} embeddings")
    return num_rows


def _check_shape(source: GgufFile, shape: LlamaShape) -> None:
    sizes = (shape.intermediate_size, shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim)
    if min(sizes) < 1 or shape.num_heads % shape.num_kv_heads or shape.head_dim % 2:
        source.fail(f"corrupt: impossible sizes {shape}")
    if shape.num_layers > len(source.tensors):
        source.fail(f"corrupt: {shape.num_layers} layers, but only {len(source.tensors)} tensors")
    rope_dims = _integer_or(source, "llama.rope.dimension_count", shape.head_dim)
    value_dims = _integer_or(source, "llama.attention.value_length", shape.head_dim)
    if (rope_dims, value_dims) != (shape.head_dim, shape.head_dim):
        source.fail(
            f"heads of {shape.head_dim} with {rope_dims} rotated and {value_dims} value dimensions: not supported"
        )


def _config(source: GgufFile, shape: LlamaShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": int(_positive(source, "llama.context_length")),
        "rope_theta": _shortest(_positive(source, "llama.rope.freq_base", 10000.0)),
        "rms_norm_eps": _shortest(_positive(source, "llama.attention.layer_norm_rms_epsilon")),
        "bos_token_id": _token_id(source, "bos"),
        "eos_token_id": _token_id(source, "eos"),
        "torch_dtype": "bfloat16",
    }


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
