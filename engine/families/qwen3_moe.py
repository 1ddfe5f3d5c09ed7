"""Qwen3-MoE: Qwen3 with experts in most layers."""

from dataclasses import replace

from engine.config_keys import Keys
from engine.families.common import check_experts, read_plain, with_experts, with_reach
from engine.model_config import Experts, ModelConfig


def parse(keys: Keys) -> ModelConfig:
    """Qwen3MoeForCausalLM."""
    keys.require("attention_bias", False)
    keys.require("mlp_only_layers", [])
    keys.pass_over("output_router_logits", "router_aux_loss_coef")  # of training
    config = read_plain(keys)
    experts = Experts(
        count=keys.whole("num_local_experts", keys.whole("num_experts", 128)),  # newer name, older name
        per_token=keys.whole("num_experts_per_tok", 8),
        intermediate_size=keys.whole("moe_intermediate_size", 768),
        normalized=keys.flag("norm_topk_prob", False),
    )
    step = keys.whole("decoder_sparse_step", 1)
    config = with_experts(config, check_experts(keys, experts), range(step - 1, config.num_layers, step))
    return replace(with_reach(config, _reach(keys)), qk_norm=True)


def _reach(keys: Keys) -> int | None:
    """The files carry the size of a window also where it is not used."""
    keys.pass_over("max_window_layers")
    tokens = keys.whole("sliding_window", 4096)
    return tokens if keys.flag("use_sliding_window", False) else None
