"""GGUF import: what comes out is what the file holds, and a bad file gives one clear line."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer

from engine.config_file import read_config
from engine.gguf_file import GgufFile
from engine.gguf_import import convert_gguf
from engine.gguf_tensors import to_bfloat16
from engine.weights import load_weights
from pdserve.errors import ConfigError
from tests.toy_gguf import HEAD_DIM, HIDDEN, NUM_HEADS, NUM_KV_HEADS, VOCAB, toy_gguf_tensors, write_toy_gguf
from tests.toy_tokenizer import toy_tokenizer

# SmolLM2's vocabulary lacks these control characters and the lead bytes of these planes: the original drops them too.
LACKING = "\x04\x06\x13\x14\x16\x1d"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder to convert into."""
    path = tmp_path / "converted"
    path.mkdir()
    return path


def convert(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Convert and load the weights."""
    convert_gguf(path, folder, lambda _: None)
    return dict(load_file(folder / "model.safetensors"))


def error_of(path: Path, folder: Path) -> str:
    """Convert, expecting one line of error with the file's name."""
    with pytest.raises(ConfigError) as caught:
        convert_gguf(path, folder, lambda _: None)
    message = str(caught.value)
    assert path.name in message
    assert "\n" not in message
    return message


def bfloat16(values: NDArray[np.float32]) -> torch.Tensor:
    return torch.from_numpy(values.copy()).to(torch.bfloat16)


def rotated_like_llama_cpp(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """What llama.cpp's converter does to Hugging Face's rows, written element by element."""
    result = np.empty_like(rows)
    for head in range(num_heads):
        for pair in range(HEAD_DIM // 2):
            for half in range(2):
                result[head * HEAD_DIM + 2 * pair + half] = rows[head * HEAD_DIM + half * HEAD_DIM // 2 + pair]
    return result


# ---- weights --------------------------------------------------------------------------------------------------------


def test_query_and_key_rows_come_back_in_the_order_of_hugging_face(tmp_path: Path, folder: Path) -> None:
    original = toy_gguf_tensors()
    permuted = {
        "blk.1.attn_q.weight": rotated_like_llama_cpp(original["blk.1.attn_q.weight"], NUM_HEADS),
        "blk.1.attn_k.weight": rotated_like_llama_cpp(original["blk.1.attn_k.weight"], NUM_KV_HEADS),
    }
    weights = convert(write_toy_gguf(tmp_path / "m.gguf", tensors=permuted), folder)
    for ours, theirs in {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}.items():
        expected = bfloat16(original[f"blk.1.{theirs}.weight"])
        assert torch.equal(weights[f"model.layers.1.self_attn.{ours}_proj.weight"], expected)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_every_quantization_gives_the_rounded_values_of_the_reference(tmp_path: Path, folder: Path, name: str) -> None:
    quantization = GGMLQuantizationType[name]
    weights = convert(write_toy_gguf(tmp_path / "m.gguf", quantization=quantization), folder)
    original = toy_gguf_tensors()
    expected = dequantize(quantize(original["blk.0.ffn_down.weight"], quantization), quantization)
    assert torch.equal(weights["model.layers.0.mlp.down_proj.weight"], bfloat16(expected))
    assert torch.equal(weights["model.norm.weight"], bfloat16(original["output_norm.weight"]))


def test_the_engine_accepts_the_folder(tmp_path: Path, folder: Path) -> None:
    convert(write_toy_gguf(tmp_path / "m.gguf"), folder)
    config = read_config(folder)
    theta = config.layers[0].rope.theta
    assert (config.window, config.rms_eps, theta, config.eos_token_ids) == (512, 1e-5, 10000.0, (2,))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
    assert len(load_weights(folder, config)) == 2 + 2 * 9


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_tied_when_there_is_no_output_tensor(tmp_path: Path, folder: Path, tied: bool) -> None:
    output = None if tied else np.full((VOCAB, HIDDEN), 0.5, np.float32)
    weights = convert(write_toy_gguf(tmp_path / "m.gguf", tensors={"output.weight": output}), folder)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in weights) is not tied


def test_rounding_to_bfloat16_is_to_nearest_even() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)) | np.uint32(0x8000)
    values = np.concatenate([bits, ties]).view(np.float32)
    values = values[np.abs(values) < 3.38e38]
    expected = bfloat16(values).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(to_bfloat16(values), expected)


def test_progress_goes_from_0_to_1_and_never_back(tmp_path: Path, folder: Path) -> None:
    seen: list[float] = []
    convert_gguf(write_toy_gguf(tmp_path / "m.gguf"), folder, seen.append)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0.0, 1.0)


# ---- tokenizer ------------------------------------------------------------------------------------------------------


def test_the_toy_tokenizer_survives_the_way_through_gguf(tmp_path: Path, folder: Path) -> None:
    convert(write_toy_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.pre": "gpt-2"}), folder)
    converted, original = Tokenizer.from_file(str(folder / "tokenizer.json")), toy_tokenizer()
    for text in ("the thing and nothing", "<|im_start|>user\n你好 😀 2026<|im_end|>\n"):
        assert converted.encode(text).ids == original.encode(text).ids
        assert converted.decode(converted.encode(text).ids, skip_special_tokens=False) == text


def test_tokenizer_config_names_the_special_tokens(tmp_path: Path, folder: Path) -> None:
    convert(write_toy_gguf(tmp_path / "m.gguf"), folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert settings["add_bos_token"] is False
    assert "im_start" in settings["chat_template"]


def test_bos_is_prepended_only_when_the_file_asks_for_it(tmp_path: Path, folder: Path) -> None:
    convert(write_toy_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.add_bos_token": True}), folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("hi").ids[0] == 1
    assert tokenizer.encode("hi", add_special_tokens=False).ids[0] != 1


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("2026", ["2", "0", "2", "6"]),
        ("3.14159", ["3", ".", "1", "4", "1", "5", "9"]),
        ("1,000,000", ["1", ",", "0", "0", "0", ",", "0", "0", "0"]),
        ("in 2026", ["in", "Ġ", "2", "0", "2", "6"]),
        ("a   b\n\n\n\t c  ", ["a", "ĠĠ", "Ġb", "ĊĊ", "Ċĉ", "Ġc", "ĠĠ"]),
        ("def f(x):\n    return", ["def", "Ġf", "(", "x", "):", "ĊĠĠĠ", "Ġreturn"]),
        ("<|im_start|>user\n", ["<|im_start|>", "user", "Ċ"]),
    ],
)
def test_smollm2_cuts_text_as_it_was_trained(smollm2_folder: Path, text: str, pieces: list[str]) -> None:
    assert Tokenizer.from_file(str(smollm2_folder / "tokenizer.json")).encode(text).tokens == pieces


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))


@given(text=st.text(st.characters(exclude_categories=["Cs"], max_codepoint=0x3FFFF, exclude_characters=LACKING)))
def test_smollm2_gives_back_every_text(smollm2_tokenizer: Tokenizer, text: str) -> None:
    ids = smollm2_tokenizer.encode(text).ids
    assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == text


# ---- the whole model ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(smollm2_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(output[0]).removesuffix("<|im_end|>").endswith("\nThe capital of France is Paris.")


# ---- bad files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported (llama, gemma3 are)"),
        ({"llama.block_count": None}, "metadata key llama.block_count is missing"),
        ({"llama.block_count": 3}, "tensor 'blk.2.attn_norm.weight' is missing (9 of 29 are)"),
        ({"llama.block_count": 1}, "tensor 'blk.1.attn_norm.weight' is not supported"),
        ({"llama.block_count": 4_000_000_000}, "4000000000 layers, but only 20 tensors"),
        ({"llama.attention.head_count": 0}, "impossible sizes"),
        ({"llama.attention.head_count": 8}, "16 rotated"),
        ({"llama.feed_forward_length": 128}, "has shape [160, 64], the metadata asks for [128, 64]"),
        ({"llama.context_length": "long"}, "metadata key llama.context_length should be a finite number, not 'long'"),
        ({"llama.rope.freq_base": float("nan")}, "metadata key llama.rope.freq_base should be a finite number"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8 is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type = 'yarn' is not supported"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert' is not supported"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.add_space_prefix is not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not supported (gpt-2, smollm are)"),
        ({"tokenizer.ggml.merges": ["a"]}, "merge 'a' is not made of tokens"),
        ({"tokenizer.ggml.merges": [1, 2]}, "tokenizer.ggml.merges should be a list of strings"),
        ({"tokenizer.ggml.tokens": ["x", "x"]}, "two tokens of the vocabulary are the same"),
        ({"tokenizer.ggml.tokens": [f"t{i}" for i in range(600)]}, "600 tokens, but only 512 embeddings"),
        ({"tokenizer.ggml.token_type": [1]}, "512 tokens, but 1 token types"),
        ({"tokenizer.ggml.eos_token_id": 512}, "eos_token_id 512 is outside the vocabulary of 512 tokens"),
        ({"general.alignment": 33}, "general.alignment is 33, which is no power of two"),
    ],
)
def test_bad_metadata(tmp_path: Path, folder: Path, metadata: dict[str, Any], expected: str) -> None:
    assert expected in error_of(write_toy_gguf(tmp_path / "m.gguf", metadata=metadata), folder)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"token_embd.weight": None}, "tensor 'token_embd.weight' is missing"),
        ({"output_norm.weight": None}, "tensor 'output_norm.weight' is missing (1 of 20 are)"),
        ({"rope_freqs.weight": np.ones(8, np.float32)}, "tensor 'rope_freqs.weight' is not supported"),
        ({"output_norm.weight": np.full(64, np.nan, np.float32)}, "values that are not finite"),
        ({"output_norm.weight": np.full(64, np.inf, np.float32)}, "values that are not finite"),
        ({"output_norm.weight": np.ones(64, np.int32)}, "quantization I32 is not supported"),
    ],
)
def test_bad_tensors(tmp_path: Path, folder: Path, tensors: dict[str, Any], expected: str) -> None:
    assert expected in error_of(write_toy_gguf(tmp_path / "m.gguf", tensors=tensors), folder)


def test_files_that_are_no_gguf(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "m.gguf"
    assert "No such file" in error_of(path, folder)
    path.write_bytes(b"")
    assert "it is empty" in error_of(path, folder)
    path.write_bytes(b"PK\x03\x04 something else")
    assert "not a GGUF file" in error_of(path, folder)
    path.write_bytes(b"GGUF" + struct.pack("<I", 1))
    assert "GGUF version 1 is not supported" in error_of(path, folder)


def test_lengths_beyond_the_end_of_the_file_are_refused_before_they_are_used(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "m.gguf"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    for value in (
        struct.pack("<IQ", 8, 1 << 62),
        struct.pack("<IIQ", 9, 5, 1 << 61),
        struct.pack("<IIQ", 9, 8, 1 << 62),
    ):
        path.write_bytes(header + value)
        assert "truncated or corrupt" in error_of(path, folder)
    for kind in (struct.pack("<I", 77), struct.pack("<IIQ", 9, 9, 1)):  # unknown; an array of arrays
        path.write_bytes(header + kind)
        assert "unknown metadata type" in error_of(path, folder)


def test_every_truncation_is_an_error(tmp_path: Path, folder: Path) -> None:
    whole, path = write_toy_gguf(tmp_path / "whole.gguf").read_bytes(), tmp_path / "cut.gguf"
    for length in [*range(0, 64), *range(64, len(whole), len(whole) // 200), len(whole) - HIDDEN * 4]:
        path.write_bytes(whole[:length])
        error_of(path, folder)


def test_a_flipped_bit_in_the_directory_gives_one_line_or_a_model(tmp_path: Path, folder: Path) -> None:
    whole, path = write_toy_gguf(tmp_path / "whole.gguf").read_bytes(), tmp_path / "flipped.gguf"
    data_start = len(whole) - sum(tensor.nbytes for tensor in toy_gguf_tensors().values())
    rng, messages = random.Random(1), list[str]()
    for _ in range(300):
        broken = bytearray(whole)
        broken[rng.randrange(data_start)] ^= 1 << rng.randrange(8)
        path.write_bytes(broken)
        try:
            convert_gguf(path, folder, lambda _: None)
        except ConfigError as error:
            messages.append(str(error))
    assert len(messages) > 200
    assert all(path.name in message and "\n" not in message for message in messages)


def test_an_unknown_quantization_is_named(tmp_path: Path) -> None:
    path = write_toy_gguf(tmp_path / "m.gguf")
    content = path.read_bytes()
    place = content.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8  # one dimension follows the name
    path.write_bytes(content[:place] + struct.pack("<I", 99) + content[place + 4 :])
    with pytest.raises(ConfigError, match=r"m\.gguf: tensor 'output_norm.weight' has the unknown quantization type 99"):
        GgufFile(path)
