"""The same tokens as transformers, greedily and in fp32.

Where the reference's own two best logits are closer than 1e-4 either choice is right: then the comparison goes on with
our token, and such cases are counted.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from engine.batch import Chunk
from engine.load import Engine
from engine.model_config import read_config
from tests.toy import toy_engine, write_toy_model

TIE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "multi-head, theta 5e5": {"num_key_value_heads": 4, "rope_theta": 500000.0},
    "one kv head, wide heads": {"num_key_value_heads": 1, "head_dim": 48, "hidden_size": 80},
    "llama3 rope": {"rope_scaling": LLAMA3},
    "deep, eps 1e-3": {"num_hidden_layers": 6, "rms_norm_eps": 1e-3, "intermediate_size": 200},
}


def reference_of(folder: Path) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def greedy(engine: Engine, prompt: list[int], count: int) -> tuple[list[int], Tensor]:
    """Prompt and `count` further tokens, and the logits [count, vocab] that they were taken from."""
    token_ids, start, rows = list(prompt), 0, []
    for _ in range(count):
        logits = engine.runner.run([Chunk(token_ids[start:], start, range(64), sample=True)])
        rows.append(logits[0])
        start = len(token_ids)
        token_ids.append(int(logits.argmax()))
    return token_ids, torch.stack(rows)


@torch.inference_mode()
def compare(engine: Engine, reference: LlamaForCausalLM, prompt: list[int], count: int) -> int:
    """Assert parity for one prompt; returns how many ties of the reference went the other way."""
    token_ids, logits = greedy(engine, prompt, count)
    expected = reference(torch.tensor([token_ids[:-1]])).logits[0, len(prompt) - 1 :]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
    best = expected.topk(2).values
    differs = expected.argmax(-1) != torch.tensor(token_ids[len(prompt) :])
    assert not (differs & (best[:, 0] - best[:, 1] >= TIE)).any()
    return int(differs.sum())


@pytest.mark.parametrize("shape", SHAPES)
def test_every_greedy_token_is_that_of_transformers(tmp_path: Path, shape: str) -> None:
    folder = write_toy_model(tmp_path, seed=11, **SHAPES[shape])
    engine, reference = toy_engine(folder), reference_of(folder)
    generator = torch.Generator().manual_seed(3)
    ties = 0
    for length in (1, 2, 15, 16, 17, 40, 130, 300):
        prompt = torch.randint(512, (length,), generator=generator).tolist()
        ties += compare(engine, reference, prompt, 48)
    print(f"{shape}: {ties} ties of 384 tokens went the other way")
    assert ties <= 1


def test_a_wrong_model_would_be_noticed(tmp_path: Path) -> None:
    engine = toy_engine(write_toy_model(tmp_path / "a", rope_theta=10000.0))
    reference = reference_of(write_toy_model(tmp_path / "b", rope_theta=11000.0))
    with pytest.raises(AssertionError):
        compare(engine, reference, list(range(100, 140)), 4)


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    reference = LlamaForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    assert read_config(tmp_path).rope_theta == 20000.0
    assert compare(toy_engine(tmp_path), reference, list(range(50)), 16) <= 1
    written = reference.config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert read_config(tmp_path).num_kv_heads == 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2(smollm2_folder: Path) -> None:
    engine, reference = toy_engine(smollm2_folder), reference_of(smollm2_folder)
    generator = torch.Generator().manual_seed(3)
    ties = 0
    for length in (1, 17, 120):
        ties += compare(engine, reference, torch.randint(49152, (length,), generator=generator).tolist(), 32)
    assert ties <= 1
