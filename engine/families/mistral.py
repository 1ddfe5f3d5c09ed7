"""Mistral: Llama with a sliding window in every layer. Without one: `"sliding_window": null`."""

from engine.config_keys import Keys
from engine.families.common import read_plain, with_reach
from engine.model_config import ModelConfig


def parse(keys: Keys) -> ModelConfig:
    """MistralForCausalLM."""
    return with_reach(read_plain(keys), keys.whole_or_none("sliding_window", absent=4096))
