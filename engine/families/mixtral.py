"""Mixtral: Mistral with experts in every layer."""

from dataclasses import replace

from engine.config_keys import Keys
from engine.families.common import Defaults, check_experts, read_plain, with_experts, with_reach
from engine.model_config import Experts, MlpNames, ModelConfig, Names

_PART = "block_sparse_moe.experts.{}."
_NAMES = Names(router="block_sparse_moe.gate", experts=MlpNames((_PART + "w1", _PART + "w3"), _PART + "w2"))


def parse(keys: Keys) -> ModelConfig:
    """MixtralForCausalLM."""
    keys.pass_over("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")  # of training
    config = read_plain(keys, Defaults(rms_eps=1e-5, theta=1e6))
    count, per_token = keys.whole("num_local_experts", 8), keys.whole("num_experts_per_tok", 2)
    experts = check_experts(keys, Experts(count, per_token, config.intermediate_size, normalized=True))
    config = with_experts(config, experts, range(config.num_layers))
    return replace(with_reach(config, keys.whole_or_none("sliding_window")), names=_NAMES)
