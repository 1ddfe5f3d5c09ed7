"""What a model costs: FLOPs and bytes of a pass, from its config alone. Arithmetic; nothing is measured here.

A row of a pass is multiplied with every weight of the linear layers (2 FLOPs each), and attends to the keys of all
positions up to its own (4 FLOPs per query element and key: one product with K, one with V). A pass reads every weight
once, and the KV of each of its sequences once. The lm_head is read and multiplied for sampled rows only, the embedding
is looked up. Norms, rotations and sampling count as nothing.

What another shape does differently belongs into `model_cost` and `ModelCost.work`, and nowhere else: experts of which
a token meets only some, layers whose rows do not see all positions, weights of fewer bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from engine.batch import Chunk
from engine.model_config import ModelConfig
from engine.weights import EMBEDDING, LM_HEAD, expected_shapes
from pdserve.model_card import KvLayout
from pdserve.speed import Limits, Work

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ModelCost:
    """The sizes that decide what a pass costs."""

    num_parameters: int  # all that is stored
    linear_weights: int  # of all layers, without the lm_head
    head_weights: int
    pair_flops: int  # of a row and a position that it sees, over all layers
    weight_bytes: int  # of one weight
    kv_token_bytes: int  # of one position, over all layers

    @property
    def stored_bytes(self) -> int:
        """Of all parameters."""
        return self.num_parameters * self.weight_bytes

    def work(self, rows: int, pairs: int, kv_tokens: int, sampled: int) -> Work:
        """A pass of so many rows, which see `pairs` positions in all, those of `kv_tokens` in the cache."""
        head = self.head_weights if sampled else 0
        return Work(
            passes=1,
            tokens=rows,
            flops=2.0 * (self.linear_weights * rows + self.head_weights * sampled) + self.pair_flops * pairs,
            read_bytes=float(self.weight_bytes * (self.linear_weights + head) + self.kv_token_bytes * kv_tokens),
        )

    def prefill(self, num_tokens: int) -> Work:
        """A prompt in one pass, of which one token is sampled."""
        return self.work(num_tokens, num_tokens * (num_tokens + 1) // 2, num_tokens, 1)

    def decode(self, batch: int, context: int) -> Work:
        """A step of `batch` sequences, each of `context` tokens with the newest."""
        return self.work(batch, batch * context, batch * context, batch)

    def of_chunks(self, chunks: Sequence[Chunk]) -> Work:
        """The pass over these."""
        sizes = [(chunk.start, len(chunk.token_ids)) for chunk in chunks]
        pairs = sum(count * (2 * start + count + 1) // 2 for start, count in sizes)
        rows, kv_tokens = sum(count for _, count in sizes), sum(start + count for start, count in sizes)
        return self.work(rows, pairs, kv_tokens, sum(chunk.sample for chunk in chunks))


def model_cost(config: ModelConfig, layout: KvLayout) -> ModelCost:
    """Of a model served in the dtype of `layout`."""
    shapes = expected_shapes(config)
    linear = [shape for name, shape in shapes.items() if len(shape) == 2 and name not in (EMBEDDING, LM_HEAD)]
    return ModelCost(
        num_parameters=sum(map(prod, shapes.values())),
        linear_weights=sum(map(prod, linear)),
        head_weights=config.vocab_size * config.hidden_size,
        pair_flops=4 * config.q_size * config.num_layers,
        weight_bytes=_ELEMENT_BYTES[layout.dtype],
        kv_token_bytes=layout.token_bytes,
    )


@dataclass(frozen=True)
class PrefillFloor:
    """The least time for a prompt."""

    tokens: int
    flops: float
    floor_ms: float
    textbook_ms: float  # 2 FLOPs for every parameter and token, and nothing else


@dataclass(frozen=True)
class DecodeFloor:
    """The least time for a step; every sequence gets one token."""

    batch: int
    context: int
    read_bytes: float
    read_ms: float
    compute_ms: float
    floor_ms: float  # the longer of the two
    textbook_ms: float  # every parameter read once, and nothing else

    @property
    def tokens_per_s(self) -> float:
        """Of all sequences together."""
        return 1000 * self.batch / self.floor_ms


def prefill_floor(cost: ModelCost, limits: Limits, num_tokens: int) -> PrefillFloor:
    """For a prompt of which nothing is cached."""
    work, textbook = cost.prefill(num_tokens), Work(flops=2.0 * cost.num_parameters * num_tokens)
    return PrefillFloor(num_tokens, work.flops, 1000 * limits.floor_s(work), 1000 * limits.compute_s(textbook))


def decode_floor(cost: ModelCost, limits: Limits, batch: int, context: int) -> DecodeFloor:
    """For sequences of equal length."""
    work, textbook = cost.decode(batch, context), Work(read_bytes=float(cost.stored_bytes))
    seconds = limits.read_s(work), limits.compute_s(work), limits.floor_s(work), limits.read_s(textbook)
    return DecodeFloor(batch, context, work.read_bytes, *(1000 * each for each in seconds))
