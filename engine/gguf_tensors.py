"""Weights out of a GGUF file into `model.safetensors`, in bfloat16 and under the names of Hugging Face.

A tensor is dequantized to float32, what llama.cpp did to the weights of its family is undone, it is rounded to bfloat16
and appended to the file; one tensor is in memory at a time. bfloat16 in every case, so that runs in both dtypes are
runs of the same weights: what rounding adds (2^-9 of a value) is far below what quantization took away.
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

from engine.gguf_families import GgufFamily
from engine.gguf_file import GgufFile, GgufTensor
from engine.model_config import ModelConfig
from engine.tensor_names import EMBEDDING, FINAL_NORM, LM_HEAD, expected_shapes

_TOP_NAMES = {EMBEDDING: "token_embd.weight", f"{FINAL_NORM}.weight": "output_norm.weight", LM_HEAD: "output.weight"}
_LAYER_PATTERN = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_BFLOAT16_BYTES = 2
_BFLOAT16_LIMIT = 3.38e38  # anything below rounds to a finite bfloat16


@dataclass(frozen=True)
class _Weight:
    """One tensor on its way; the same shape on both sides."""

    stored: GgufTensor
    name: str  # Hugging Face's


def write_weights(
    source: GgufFile, family: GgufFamily, config: ModelConfig, target: Path, progress: Callable[[float], None]
) -> None:
    """Write all weights of `source` to `target`; `progress` is told the fraction done after each tensor.

    Raises ConfigError when a tensor is missing, left over, of another shape, of an unknown quantization, or not finite.
    """
    weights = _checked(source, family, config)
    total, done = sum(_num_bytes(weight.stored) for weight in weights), 0
    progress(0.0)
    with target.open("wb") as file:
        file.write(_safetensors_header(weights))
        for weight in weights:
            file.write(_converted(source, weight, family, config).data)
            done += _num_bytes(weight.stored)
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


def _checked(source: GgufFile, family: GgufFamily, config: ModelConfig) -> list[_Weight]:
    expected = {_gguf_name(name, family): (name, shape) for name, shape in expected_shapes(config).items()}
    for name, tensor in source.tensors.items():
        if name not in expected:
            described = f"no plain {family.architecture} model of {config.num_layers} layers"
            source.fail(f"tensor {name!r} is not supported: it belongs to {described}")
        if tensor.shape != (shape := expected[name][1]):
            source.fail(f"tensor {name!r} has shape {list(tensor.shape)}, the metadata asks for {list(shape)}")
    missing = [name for name in expected if name not in source.tensors]
    if missing:
        source.fail(f"tensor {missing[0]!r} is missing ({len(missing)} of {len(expected)} are)")
    return [_Weight(source.tensors[stored], name) for stored, (name, _) in expected.items()]


def _gguf_name(name: str, family: GgufFamily) -> str:
    if (match := _LAYER_PATTERN.fullmatch(name)) is None:
        return _TOP_NAMES[name]
    stored = {theirs: ours for ours, theirs in family.layer_names.items()}
    return f"blk.{match[1]}.{stored[match[2]]}.weight"


def _safetensors_header(weights: list[_Weight]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for weight in weights:
        end = begin + _num_bytes(weight.stored)
        header[weight.name] = {"dtype": "BF16", "shape": weight.stored.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _num_bytes(tensor: GgufTensor) -> int:
    return int(np.prod(tensor.shape)) * _BFLOAT16_BYTES


def _converted(source: GgufFile, weight: _Weight, family: GgufFamily, config: ModelConfig) -> NDArray[np.uint16]:
    values = _dequantized(source, weight.stored)
    if family.has_turned_rows and weight.name.endswith("q_proj.weight"):
        values = unpermute(values, config.num_heads)
    elif family.has_turned_rows and weight.name.endswith("k_proj.weight"):
        values = unpermute(values, config.num_kv_heads)
    elif weight.name.endswith("norm.weight"):
        values = values - np.float32(family.norm_offset)
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
