"""An engine whose answers betray any wrong page.

Each (layer, position) has 8 bytes of KV: a hash of what the layer below made of the token, which itself depends on all
KV of that layer up to there *as it lies in the pages*. The logits hash the result of the last layer. So a page that is
stale, foreign, missing or in the wrong place changes every later token, and path-invariance is exact by construction:
integers modulo 2^64, where sums do not depend on batch or chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Chunk
from engine.load import Engine
from engine.sampler import Step, sample
from pdserve.model_card import KvLayout, ModelCard
from pdserve.request import Token, WorkRequest

VOCAB_SIZE = 32
PAGE_TOKENS = 4
WINDOW = 128
NUM_LAYERS = 2

Words = NDArray[np.uint64]
_MASK = 2**64 - 1
_ONES = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_FACTORS: Words = np.random.default_rng(0).integers(0, 2**63, WINDOW, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_FACTOR_LIST: list[int] = _FACTORS.tolist()
_IDS: Words = np.arange(1, VOCAB_SIZE + 1, dtype=np.uint64) * np.uint64(_ONES)


def layout() -> KvLayout:
    """8 bytes per layer and token."""
    return KvLayout(NUM_LAYERS, 1, 1, PAGE_TOKENS, "float32", "simulated")


def card() -> ModelCard:
    """Of the one model there is."""
    return ModelCard("fake", VOCAB_SIZE, WINDOW, (), "fake", layout(), exact=True)


class FakeCache:
    """As engine.kv_cache.KvCache; new pages hold rubbish."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.layout = layout()
        shape = (num_pages, NUM_LAYERS, PAGE_TOKENS)
        self.words: Words = np.full(shape, 0xDEADBEEF, dtype=np.uint64)
        self.pages = torch.zeros(0)  # has a device

    def read_pages(self, page_ids: Sequence[int], out: torch.Tensor, layers: range | None = None) -> int:
        """See KvCache."""
        layers = layers if layers is not None else range(NUM_LAYERS)
        found = np.ascontiguousarray(self.words[list(page_ids), layers.start : layers.stop])
        out.numpy()[: found.nbytes] = found.view(np.uint8).reshape(-1)
        return found.nbytes

    def write_pages(self, page_ids: Sequence[int], src: torch.Tensor, layers: range | None = None) -> None:
        """See KvCache."""
        layers = layers if layers is not None else range(NUM_LAYERS)
        num_bytes = len(page_ids) * len(layers) * PAGE_TOKENS * 8
        payload = np.frombuffer(src.numpy()[:num_bytes].tobytes(), dtype=np.uint64)
        self.words[list(page_ids), layers.start : layers.stop] = payload.reshape(-1, len(layers), PAGE_TOKENS)


class FakeRunner:
    """As engine.runner.Runner."""

    def __init__(self, cache: FakeCache) -> None:
        self.cache = cache
        self.progress = 0

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """See Runner."""
        forward = self.start(chunks)
        forward.advance(NUM_LAYERS)
        return forward.logits()

    def start(self, chunks: Sequence[Chunk]) -> "FakeForward":
        """See Runner."""
        for chunk in chunks:
            end = chunk.start + len(chunk.token_ids)
            assert 0 <= chunk.start < end <= WINDOW
            assert 0 <= min(chunk.token_ids) <= max(chunk.token_ids) < VOCAB_SIZE
            assert len(chunk.page_ids) * PAGE_TOKENS >= end, f"{len(chunk.page_ids)} pages do not hold {end} tokens"
        return FakeForward(self, chunks)


class FakeForward:
    """As engine.runner.Forward."""

    def __init__(self, runner: FakeRunner, chunks: Sequence[Chunk]) -> None:
        self.num_layers = 0
        self._runner = runner
        self._rows = [(chunk, [_mix(token_id + 1) for token_id in chunk.token_ids]) for chunk in chunks]

    @property
    def is_complete(self) -> bool:
        """See Forward."""
        return self.num_layers == NUM_LAYERS

    def advance(self, num_layers: int) -> None:
        """See Forward."""
        for layer in range(self.num_layers, min(self.num_layers + num_layers, NUM_LAYERS)):
            for chunk, hidden in self._rows:
                _compute(self._runner.cache.words, layer, chunk, hidden)
            self.num_layers += 1
            self._runner.progress += 1

    def logits(self) -> torch.Tensor:
        """See Forward."""
        assert self.is_complete
        rows = [_logits(hidden[-1]) for chunk, hidden in self._rows if chunk.sample]
        return torch.from_numpy(np.stack(rows) if rows else np.zeros((0, VOCAB_SIZE), np.float32))


def _compute(words: Words, layer: int, chunk: Chunk, hidden: list[int]) -> None:
    """One layer of a chunk: writes its KV, and replaces `hidden` by what it makes of all KV up to each position."""
    num_pages = -(-(chunk.start + len(hidden)) // PAGE_TOKENS)
    page_ids = list(chunk.page_ids[:num_pages])
    lies = words[page_ids, layer].reshape(-1)
    seen = int((lies[: chunk.start] * _FACTORS[: chunk.start]).sum()) if chunk.start else 0
    for place, below in enumerate(hidden):
        position = chunk.start + place
        kv = _mix(below + layer + (position << 8))
        lies[position] = kv
        seen = (seen + kv * _FACTOR_LIST[position]) & _MASK
        hidden[place] = _mix(below ^ seen)
    first = chunk.start // PAGE_TOKENS
    words[page_ids[first:], layer] = lies.reshape(-1, PAGE_TOKENS)[first:]


def _mix(word: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    word = ((word ^ (word >> 30)) * _MIX_1) & _MASK
    word = ((word ^ (word >> 27)) * _MIX_2) & _MASK
    return word ^ (word >> 31)


def _logits(hidden: int) -> NDArray[np.float32]:
    """fp32 [vocab], between -4 and 4."""
    words = _IDS + np.uint64(hidden)
    words ^= words >> np.uint64(30)
    words *= np.uint64(_MIX_1)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_MIX_2)
    return ((words >> np.uint64(40)).astype(np.float32) * np.float32(2**-21) - 4).astype(np.float32)


@dataclass(frozen=True)
class FakeEngine:
    """The parts of an Engine."""

    cache: FakeCache
    runner: FakeRunner

    @classmethod
    def with_pages(cls, num_pages: int) -> "FakeEngine":
        """An engine of its own."""
        cache = FakeCache(num_pages)
        return cls(cache, FakeRunner(cache))

    def as_engine(self) -> Engine:
        """For the workers."""
        return Engine(card(), cast(Any, self.runner), cast(Any, self.cache))


def undisturbed(work: WorkRequest) -> list[Token]:
    """What the request's answer must be: one engine, one sequence, nobody else."""
    engine = FakeEngine.with_pages(WINDOW // PAGE_TOKENS)
    page_ids = range(WINDOW // PAGE_TOKENS)
    chunk = Chunk(work.token_ids, 0, page_ids, sample=True)
    tokens: list[Token] = []
    while not (tokens and tokens[-1].finish):
        step = Step(work, work.num_emitted + len(tokens))
        tokens += sample(engine.runner.run([chunk]), [step])
        chunk = Chunk([tokens[-1].token_id], step.position, page_ids, sample=True)
    return tokens
