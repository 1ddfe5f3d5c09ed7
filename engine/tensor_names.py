"""Name and shape of every tensor that a model needs, as its files store them."""

from collections.abc import Iterator

from engine.model_config import Experts, LayerConfig, MlpNames, ModelConfig

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm"
ATTENTION_OUT = "self_attn.o_proj"
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def layer_prefix(index: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{index}."


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor by its name, [out, in] for the linear layers."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), f"{FINAL_NORM}.weight": (hidden,)}
    if not config.tie_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    for index, layer in enumerate(config.layers):
        shapes |= {layer_prefix(index) + name: shape for name, shape in _layer(config, layer)}
    return shapes


def _layer(config: ModelConfig, layer: LayerConfig) -> Shapes:
    names = config.names
    yield from _norm(names.attention_norm, config)
    yield from _attention(config)
    yield from _norm(names.attention_end_norm, config)
    yield from _norm(names.mlp_norm, config)
    if layer.experts is None:
        yield from _mlp(names.mlp, config.hidden_size, config.intermediate_size)
    else:
        yield from _experts(config, layer.experts)
    yield from _norm(names.mlp_end_norm, config)


def _norm(name: str | None, config: ModelConfig) -> Shapes:
    if name is not None:
        yield f"{name}.weight", (config.hidden_size,)


def _attention(config: ModelConfig) -> Shapes:
    rows = (config.q_size, config.kv_size, config.kv_size)
    yield from _stacked(config.names.qkv, rows, config.hidden_size, with_bias=config.qkv_bias)
    yield f"{ATTENTION_OUT}.weight", (config.hidden_size, config.q_size)
    if config.qk_norm:
        for name in HEAD_NORMS:
            yield f"{name}.weight", (config.head_dim,)


def _experts(config: ModelConfig, experts: Experts) -> Shapes:
    yield f"{config.names.router}.weight", (experts.count, config.hidden_size)
    for index in range(experts.count):
        yield from _mlp(config.names.experts.of_expert(index), config.hidden_size, experts.intermediate_size)


def _mlp(names: MlpNames, hidden: int, inner: int) -> Shapes:
    yield from _stacked(names.gate_up, (inner, inner), hidden)
    yield f"{names.down}.weight", (hidden, inner)


def _stacked(names: tuple[str, ...], rows: tuple[int, ...], width: int, with_bias: bool = False) -> Shapes:
    """Parts under a name each, or all of them in one tensor."""
    parts = rows if len(names) == len(rows) else (sum(rows),)
    for name, part in zip(names, parts, strict=True):
        yield f"{name}.weight", (part, width)
        if with_bias:
            yield f"{name}.bias", (part,)
