"""config.json: what is understood, and that everything else is refused in one clear line."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from engine.config_file import read_config
from engine.model_config import LayerConfig, Llama3Rope, ModelConfig, Rope
from pdserve.errors import ConfigError
from tests.toy import toy_config, toy_config_json
from tests.toy_families import FAMILIES

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def refusal(folder: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        toy_config(folder, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_reads_the_toy_config(tmp_path: Path) -> None:
    config = toy_config(tmp_path)
    layers = (LayerConfig(Rope(10000.0, 16)),) * 3
    assert config == ModelConfig("LlamaForCausalLM", 512, 64, 160, 4, 2, 16, 512, 1e-5, False, layers, 0.25, (2,))
    assert (config.q_size, config.kv_size) == (64, 32)


def test_absent_keys_take_the_defaults_of_the_format(tmp_path: Path) -> None:
    names = ["num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings", "rms_norm_eps", "eos_token_id"]
    config = toy_config(tmp_path, **dict.fromkeys(names))
    assert (config.num_kv_heads, config.head_dim, config.layers[0].rope.theta) == (4, 16, 10000.0)
    assert (config.tie_embeddings, config.rms_eps, config.eos_token_ids) == (False, 1e-6, ())


def test_rope_old_and_new_spelling(tmp_path: Path) -> None:
    scaling = Llama3Rope(32.0, 1.0, 4.0, 8192)
    assert toy_config(tmp_path, rope_scaling=LLAMA3).layers[2].rope == Rope(10000.0, 16, scaling)
    new = toy_config(tmp_path, rope_theta=None, rope_parameters=LLAMA3 | {"rope_theta": 5e5})
    assert new.layers[2].rope == Rope(5e5, 16, scaling)
    assert "rope_type" in refusal(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert "factor must be" in refusal(tmp_path, rope_scaling={"rope_type": "llama3"})
    assert "attention_factor" in refusal(tmp_path, rope_scaling=LLAMA3 | {"attention_factor": 2.0})


def test_unsupported_architecture_names_the_supported(tmp_path: Path) -> None:
    message = refusal(tmp_path, architectures=["MambaForCausalLM"])
    assert "MambaForCausalLM" in message
    assert "LlamaForCausalLM" in message
    assert "architectures" in refusal(tmp_path, architectures=None)
    assert "architectures" in refusal(tmp_path, architectures=[["x"]])


def test_unknown_keys_are_named(tmp_path: Path) -> None:
    message = refusal(tmp_path, quantization_config={"bits": 4}, logit_softcap=30.0)
    assert "logit_softcap, quantization_config" in message


def test_null_and_irrelevant_keys_pass(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(toy_config_json(use_cache=True, num_beams=4) | {"sliding_window": None})
    )
    assert read_config(tmp_path).vocab_size == 512


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("rope_interleaved", True),
        ("vocab_size", 0),
        ("vocab_size", True),
        ("vocab_size", None),
        ("hidden_size", "64"),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("rms_norm_eps", -1.0),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", float("inf")),
        ("tie_word_embeddings", 1),
        ("eos_token_id", 512),
        ("eos_token_id", "2"),
        ("rope_scaling", 2.0),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, key: str, value: Any) -> None:
    assert key in refusal(tmp_path, **{key: value})


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("Mistral", {"sliding_window": 0}, "sliding_window must be a whole number"),
        ("Mistral", {"layer_types": ["full_attention"] * 3}, "unknown layer_types"),
        ("Mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok must be at most 5"),
        ("Qwen2", {"layer_types": ["full_attention"]}, "layer_types must be a list of 3"),
        ("Qwen2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types must be"),
        ("Qwen3", {"attention_bias": True}, "attention_bias must be false"),
        ("Qwen3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type must be one of"),
        ("Qwen3-MoE", {"mlp_only_layers": [0]}, "mlp_only_layers must be []"),
        ("Qwen3-MoE", {"shared_expert_intermediate_size": 64}, "unknown shared_expert_intermediate_size"),
        ("Phi-3", {"partial_rotary_factor": 0.6}, "partial_rotary_factor must be such that an even part of 16 turns"),
        ("Phi-3", {"rope_scaling": {"type": "yarn", "short_factor": []}}, "rope_type must be one of"),
        ("Phi-3, longrope", {"partial_rotary_factor": 1.0}, "short_factor must be a list of 8 numbers"),
        ("Gemma 3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null"),
        ("Gemma 3", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be false"),
        ("Gemma 3", {"rope_scaling": {"rope_type": "dynamic"}}, "rope_type must be one of"),
        ("Gemma 3", {"hidden_activation": "gelu"}, "hidden_activation must be"),
    ],
)
def test_what_a_family_cannot_do_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], expected: str
) -> None:
    assert expected in refusal(tmp_path, **{**FAMILIES[family], **changes})


def test_windows_by_layer(tmp_path: Path) -> None:
    def reach(family: str, **changes: Any) -> list[int | None]:
        return [layer.reach for layer in toy_config(tmp_path, **{**FAMILIES[family], **changes}).layers]

    assert reach("Mistral") == [40, 40, 40]
    assert reach("Qwen2") == [None, None, None]
    assert reach("Qwen2, sliding") == [None, 33, 33]
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert reach("Qwen2, sliding", layer_types=types) == [33, None, 33]
    assert reach("Gemma 3") == [24, None, 24]
    assert reach("Gemma 3", layer_types=types[1:] + types[1:2]) == [None, 24, None]
    (tmp_path / "config.json").write_text(json.dumps(toy_config_json(architectures=["MistralForCausalLM"])))
    assert [layer.reach for layer in read_config(tmp_path).layers] == [4096] * 3  # the default of the format


def test_longrope_ends_where_its_keys_would_change(tmp_path: Path) -> None:
    config = toy_config(tmp_path, **FAMILIES["Phi-3, longrope"])
    rope = config.layers[0].rope
    assert (config.window, rope.width, rope.divisors) == (400, 12, (1.0, 1.1, 1.2, 1.3, 1.4, 1.5))
    assert rope.amplitude == pytest.approx(math.sqrt(1 + math.log(512 / 400) / math.log(400)))


def test_eos_of_the_generation_config_goes_first(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7, 9]}))
    assert toy_config(tmp_path).eos_token_ids == (7, 9)


@pytest.mark.parametrize("content", ["", "{", "[]", "\ufffd"])
def test_unreadable_files(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)
