"""Gemma 3, text: sliding and full layers with a rotary base each, norms before and after both halves of a layer.

Its norms store what is added to 1, and the norm that Llama has before the MLP has another name, because the one with
that name comes after attention.
"""

import math
from dataclasses import replace

from engine.config_keys import Keys
from engine.families.common import Defaults, read_layer_types, read_sizes
from engine.families.rope import rope_of
from engine.model_config import LayerConfig, ModelConfig, Names, Rope

_NAMES = Names(
    attention_end_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_end_norm="post_feedforward_layernorm",
)
_FULL, _SLIDING = "full_attention", "sliding_attention"


def parse(keys: Keys) -> ModelConfig:
    """Gemma3ForCausalLM."""
    keys.require("hidden_activation", "gelu_pytorch_tanh")
    keys.require("attention_bias", False)
    keys.require("use_bidirectional_attention", False)
    if keys.get("attn_logit_softcapping") is not None:
        raise keys.wrong("attn_logit_softcapping", keys.raw["attn_logit_softcapping"], "null in this family")
    config = read_sizes(keys, Defaults(head_dim=256, tie_embeddings=True))
    return replace(
        config,
        layers=_layers(keys, config.head_dim),
        attention_scale=keys.positive("query_pre_attn_scalar", 256) ** -0.5,
        qk_norm=True,
        activation="gelu",
        norm_offset=1.0,
        embedding_scale=math.sqrt(config.hidden_size),
        logit_cap=keys.positive_or_none("final_logit_softcapping"),
        names=_NAMES,
    )


def _layers(keys: Keys, head_dim: int) -> tuple[LayerConfig, ...]:
    """Every sixth layer sees everything, where the file has no list of its own."""
    full, sliding = _ropes(keys, head_dim)
    reach = keys.whole("sliding_window", 4096)
    every = keys.whole("sliding_window_pattern", keys.whole("_sliding_window_pattern", 6))
    rule = [bool((index + 1) % every) for index in range(keys.whole("num_hidden_layers"))]
    slides = read_layer_types(keys, len(rule), rule)
    return tuple(LayerConfig(sliding, reach) if here else LayerConfig(full) for here in slides)


def _ropes(keys: Keys, head_dim: int) -> tuple[Rope, Rope]:
    """Of full and of sliding layers; older files have two bases, and a stretching that is the full layers' alone."""
    theta, local = keys.positive("rope_theta", 1e6), keys.positive("rope_local_base_freq", 1e4)
    old, new = keys.section("rope_scaling"), keys.section("rope_parameters")
    full, sliding = (new.section(_FULL), new.section(_SLIDING)) if new.raw else (old, Keys({}, new.where))
    ropes = (
        rope_of(full, full.positive("rope_theta", theta), head_dim),
        rope_of(sliding, sliding.positive("rope_theta", local), head_dim),
    )
    for section in (old, new, full, sliding):
        section.refuse_others()
    return ropes
