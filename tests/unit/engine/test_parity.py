"""The same tokens as transformers, greedily and in fp32, for every family. `make parity` does the same at length."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config_file import read_config
from tests.parity import LENGTHS, compare, random_prompts, reference_of
from tests.toy import toy_engine, write_toy_model
from tests.toy_families import FAMILIES

VOCAB_SIZE = 512


@pytest.mark.parametrize("family", FAMILIES)
def test_every_greedy_token_is_that_of_transformers(tmp_path: Path, family: str) -> None:
    folder = write_toy_model(tmp_path, seed=11, **FAMILIES[family])
    engine, reference = toy_engine(folder, num_pages=256), reference_of(folder)
    prompts = random_prompts(VOCAB_SIZE, LENGTHS, seed=3)
    score = compare(engine, reference, prompts[1::2], 24) + compare(engine, reference, prompts[-2:-1], 8)
    print(f"{family}: {score}")
    assert score.holds
    assert score.num_tokens == 8 * 24 + 8


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_is_read(tmp_path: Path, family: str) -> None:
    """Its own spelling of the config, its own names of the weights, and weights that it drew itself."""
    toy = write_toy_model(tmp_path / "toy", **FAMILIES[family])
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(toy), attn_implementation="eager").eval()
    for name, weight in reference.named_parameters():
        torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.2)
    reference.save_pretrained(tmp_path / "written")
    assert read_config(tmp_path / "written") == read_config(toy)
    prompts = random_prompts(VOCAB_SIZE, (20, 70), seed=1)
    assert compare(toy_engine(tmp_path / "written"), reference, prompts, 8).holds


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama, grouped", {"rope_theta": 11000.0}),
        ("Mistral", {"sliding_window": 41}),
        ("Qwen2, sliding", {"max_window_layers": 2}),
        ("Qwen3-MoE", {"norm_topk_prob": False}),
        ("Gemma 3", {"rope_local_base_freq": 11000.0}),
        ("Gemma 3", {"query_pre_attn_scalar": 21}),
        ("Gemma 3", {"sliding_window_pattern": 3}),
        ("Phi-3, longrope", {"original_max_position_embeddings": 390}),
    ],
)
def test_a_wrong_model_would_be_noticed(tmp_path: Path, family: str, changes: dict[str, object]) -> None:
    engine = toy_engine(write_toy_model(tmp_path, **FAMILIES[family]))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    score = compare(engine, reference_of(tmp_path), random_prompts(VOCAB_SIZE, (80,), seed=1), 8)
    assert not score.holds


@pytest.mark.parametrize(("gap", "ties", "wrong"), [(0.5e-4, 1, 0), (2e-4, 0, 1)])
def test_a_near_tie_is_counted_and_anything_else_is_wrong(tmp_path: Path, gap: float, ties: int, wrong: int) -> None:
    """A reference whose best token at one position is another than ours, by so much."""
    engine, reference = toy_engine(write_toy_model(tmp_path)), reference_of(tmp_path)

    def changed(token_ids: torch.Tensor, logits_to_keep: int) -> SimpleNamespace:
        logits = reference(token_ids, logits_to_keep=logits_to_keep).logits
        best, second = logits[0, 4].topk(2).indices.tolist()
        logits[0, 4, second] = logits[0, 4, best] + gap
        return SimpleNamespace(logits=logits)

    score = compare(engine, changed, random_prompts(VOCAB_SIZE, (10,), seed=1), 8)
    assert (score.num_ties, score.num_wrong) == (ties, wrong)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2(smollm2_folder: Path) -> None:
    engine, reference = toy_engine(smollm2_folder), reference_of(smollm2_folder)
    assert compare(engine, reference, random_prompts(49152, (1, 17, 120), seed=3), 32).holds
