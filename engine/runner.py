"""One forward pass: chunks of sequences go in, logits come out, and their K and V are in the pages.

`progress` grows by one per layer. Another thread reads it to tell a slow forward from a stuck one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import Chunk, build_batch
from engine.kv_cache import KvCache
from engine.model import Model


class Runner:
    """A model together with the pages that it works on. One thread at a time may run it."""

    def __init__(self, model: Model, cache: KvCache) -> None:
        self.progress = 0
        self.model = model
        self.cache = cache

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """fp32 [R, vocab]: a row for each chunk that wants one, in their order. Workers give only what is in range."""
        for chunk in chunks:
            self._check(chunk)
        batch = build_batch(chunks, self.cache.pages.device)
        hidden = self.model.embed(batch)
        for layer in self.model.layers:
            hidden = layer(hidden, batch, self.cache)
            self.progress += 1
        return self.model.logits(hidden, batch)

    def _check(self, chunk: Chunk) -> None:
        """A wrong number here would read or write foreign memory, so it is better to stop."""
        end, config = chunk.start + len(chunk.token_ids), self.model.config
        assert 0 <= chunk.start < end <= config.window, f"positions {chunk.start}..{end} of window {config.window}"
        assert 0 <= min(chunk.token_ids) <= max(chunk.token_ids) < config.vocab_size, "token id outside the vocabulary"
        pages = chunk.page_ids[: self.cache.layout.pages_for(end)]
        assert len(pages) == self.cache.layout.pages_for(end), f"{len(pages)} pages do not hold {end} tokens"
        assert 0 <= min(pages) <= max(pages) < self.cache.num_pages, "page outside the cache"
