"""An engine whose answers betray any wrong page.

Each (layer, position) has 8 bytes of KV: a hash of what the layer below made of the token, which itself depends on all
KV of that layer up to there *as it lies in the pages*. The logits hash the result of the last layer. So a page that is
stale, foreign, missing or in the wrong place changes every later token, and path-invariance is exact by construction:
integers modulo 2^64, where sums do not depend on batch or chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
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
_IDS: Words = np.arange(1, VOCAB_SIZE + 1, dtype=np.uint64)[None] * np.uint64(_ONES)
_NO_ROWS = np.zeros((0, VOCAB_SIZE), np.float32)


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
        self._rows = [_Row(chunk) for chunk in chunks]

    @property
    def num_ready(self) -> int:
        """See Forward."""
        return self.num_layers

    @property
    def is_complete(self) -> bool:
        """See Forward."""
        return self.num_layers == NUM_LAYERS

    def advance(self, num_layers: int) -> None:
        """See Forward."""
        for layer in range(self.num_layers, min(self.num_layers + num_layers, NUM_LAYERS)):
            for row in self._rows:
                row.compute(self._runner.cache.words[:, layer], layer)
            self.num_layers += 1
            self._runner.progress += 1

    def logits(self) -> torch.Tensor:
        """See Forward."""
        assert self.is_complete
        return _as_tensor([_logits(row.hidden[-1]) for row in self._rows if row.chunk.sample])


class _Row:
    """A chunk on its way through the layers."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.hidden = [_mix(token_id + 1) for token_id in chunk.token_ids]
        num_pages = -(-(chunk.start + len(self.hidden)) // PAGE_TOKENS)
        self._page_ids = np.array(chunk.page_ids[:num_pages])

    def compute(self, words: Words, layer: int) -> None:
        """One layer, whose KV is `words` [page, token]: writes KV, and replaces `hidden` by what it makes of all KV up
        to each position.
        """
        start, hidden = self.chunk.start, self.hidden
        lies = words[self._page_ids].reshape(-1)
        seen = int(lies[:start].dot(_FACTORS[:start]))  # modulo 2^64
        for position, below in enumerate(hidden, start):
            lies[position], seen, hidden[position - start] = _see(below, layer, position, seen)
        first = start // PAGE_TOKENS
        words[self._page_ids[first:]] = lies.reshape(-1, PAGE_TOKENS)[first:]


def _see(below: int, layer: int, position: int, seen: int) -> tuple[int, int, int]:
    """A layer at a position that has `seen` the KV before it: its own KV, what the next one sees, and what it makes."""
    kv = _mix(below + layer + (position << 8))
    seen = (seen + kv * _FACTOR_LIST[position]) & _MASK
    return kv, seen, _mix(below ^ seen)


def _mix(word: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    word = ((word ^ (word >> 30)) * _MIX_1) & _MASK
    word = ((word ^ (word >> 27)) * _MIX_2) & _MASK
    return word ^ (word >> 31)


@lru_cache(512)  # each token of the undisturbed answer is asked for again by the run
def _logits(hidden: int) -> NDArray[np.float32]:
    """fp32 [1, vocab], between -4 and 4; not to be written to."""
    words = _IDS + np.uint64(hidden)
    words ^= words >> np.uint64(30)
    words *= np.uint64(_MIX_1)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_MIX_2)
    return (words >> np.uint64(40)).astype(np.float32) * np.float32(2**-21) - np.float32(4)


def _as_tensor(rows: Sequence[NDArray[np.float32]]) -> torch.Tensor:
    """fp32 [R, vocab], a copy; R may be 0."""
    return torch.from_numpy(np.concatenate((_NO_ROWS, *rows)))


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
    """What the request's answer must be: one sequence, nobody else, and no pages at all."""
    sequence, token_ids = _Sequence(), work.token_ids
    tokens: list[Token] = []
    while not (tokens and tokens[-1].finish):
        logits = sequence.logits_after(token_ids)
        tokens += sample(logits, [Step(work, work.num_emitted + len(tokens))])
        token_ids = (tokens[-1].token_id,)
    return tokens


class _Sequence:
    """What the layers of the engine have seen of one sequence."""

    def __init__(self) -> None:
        self._length = 0
        self._seen = [0] * NUM_LAYERS

    def logits_after(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Append tokens; fp32 [1, vocab] for the one that follows."""
        word = 0
        for token_id in token_ids:
            word = _mix(token_id + 1)
            for layer, seen in enumerate(self._seen):
                _, self._seen[layer], word = _see(word, layer, self._length, seen)
            self._length += 1
        return _as_tensor([_logits(word)])
