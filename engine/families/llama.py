"""Llama 2, 3, 3.1 and their relatives (SmolLM2): the plain shape."""

from engine.config_keys import Keys
from engine.families.common import read_plain
from engine.model_config import ModelConfig


def parse(keys: Keys) -> ModelConfig:
    """LlamaForCausalLM."""
    for key in ("attention_bias", "mlp_bias", "rope_interleaved"):
        keys.require(key, False)
    return read_plain(keys)
