"""Toy models of every family: what their config.json has beside or instead of the toy Llama's.

Windows, periods and parts are small, so that prompts of a few dozen tokens meet them all.
"""

from collections.abc import Mapping
from typing import Any

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
}
_MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
_MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 5}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "mlp_only_layers": [],
}
_PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0}
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 24,
    "sliding_window_pattern": 2,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "query_pre_attn_scalar": 20,
    "attention_bias": False,
}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Llama, grouped": {},
    "Llama, tied": {"tie_word_embeddings": True},
    "Llama, multi-head, theta 5e5": {"num_key_value_heads": 4, "rope_theta": 500000.0},
    "Llama, one kv head, wide heads": {"num_key_value_heads": 1, "head_dim": 48, "hidden_size": 80},
    "Llama, deep, eps 1e-3": {"num_hidden_layers": 6, "rms_norm_eps": 1e-3, "intermediate_size": 200},
    "Llama, linear rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "Llama 3.1": {"rope_scaling": LLAMA3_ROPE},
    "Mistral": _MISTRAL | {"sliding_window": 40},
    "Mistral, no window": _MISTRAL | {"sliding_window": None},
    "Mixtral": _MIXTRAL | {"num_experts_per_tok": 2},
    "Qwen2": _QWEN2 | {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 2},
    "Qwen2, sliding": _QWEN2 | {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1},
    "Qwen3": _QWEN3 | {"head_dim": 32, "tie_word_embeddings": True},
    "Qwen3-MoE": _QWEN3_MOE | {"norm_topk_prob": True},
    "Qwen3-MoE, every second": _QWEN3_MOE | {"norm_topk_prob": False, "decoder_sparse_step": 2},
    "Phi-3": _PHI3 | {"sliding_window": 50},
    "Phi-3, longrope": _PHI3
    | {"partial_rotary_factor": 0.75, "rope_scaling": _LONGROPE, "original_max_position_embeddings": 400},
    "Gemma 3": _GEMMA3 | {"tie_word_embeddings": True},
    "Gemma 3, capped": _GEMMA3
    | {
        "final_logit_softcapping": 5.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "num_hidden_layers": 5,
        "sliding_window": 65,
    },
}
