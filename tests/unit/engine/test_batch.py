"""Laying chunks side by side."""

import pytest
import torch

from engine.batch import Chunk, build_batch

CPU = torch.device("cpu")


def test_rows_of_all_chunks_lie_behind_one_another() -> None:
    batch = build_batch([Chunk([7, 8, 9], 30, [4, 2, 6], True), Chunk([5], 0, [1], True)], CPU)
    assert batch.token_ids.tolist() == [7, 8, 9, 5]
    assert batch.positions.tolist() == [30, 31, 32, 0]
    assert batch.row_starts.tolist() == [0, 3, 4]
    assert batch.page_table.tolist() == [[4, 2, 6], [1, 0, 0]]
    assert (batch.num_rows, batch.num_sequences) == (4, 2)


def test_only_sampled_chunks_ask_for_logits() -> None:
    chunks = [Chunk([1, 2], 0, [0], False), Chunk([3, 4, 5], 0, [1], True), Chunk([6], 9, [2], True)]
    assert build_batch(chunks, CPU).sampled_rows.tolist() == [4, 5]
    assert build_batch(chunks[:1], CPU).sampled_rows.tolist() == []


def test_dtypes_are_what_the_kernels_read() -> None:
    batch = build_batch([Chunk([1], 0, [0], True)], CPU)
    assert batch.token_ids.dtype == batch.sampled_rows.dtype == torch.int64
    assert batch.positions.dtype == batch.row_starts.dtype == batch.page_table.dtype == torch.int32


@pytest.mark.parametrize("chunks", [[], [Chunk([], 0, [0], True)]])
def test_nothing_to_do_is_an_error(chunks: list[Chunk]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        build_batch(chunks, CPU)
