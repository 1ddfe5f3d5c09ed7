"""What a model costs: FLOPs and bytes of a pass, from its config alone. Arithmetic; nothing is measured here.

A row of a pass is multiplied with every weight of the linear layers that it meets (2 FLOPs each), and attends to the
keys of all positions in its reach (4 FLOPs per query element and key: one product with K, one with V). A pass reads
every weight that a row meets once, and the KV that its sequences see once. The lm_head is read and multiplied for
sampled rows only, the embedding is looked up. Norms, rotations and sampling count as nothing.

Of experts a row meets only some; rows are taken to choose theirs independently and evenly.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from engine.batch import Chunk
from engine.model_config import ModelConfig
from engine.tensor_names import EMBEDDING, LM_HEAD, expected_shapes
from pdserve.model_card import KvLayout
from pdserve.speed import Limits, Work

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ModelCost:
    """The sizes that decide what a pass costs."""

    num_parameters: int  # all that is stored
    linear_weights: int  # that every row meets, of all layers, without the lm_head
    expert_weights: int  # of all experts of all layers
    met_share: float  # of the experts, by one row
    head_weights: int
    reaches: tuple[tuple[int | None, int], ...]  # how far layers see, and how many layers that is
    pair_flops: int  # of a row and a position that it sees, in one layer
    weight_bytes: int  # of one weight
    kv_layer_bytes: int  # of one position in one layer

    @property
    def stored_bytes(self) -> int:
        """Of all parameters."""
        return self.num_parameters * self.weight_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Of one position, over all layers."""
        return self.kv_layer_bytes * sum(layers for _, layers in self.reaches)

    def work(self, spans: Sequence[tuple[int, int]], sampled: int) -> Work:
        """A pass over rows of several sequences: first position and number of rows of each."""
        rows = sum(count for _, count in spans)
        met = self.linear_weights + self.expert_weights * self.met_share
        read = self.linear_weights + self.expert_weights * (1 - (1 - self.met_share) ** rows)
        pairs = sum(layers * _pairs(span, reach) for reach, layers in self.reaches for span in spans)
        positions = sum(layers * _seen(span, reach) for reach, layers in self.reaches for span in spans)
        return Work(
            passes=1,
            tokens=rows,
            flops=2.0 * (met * rows + self.head_weights * sampled) + self.pair_flops * pairs,
            read_bytes=self.weight_bytes * (read + (self.head_weights if sampled else 0))
            + float(self.kv_layer_bytes * positions),
        )

    def prefill(self, num_tokens: int) -> Work:
        """A prompt in one pass, of which one token is sampled."""
        return self.work([(0, num_tokens)], 1)

    def decode(self, batch: int, context: int) -> Work:
        """A step of `batch` sequences, each of `context` tokens with the newest."""
        return self.work([(context - 1, 1)] * batch, batch)

    def of_chunks(self, chunks: Sequence[Chunk]) -> Work:
        """The pass over these."""
        spans = [(chunk.start, len(chunk.token_ids)) for chunk in chunks]
        return self.work(spans, sum(chunk.sample for chunk in chunks))


def _pairs(span: tuple[int, int], reach: int | None) -> int:
    """Rows and the positions that each of them sees."""
    start, count = span
    return _pairs_up_to(start + count, reach) - _pairs_up_to(start, reach)


def _pairs_up_to(length: int, reach: int | None) -> int:
    full = length if reach is None else min(length, reach)
    return full * (full + 1) // 2 + (length - full) * full


def _seen(span: tuple[int, int], reach: int | None) -> int:
    """Positions that some row sees."""
    start, count = span
    return start + count if reach is None else min(start + count, count - 1 + reach)


def model_cost(config: ModelConfig, layout: KvLayout) -> ModelCost:
    """Of a model served in the dtype of `layout`."""
    shapes = expected_shapes(config)
    linear = [shape for name, shape in shapes.items() if len(shape) == 2 and name not in (EMBEDDING, LM_HEAD)]
    experts = [layer.experts for layer in config.layers if layer.experts is not None]
    expert_weights = sum(3 * each.count * each.intermediate_size * config.hidden_size for each in experts)
    return ModelCost(
        num_parameters=sum(map(prod, shapes.values())),
        linear_weights=sum(map(prod, linear)) - expert_weights,
        expert_weights=expert_weights,
        met_share=experts[0].per_token / experts[0].count if experts else 1.0,
        head_weights=config.vocab_size * config.hidden_size,
        reaches=tuple(Counter(layer.reach for layer in config.layers).items()),
        pair_flops=4 * config.q_size,
        weight_bytes=_ELEMENT_BYTES[layout.dtype],
        kv_layer_bytes=layout.token_bytes // layout.num_layers,
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
