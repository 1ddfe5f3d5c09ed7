"""What the layers need to know of a model: its sizes, and the few ways in which families differ.

`engine.config_file.read_config` makes one of these out of a config.json, with the parser of the family
(`engine/families/`). Fields are independent of each other: the core asks for each by itself and never for a family.
"""

from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's stretched rotary frequencies: slow ones divided by `factor`, fast ones kept, between them blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_window: int


@dataclass(frozen=True)
class Rope:
    """Rotary positions: frequency i is theta^(-2i / width), stretched or divided where the family says so."""

    theta: float
    width: int  # how many elements of a head turn, the first ones
    llama3: Llama3Rope | None = None
    divisors: tuple[float, ...] = ()  # of the frequencies, one for each
    amplitude: float = 1.0  # of cosine and sine


@dataclass(frozen=True)
class Experts:
    """An MLP of which every token takes only some parts."""

    count: int
    per_token: int
    intermediate_size: int  # of one of them
    normalized: bool  # whether the weights of a token's experts add up to 1


@dataclass(frozen=True)
class LayerConfig:
    """In what layers of one model may differ."""

    rope: Rope
    reach: int | None = None  # tokens that attention sees, the last of them the row's own; None: all before it
    experts: Experts | None = None


@dataclass(frozen=True)
class MlpNames:
    """Stored names of a gated MLP; with {} for the expert's number where it is one of many."""

    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"

    def of_expert(self, index: int) -> "MlpNames":
        """Those of one expert."""
        return MlpNames(tuple(name.format(index) for name in self.gate_up), self.down.format(index))


@dataclass(frozen=True)
class Names:
    """Under which names a layer's tensors are stored; several names, or one tensor in which they lie on one another."""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention_end_norm: str | None = None  # of what attention adds to the hidden rows; None: there is no such norm
    mlp_end_norm: str | None = None
    mlp: MlpNames = field(default_factory=MlpNames)
    router: str = "mlp.gate"
    experts: MlpNames = MlpNames(("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), "mlp.experts.{}.down_proj")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: the shape of Llama, and what may be different."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int  # tokens, prompt and completion together
    rms_eps: float
    tie_embeddings: bool
    layers: tuple[LayerConfig, ...]
    attention_scale: float  # of the products of query and key
    eos_token_ids: tuple[int, ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False  # of every query and key head, before it turns
    activation: Literal["silu", "gelu"] = "silu"  # of the gate; gelu in its tanh form
    norm_offset: float = 0.0  # added to the stored weights of every norm
    embedding_scale: float = 1.0
    logit_cap: float | None = None  # c: logits are c * tanh(logit / c)
    names: Names = field(default_factory=Names)

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, the same as that of all value heads."""
        return self.num_kv_heads * self.head_dim

    def with_reach(self, *reach: int | None) -> "ModelConfig":
        """The same with these reaches, layer by layer."""
        layers = (replace(layer, reach=tokens) for layer, tokens in zip(self.layers, reach, strict=True))
        return replace(self, layers=tuple(layers))
