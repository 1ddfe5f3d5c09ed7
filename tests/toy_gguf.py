"""A toy model in one GGUF file, written by the `gguf` library: what `engine/gguf_import.py` is tested on.

Sizes as in `tests/toy.py`, text as in `tests/toy_tokenizer.py`. Everything in the file can be changed by name, so
that a test says only what is wrong with its file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

from tests.toy_tokenizer import TOY_BOS_ID, TOY_CHAT_TEMPLATE, TOY_EOS_ID, TOY_SPECIAL_TOKENS, toy_merges, toy_pieces

HIDDEN, INTERMEDIATE, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB = 64, 160, 2, 4, 2, 16, 512
_CONTROL, _NORMAL = 3, 1


def write_toy_gguf(
    path: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[Any] | None] | None = None,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """Write the toy model; `metadata` and `tensors` replace or add entries, None takes one out."""
    values = {key: value for key, value in (_metadata() | dict(metadata or {})).items() if value is not None}
    writer = GGUFWriter(path, values.pop("general.architecture", "llama"))
    for key, value in values.items():
        _add_value(writer, key, value)
    for name, tensor in (toy_gguf_tensors() | dict(tensors or {})).items():
        if tensor is not None:
            _add_tensor(writer, name, tensor, quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def toy_gguf_tensors() -> dict[str, NDArray[np.float32]]:
    """All tensors under their GGUF names; float32 values that are no bfloat16 values."""
    query, kv = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(NUM_LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (query, HIDDEN),
            f"blk.{layer}.attn_k.weight": (kv, HIDDEN),
            f"blk.{layer}.attn_v.weight": (kv, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, query),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (INTERMEDIATE, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (INTERMEDIATE, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, INTERMEDIATE),
        }
    random = np.random.default_rng(0)
    return {name: random.normal(0, 0.05, shape).astype(np.float32) for name, shape in shapes.items()}


def _metadata() -> dict[str, Any]:
    return {
        "llama.block_count": NUM_LAYERS,
        "llama.context_length": 512,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INTERMEDIATE,
        "llama.attention.head_count": NUM_HEADS,
        "llama.attention.head_count_kv": NUM_KV_HEADS,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": toy_pieces(),
        "tokenizer.ggml.token_type": [_CONTROL if piece in TOY_SPECIAL_TOKENS else _NORMAL for piece in toy_pieces()],
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in toy_merges()],
        "tokenizer.ggml.bos_token_id": TOY_BOS_ID,
        "tokenizer.ggml.eos_token_id": TOY_EOS_ID,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TOY_CHAT_TEMPLATE,
    }


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _add_tensor(writer: GGUFWriter, name: str, tensor: NDArray[Any], quantization: GGMLQuantizationType) -> None:
    if tensor.ndim < 2 or tensor.dtype != np.float32:
        writer.add_tensor(name, tensor)
    else:
        writer.add_tensor(name, quantize(tensor, quantization), raw_dtype=quantization)
