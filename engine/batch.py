"""What one forward pass works on.

The scheduler gives chunks (some tokens of one sequence each: a piece of a prompt, or the one token of a decode step).
`build_batch` lays them side by side as rows; the model, attention and the KV cache read the same `Batch`. It lives for
one forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence."""

    token_ids: Sequence[int]  # at least one
    start: int  # absolute position of the first of them
    page_ids: Sequence[int]  # pages of the whole sequence from position 0; more than needed is fine
    sample: bool  # whether the logits after the last token are wanted


@dataclass(frozen=True)
class Batch:
    """Rows of all sequences behind one another; the rows of a sequence have consecutive positions."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int32 [T], absolute
    row_starts: Tensor  # int32 [S + 1]: the rows of sequence s are row_starts[s] up to row_starts[s + 1]
    page_table: Tensor  # int32 [S, max_pages], padded with 0
    sampled_rows: Tensor  # int64 [R]: rows whose logits are wanted
    longest_chunk: int  # rows of a sequence, at most
    longest_context: int  # of the last row of a sequence: its position + 1, at most

    @property
    def num_rows(self) -> int:
        """T."""
        return self.token_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.page_table.shape[0]


def build_batch(chunks: Sequence[Chunk], device: torch.device) -> Batch:
    """Lay the chunks side by side. Raises ValueError when there is none, or one without tokens."""
    if not chunks or not all(chunk.token_ids for chunk in chunks):
        raise ValueError("a batch needs at least one chunk, and every chunk at least one token")
    row_starts = [0]
    for chunk in chunks:
        row_starts.append(row_starts[-1] + len(chunk.token_ids))
    positions = [chunk.start + i for chunk in chunks for i in range(len(chunk.token_ids))]
    sampled = [end - 1 for chunk, end in zip(chunks, row_starts[1:], strict=True) if chunk.sample]
    return Batch(
        token_ids=torch.tensor([token for chunk in chunks for token in chunk.token_ids], dtype=torch.int64).to(device),
        positions=torch.tensor(positions, dtype=torch.int32).to(device),
        row_starts=torch.tensor(row_starts, dtype=torch.int32).to(device),
        page_table=_page_table(chunks, multiple=16 if device.type == "cuda" else 1).to(device),
        sampled_rows=torch.tensor(sampled, dtype=torch.int64).to(device),
        longest_chunk=max(len(chunk.token_ids) for chunk in chunks),
        longest_context=max(chunk.start + len(chunk.token_ids) for chunk in chunks),
    )


def _page_table(chunks: Sequence[Chunk], multiple: int) -> Tensor:
    """As wide as a multiple: Triton compiles anew for a width that is none of 16."""
    width = max(1, *(len(chunk.page_ids) for chunk in chunks), 1)
    width = -(-width // multiple) * multiple
    rows = [list(chunk.page_ids) + [0] * (width - len(chunk.page_ids)) for chunk in chunks]
    return torch.tensor(rows, dtype=torch.int32)
