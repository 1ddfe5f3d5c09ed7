"""What the config.json of most families have in common.

Defaults are those that an absent key has in the format of the family, so they are the family's to give.
"""

from dataclasses import dataclass, replace

from engine.config_keys import Keys
from engine.families.rope import read_rope
from engine.model_config import Experts, LayerConfig, ModelConfig


@dataclass(frozen=True)
class Defaults:
    """Values of absent keys; None where the key must be there."""

    rms_eps: float = 1e-6
    theta: float = 10000.0
    head_dim: int | None = None  # None: the hidden size, shared out among the heads
    tie_embeddings: bool = False


PLAIN = Defaults()


def read_plain(keys: Keys, defaults: Defaults = PLAIN) -> ModelConfig:
    """The shape of Llama: every layer the same, no biases."""
    keys.require("hidden_act", "silu")
    config = read_sizes(keys, defaults)
    return with_layers(config, keys, LayerConfig(read_rope(keys, config.head_dim, defaults.theta)))


def read_sizes(keys: Keys, defaults: Defaults) -> ModelConfig:
    """All but the layers."""
    num_heads, hidden_size = keys.whole("num_attention_heads"), keys.whole("hidden_size")
    head_dim = keys.whole("head_dim", defaults.head_dim or max(hidden_size // num_heads, 1))
    return ModelConfig(
        architecture="",
        vocab_size=keys.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.whole("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=keys.whole("num_key_value_heads", num_heads),
        head_dim=head_dim,
        window=keys.whole("max_position_embeddings"),
        rms_eps=keys.positive("rms_norm_eps", defaults.rms_eps),
        tie_embeddings=keys.flag("tie_word_embeddings", defaults.tie_embeddings),
        layers=(),
        attention_scale=head_dim**-0.5,
    )


def with_layers(config: ModelConfig, keys: Keys, layer: LayerConfig) -> ModelConfig:
    """As many layers as the file says, all like this one."""
    return replace(config, layers=(layer,) * keys.whole("num_hidden_layers"))


def with_reach(config: ModelConfig, reach: int | None) -> ModelConfig:
    """The same reach in every layer."""
    return config.with_reach(*[reach] * config.num_layers)


def read_layer_types(keys: Keys, num_layers: int, slides: list[bool]) -> list[bool]:
    """For each layer whether its window slides: as `layer_types` says, else as the family's own rule does."""
    kinds = {"sliding_attention": True, "full_attention": False}
    types = keys.get("layer_types")
    if types is None:
        return slides
    if not isinstance(types, list) or len(types) != num_layers or not {*map(str, types)} <= kinds.keys():
        raise keys.wrong("layer_types", types, f"a list of {num_layers} of: {', '.join(kinds)}")
    return [kinds[kind] for kind in types]


def with_experts(config: ModelConfig, experts: Experts, layers: range) -> ModelConfig:
    """Experts in the layers with these numbers."""
    chosen = (replace(layer, experts=experts if index in layers else None) for index, layer in enumerate(config.layers))
    return replace(config, layers=tuple(chosen))


def check_experts(keys: Keys, experts: Experts) -> Experts:
    """Refuses more experts per token than there are."""
    if experts.per_token > experts.count:
        raise keys.wrong("num_experts_per_tok", experts.per_token, f"at most {experts.count}, the number of experts")
    return experts
