"""Our greedy tokens beside those of transformers, in fp32: design section 5, "Parity".

Our engine decodes prompts in batches, their prefill cut into chunks; the reference then reads each whole text once. Its
best token at every position must be ours, which by induction is what its own greedy generation would give. Where its
two best logits are closer than `TIE` either choice is right: the comparison goes on with our token, and the case is
counted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.batch import Chunk
from engine.load import Engine

TIE = 1e-4
MAX_TIE_SHARE = 1e-4
MAX_LOGPROB_DIFFERENCE = 1e-3
CHUNK = 64  # tokens of a prompt in a forward
NUM_CANDIDATES = 20  # whose log-probabilities are compared

# Around pages of 16 tokens, chunks and attention blocks of 64, and the windows of the toy families.
LENGTHS = (1, 2, 15, 16, 17, 23, 25, 33, 41, 51, 63, 64, 65, 127, 129, 330)


@dataclass(frozen=True)
class Score:
    """What a comparison found."""

    num_prompts: int = 0
    num_tokens: int = 0
    num_ties: int = 0  # near-ties of the reference that went the other way
    num_wrong: int = 0  # other differences
    logprob_difference: float = 0.0  # the largest, among the best candidates of the reference

    def __add__(self, other: "Score") -> "Score":
        return Score(
            self.num_prompts + other.num_prompts,
            self.num_tokens + other.num_tokens,
            self.num_ties + other.num_ties,
            self.num_wrong + other.num_wrong,
            max(self.logprob_difference, other.logprob_difference),
        )

    @property
    def holds(self) -> bool:
        """Whether this is parity; one near-tie is allowed to a short run."""
        few = self.num_ties <= max(1, self.num_tokens * MAX_TIE_SHARE)
        return few and self.num_wrong == 0 and self.logprob_difference <= MAX_LOGPROB_DIFFERENCE


def reference_of(folder: Path) -> Any:
    """The model as transformers loads it; refuses one that it would fill up with random weights."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def random_prompts(vocab_size: int, lengths: Sequence[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def compare(engine: Engine, reference: Any, prompts: Sequence[Sequence[int]], count: int) -> Score:
    """All prompts as one batch, `count` tokens after each."""
    score = Score()
    for prompt, (token_ids, logits) in zip(prompts, greedy(engine, prompts, count), strict=True):
        score += _compare_text(reference, token_ids, len(prompt), logits)
    return score


def greedy(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> list[tuple[list[int], Tensor]]:
    """Each prompt with `count` more tokens, and the logits [count, vocab] that they were taken from."""
    texts, rows = [list(prompt) for prompt in prompts], [list[Tensor]() for _ in prompts]
    num_pages = engine.cache.layout.pages_for(max(map(len, prompts)) + count)
    starts = [0] * len(prompts)
    while any(len(own) < count for own in rows):
        running = [index for index, own in enumerate(rows) if len(own) < count]
        chunks = [_next_chunk(texts[i], starts[i], range(i * num_pages, (i + 1) * num_pages)) for i in running]
        logits = iter(engine.runner.run(chunks))
        for index, chunk in zip(running, chunks, strict=True):
            starts[index] += len(chunk.token_ids)
            if chunk.sample:
                rows[index].append(next(logits))
                texts[index].append(int(rows[index][-1].argmax()))
    return [(text, torch.stack(own)) for text, own in zip(texts, rows, strict=True)]


def _next_chunk(text: list[int], start: int, page_ids: Sequence[int]) -> Chunk:
    end = min(start + CHUNK, len(text))
    return Chunk(text[start:end], start, page_ids, sample=end == len(text))


@torch.inference_mode()
def _compare_text(reference: Any, token_ids: list[int], num_prompt: int, logits: Tensor) -> Score:
    expected = reference(torch.tensor([token_ids[:-1]]), logits_to_keep=len(logits)).logits[0]
    best = expected.topk(2).values
    differs = expected.argmax(-1) != torch.tensor(token_ids[num_prompt:])
    is_tie = best[:, 0] - best[:, 1] < TIE
    top = expected.topk(min(NUM_CANDIDATES, expected.shape[1])).indices
    difference = logits.log_softmax(-1).gather(1, top) - expected.log_softmax(-1).gather(1, top)
    ties, wrong = int((differs & is_tie).sum()), int((differs & ~is_tie).sum())
    return Score(1, len(logits), ties, wrong, float(difference.abs().max()))


def batches(prompts: Sequence[list[int]], size: int) -> Iterator[Sequence[list[int]]]:
    """Up to `size` of them at a time."""
    for first in range(0, len(prompts), size):
        yield prompts[first : first + size]
