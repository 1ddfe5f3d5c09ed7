"""What a worker says about its model when it registers: enough to pair workers and to serve text.

A prefill and a decode worker are paired only when `difference` finds nothing.
"""

from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True)
class KvLayout:
    """How the KV cache of a model lies in memory; two workers must agree on all of it."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: str  # "float32" | "bfloat16"
    page_format: str  # the engine's name for the order of bytes inside a page
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers."""
        element_bytes = {"float32": 4, "bfloat16": 2}[self.dtype]
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * element_bytes

    @property
    def page_bytes(self) -> int:
        """KV bytes of one page over all layers; a page is contiguous."""
        return self.token_bytes * self.page_tokens

    @property
    def layer_bytes(self) -> int:
        """KV bytes of one page in one layer."""
        return self.page_bytes // self.num_layers

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens)


@dataclass(frozen=True)
class ModelCard:
    """Identity of a loaded model."""

    name: str
    vocab_size: int
    window: int  # tokens, prompt and completion together
    eos_token_ids: tuple[int, ...]
    fingerprint: str  # config + tensor names, shapes, dtypes + weights hash
    kv_layout: KvLayout
    exact: bool  # path-invariant on this machine: the start-up self-test passed


def difference(ours: ModelCard, theirs: ModelCard) -> str:
    """Why two workers may not be paired, or an empty string when they may.

    `exact` does not count: it says how a worker computes, not what its pages mean.
    """
    if ours == theirs:
        return ""
    mine, other = asdict(ours), asdict(theirs)
    names = [field.name for field in fields(ModelCard) if field.name != "exact"]
    return "; ".join(f"{name}: {mine[name]} here, {other[name]} there" for name in names if mine[name] != other[name])
