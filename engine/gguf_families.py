"""What a GGUF file of a model family calls things, and what llama.cpp did to its weights.

A new family is one more `GgufFamily`: the rest of the conversion asks for shapes by the names of Hugging Face, from the
config.json that it has just written.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.gguf_file import GgufFile

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_LAYER = _LAYER | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class GgufFamily:
    """How one architecture is stored; `architecture` is also the prefix of its metadata keys."""

    architecture: str
    settings: Callable[[GgufFile], dict[str, object]]  # what config.json has beside the sizes
    layer_names: Mapping[str, str]  # of a layer's tensors, GGUF's to Hugging Face's
    has_turned_rows: bool  # of query and key: neighbouring pairs rotate there, not the halves of a head
    norm_offset: float  # that was added to the weights of norms


def _llama(_: GgufFile) -> dict[str, object]:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "mlp_bias": False}


def _gemma3(source: GgufFile) -> dict[str, object]:
    """The small text models; what does not stand in the file is the same in all of them."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": source.integer("gemma3.attention.key_length"),
        "sliding_window": source.integer("gemma3.attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
    }


GGUF_FAMILIES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "llama": GgufFamily("llama", _llama, _LAYER, has_turned_rows=True, norm_offset=0.0),
        "gemma3": GgufFamily("gemma3", _gemma3, _GEMMA3_LAYER, has_turned_rows=False, norm_offset=1.0),
    }
)
