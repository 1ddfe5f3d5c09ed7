"""Hashes of pages: chained, whole pages only, and never the whole prompt."""

import pytest

from pdserve.prefix import ROOT, page_hash, prompt_hashes


@pytest.mark.parametrize(("length", "pages"), [(1, 0), (15, 0), (16, 0), (17, 1), (32, 1), (33, 2), (49, 3)])
def test_whole_pages_that_leave_a_token_to_compute(length: int, pages: int) -> None:
    assert len(prompt_hashes(range(length), 16)) == pages


def test_a_hash_covers_everything_before() -> None:
    one, other = prompt_hashes([*range(40)], 16), prompt_hashes([9, *range(1, 40)], 16)
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert prompt_hashes([*range(33)], 16) == one
    assert one[1] == page_hash(page_hash(ROOT, range(16)), range(16, 32))


def test_borders_between_ids_count() -> None:
    assert page_hash(ROOT, [1, 256]) != page_hash(ROOT, [256, 1])
    assert page_hash(ROOT, [65536, 0]) != page_hash(ROOT, [0, 1])
