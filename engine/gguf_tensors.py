"""Weights out of a GGUF file into `model.safetensors`, in bfloat16 and under the names of Hugging Face.

A tensor is dequantized to float32, its rows are put back into Hugging Face's order where llama.cpp permuted them, it is
rounded to bfloat16 and appended to the file; one tensor is in memory at a time. bfloat16 in every case, so that runs in
both dtypes are runs of the same weights: what rounding adds (2^-9 of a value) is far below what quantization took away.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from engine.gguf_file import GgufFile, GgufTensor

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_BFLOAT16_BYTES = 2
_BFLOAT16_LIMIT = 3.38e38  # anything below rounds to a finite bfloat16


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama-type model that decide the shape of every weight."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tie_embeddings: bool

    def weights(self) -> dict[str, tuple[int, ...]]:
        """GGUF name and shape [out, in] of every weight."""
        hidden, query, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = {
            "attn_norm": (hidden,),
            "attn_q": (query, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, query),
            "ffn_norm": (hidden,),
            "ffn_gate": (self.intermediate_size, hidden),
            "ffn_up": (self.intermediate_size, hidden),
            "ffn_down": (hidden, self.intermediate_size),
        }
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.vocab_size, hidden)}
        for index in range(self.num_layers):
            shapes |= {f"blk.{index}.{name}.weight": shape for name, shape in layer.items()}
        shapes["output_norm.weight"] = (hidden,)
        if not self.tie_embeddings:
            shapes["output.weight"] = (self.vocab_size, hidden)
        return shapes


def write_weights(source: GgufFile, shape: LlamaShape, target: Path, progress: Callable[[float], None]) -> None:
    """Write all weights of `source` to `target`; `progress` is told the fraction done after each tensor.

    Raises ConfigError when a tensor is missing, left over, of another shape, of an unknown quantization, or not finite.
    """
    tensors = _checked(source, shape)
    total, done = sum(_num_bytes(tensor) for tensor in tensors), 0
    progress(0.0)
    with target.open("wb") as file:
        file.write(_safetensors_header(tensors))
        for tensor in tensors:
            file.write(_converted(source, tensor, shape).data)
            done += _num_bytes(tensor)
            progress(done / total)
        file.flush()
        os.fsync(file.fileno())  # a cached folder must not turn out empty after a power cut


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even; finite input only."""
    bits = values.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def unpermute(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's order of the rows of a query or key projection; [heads * head_dim, in] both ways.

    llama.cpp rotates neighbouring pairs (0, 1), (2, 3) ... of a head, Hugging Face pairs (0, d/2), (1, d/2 + 1) ...;
    row 2 i + h of a head in GGUF is row h * d/2 + i there.
    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _checked(source: GgufFile, shape: LlamaShape) -> list[GgufTensor]:
    expected = shape.weights()
    for name, tensor in source.tensors.items():
        if name not in expected:
            source.fail(
                f"tensor {name!r} is not supported: it belongs to no plain Llama model of {shape.num_layers} layers"
            )
        if tensor.shape != expected[name]:
            source.fail(f"tensor {name!r} has shape {list(tensor.shape)}, the metadata asks for {list(expected[name])}")
    missing = [name for name in expected if name not in source.tensors]
    if missing:
        source.fail(f"tensor {missing[0]!r} is missing ({len(missing)} of {len(expected)} are)")
    return [source.tensors[name] for name in expected]


def _safetensors_header(tensors: list[GgufTensor]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        end = begin + _num_bytes(tensor)
        header[_hf_name(tensor.name)] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _hf_name(name: str) -> str:
    if (match := _LAYER_PATTERN.fullmatch(name)) is None:
        return _TOP_NAMES[name]
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def _num_bytes(tensor: GgufTensor) -> int:
    return int(np.prod(tensor.shape)) * _BFLOAT16_BYTES


def _converted(source: GgufFile, tensor: GgufTensor, shape: LlamaShape) -> NDArray[np.uint16]:
    values = _dequantized(source, tensor)
    if tensor.name.endswith("attn_q.weight"):
        values = unpermute(values, shape.num_heads)
    elif tensor.name.endswith("attn_k.weight"):
        values = unpermute(values, shape.num_kv_heads)
    return to_bfloat16(values)


def _dequantized(source: GgufFile, tensor: GgufTensor) -> NDArray[np.float32]:
    try:
        with np.errstate(all="ignore"):  # what a corrupt scale gives is caught below
            values = np.ascontiguousarray(dequantize(tensor.data, tensor.quantization), np.float32)
    except NotImplementedError:
        source.fail(f"tensor {tensor.name!r}: quantization {tensor.quantization.name} is not supported")
    if not np.abs(values).max() < _BFLOAT16_LIMIT:  # also false for NaN
        source.fail(f"corrupt: tensor {tensor.name!r} has values that are not finite")
    return values
