"""Qwen3: Llama with norms of every query and key head."""

from dataclasses import replace

from engine.config_keys import Keys
from engine.families.common import Defaults, read_plain
from engine.families.qwen2 import with_qwen_windows
from engine.model_config import ModelConfig


def parse(keys: Keys) -> ModelConfig:
    """Qwen3ForCausalLM."""
    keys.require("attention_bias", False)
    return replace(with_qwen_windows(read_plain(keys, Defaults(head_dim=128)), keys), qk_norm=True)
