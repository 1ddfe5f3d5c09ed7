"""Phi-3 and Phi-4-mini: query, key and value in one tensor, gate and up in another; part of a head may turn.

Longrope divides the frequencies by one list of factors up to the original window and by another in longer sequences, so
that the keys of the same tokens change when the text grows. It is served up to the original window, where it is the
first list in every case.
"""

import math
from dataclasses import replace

from engine.config_keys import Keys
from engine.families.common import Defaults, read_sizes, with_layers, with_reach
from engine.families.rope import rope_kind, rope_of, rope_section
from engine.model_config import LayerConfig, MlpNames, ModelConfig, Names, Rope

_NAMES = Names(qkv=("self_attn.qkv_proj",), mlp=MlpNames(("mlp.gate_up_proj",)))
_LONGROPE = ("longrope", "su")  # "su": its first name


def parse(keys: Keys) -> ModelConfig:
    """Phi3ForCausalLM."""
    keys.require("hidden_act", "silu")
    keys.require("attention_bias", False)
    keys.pass_over("resid_pdrop", "embd_pdrop", "auto_map")  # of training; code that is not run here
    config = read_sizes(keys, Defaults(rms_eps=1e-5))
    original = keys.whole("original_max_position_embeddings", 4096)
    section, theta = rope_section(keys, 10000.0)
    width = _width(config.head_dim, keys, section)
    if rope_kind(section) in _LONGROPE:
        original = section.whole("original_max_position_embeddings", original)
        rope = _longrope(section, Rope(theta, width), config.window, original)
        config = replace(config, window=min(config.window, original))
    else:
        section.pass_over("original_max_position_embeddings")
        rope = rope_of(section, theta, width)
    section.refuse_others()
    config = with_layers(config, keys, LayerConfig(rope))
    return replace(with_reach(config, keys.whole_or_none("sliding_window")), names=_NAMES)


def _width(head_dim: int, keys: Keys, section: Keys) -> int:
    """How much of a head turns."""
    share = section.positive("partial_rotary_factor", keys.positive("partial_rotary_factor", 1.0))
    width = int(head_dim * share)
    if width < 2 or width % 2 or width > head_dim:
        raise section.wrong("partial_rotary_factor", share, f"such that an even part of {head_dim} turns")
    return width


def _longrope(section: Keys, rope: Rope, window: int, original: int) -> Rope:
    """Up to the original window. Amplitude: sqrt(1 + ln(stretch) / ln(original)), LongRoPE (arXiv:2402.13753)."""
    section.pass_over("long_factor")
    stretch = section.positive("factor", window / original)
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    divisors = section.positives("short_factor", rope.width // 2)
    return replace(rope, divisors=divisors, amplitude=section.positive("attention_factor", usual))
