"""Does this machine keep the promise of path-invariance? Asked once at start-up, in bits.

The same prompt goes through the model whole, in chunks, and with its last tokens decoded one by one beside another
sequence. Pages and logits must be the same. It takes a few dozen small forwards, well under a second for small models,
and works on pages of its own. `ModelCard.exact` says what came out.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import Chunk
from engine.kv_cache import KvCache
from engine.model import Model
from engine.runner import Runner
from pdserve.model_card import KvLayout

_NUM_TOKENS = 40
_NUM_DECODED = 4
_CHUNK_ENDS = (1, 16)  # of the chunked path; the last chunk takes the rest


def is_path_invariant(model: Model, layout: KvLayout, device: torch.device) -> bool:
    """Whether all paths give the same bits for one random prompt."""
    check = _SelfTest(model, layout, device)
    whole = check.result([])
    chunked = check.result(_CHUNK_ENDS)
    decoded = check.result(range(check.num_tokens - _NUM_DECODED, check.num_tokens))
    return all(torch.equal(one, other) for path in (chunked, decoded) for one, other in zip(whole, path, strict=True))


class _SelfTest:
    """A random prompt. Its pieces share their batches with one token of a companion, as in continuous batching."""

    def __init__(self, model: Model, layout: KvLayout, device: torch.device) -> None:
        self._model = model
        self._layout = layout
        self._device = device
        self.num_tokens = min(_NUM_TOKENS, model.config.window)
        generator = torch.Generator().manual_seed(1)
        self._prompt = torch.randint(model.config.vocab_size, (self.num_tokens,), generator=generator).tolist()

    def result(self, cuts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Bits of the pages and of the last logits when the prompt is computed in pieces that end at these cuts."""
        pages_each = self._layout.pages_for(self.num_tokens)
        cache = KvCache(self._layout, 2 * pages_each, self._device)
        runner = Runner(self._model, cache)
        own, others = range(pages_each), range(pages_each, 2 * pages_each)
        start = 0
        for end in [*(end for end in cuts if 0 < end < self.num_tokens), self.num_tokens]:
            chunks = [Chunk(self._prompt[start:end], start, own, sample=True)]
            if start:  # first in the batch, so that the rows of the prompt move
                chunks.insert(0, Chunk(self._prompt[:1], start, others, sample=True))
            logits = runner.run(chunks)
            start = end
        pages = torch.empty(pages_each * self._layout.page_bytes, dtype=torch.uint8, device=self._device)
        cache.read_pages(own, pages)
        return pages, logits[-1].view(torch.int32)
