"""A toy Gemma 3 in one GGUF file: sizes and weights of `tests/toy_gguf.py`, and a tokenizer of SentencePiece's kind."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.toy_gguf import HEAD_DIM, HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS, VOCAB, write_toy_gguf

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_MERGED = ("▁t", "he", "▁the", "in", "ng", "ing", "the")  # the best first


def write_toy_gemma_gguf(path: Path, *, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write it; `metadata` replaces or adds entries, None takes one out."""
    return write_toy_gguf(path, metadata=_metadata() | dict(metadata or {}), tensors=toy_gemma_norms())


def toy_gemma_norms() -> dict[str, NDArray[np.float32]]:
    """The norms that Llama does not have, with the 1 that llama.cpp adds."""
    norms = {"attn_q_norm": HEAD_DIM, "attn_k_norm": HEAD_DIM, "post_attention_norm": HIDDEN, "post_ffw_norm": HIDDEN}
    random = np.random.default_rng(1)
    return {
        f"blk.{layer}.{name}.weight": random.normal(1, 0.05, size).astype(np.float32)
        for layer in range(NUM_LAYERS)
        for name, size in norms.items()
    }


def _metadata() -> dict[str, Any]:
    tokens, kinds, scores = zip(*_tokens(), strict=True)
    return {
        "general.architecture": "gemma3",
        "gemma3.block_count": NUM_LAYERS,
        "gemma3.context_length": 512,
        "gemma3.embedding_length": HIDDEN,
        "gemma3.feed_forward_length": INTERMEDIATE,
        "gemma3.attention.head_count": NUM_HEADS,
        "gemma3.attention.head_count_kv": NUM_KV_HEADS,
        "gemma3.attention.key_length": HEAD_DIM,
        "gemma3.attention.sliding_window": 24,
        "gemma3.rope.freq_base": 1000000.0,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": list(kinds),
        "tokenizer.ggml.scores": list(scores),
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": None,
    }


def _tokens() -> list[tuple[str, int, float]]:
    """Text, kind and score of every id."""
    letters = "▁abcdefghijklmnopqrstuvwxyz"
    found = [("<pad>", _CONTROL, -1000.0), ("<eos>", _CONTROL, -1000.0), ("<bos>", _CONTROL, -1000.0)]
    found += [("<unk>", _UNKNOWN, -1000.0), ("  ", _USER_DEFINED, -1000.0)]
    found += [(f"<0x{byte:02X}>", _BYTE, 0.0) for byte in range(256)]
    found += [(token, _NORMAL, -float(rank)) for rank, token in enumerate([*_MERGED, *letters])]
    return [*found, *((f"<unused{index}>", _CONTROL, -1000.0) for index in range(VOCAB - len(found)))]
