"""Qwen2 and Qwen2.5: Llama with biases of query, key and value."""

from dataclasses import replace

from engine.config_keys import Keys
from engine.families.common import read_layer_types, read_plain
from engine.model_config import ModelConfig


def parse(keys: Keys) -> ModelConfig:
    """Qwen2ForCausalLM."""
    return replace(with_qwen_windows(read_plain(keys), keys), qkv_bias=True)


def with_qwen_windows(config: ModelConfig, keys: Keys) -> ModelConfig:
    """Upper layers may have a sliding window; the files carry its size also where it is not used."""
    used, tokens = keys.flag("use_sliding_window", False), keys.whole("sliding_window", 4096)
    first = keys.whole("max_window_layers", 28, least=0)
    rule = [used and index >= first for index in range(config.num_layers)]
    slides = read_layer_types(keys, config.num_layers, rule)
    return config.with_reach(*(tokens if used and here else None for here in slides))
