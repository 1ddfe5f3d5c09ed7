"""Payloads of a ticket land in one order, and in no other."""

import pytest

from decode_worker.landing import Landing
from pdserve.errors import ProtocolError
from pdserve.handover import PageRun


def landing(*so_far: tuple[int, int, int, int], cached: int = 0) -> Landing:
    """A prompt of 5 pages of 4 layers."""
    landing = Landing(num_pages=5, num_layers=4, num_landed=cached)
    for run in so_far:
        landing.advance(PageRun(1, *run))
    return landing


def test_blocks_of_pages_and_layers_from_0_upwards() -> None:
    steps = [((0, 2, 0, 1), 0), ((0, 2, 1, 3), 2), ((2, 1, 0, 4), 3), ((3, 2, 0, 2), 3), ((3, 2, 2, 2), 5)]
    so_far = landing()
    for run, num_landed in steps:
        assert not so_far.is_complete
        assert so_far.advance(PageRun(1, *run)) == (run[2] == 0)
        assert so_far.num_landed == num_landed
    assert so_far.is_complete


def test_cached_pages_have_landed_already() -> None:
    so_far = landing(cached=3)
    with pytest.raises(ProtocolError, match="page 3, layer 0 was expected"):
        so_far.advance(PageRun(1, 0, 5, 0, 4))
    so_far.advance(PageRun(1, 3, 2, 0, 4))
    assert so_far.is_complete


@pytest.mark.parametrize(
    ("so_far", "run"),
    [
        ([], (1, 1, 0, 4)),  # a page was left out
        ([], (0, 6, 0, 4)),  # more pages than the prompt has
        ([], (0, 0, 0, 4)),  # no page at all
        ([], (0, 1, 1, 3)),  # a layer was left out
        ([], (0, 1, 0, 5)),  # more layers than a page has
        ([], (0, 1, 0, 0)),  # no layer at all
        ([(0, 2, 0, 2)], (0, 2, 0, 2)),  # again
        ([(0, 2, 0, 2)], (0, 2, 1, 3)),  # overlaps
        ([(0, 2, 0, 2)], (0, 2, 3, 1)),  # a layer was left out within the block
        ([(0, 2, 0, 2)], (0, 2, 2, 3)),  # more layers than are left
        ([(0, 2, 0, 2)], (0, 1, 2, 2)),  # fewer pages than the block
        ([(0, 2, 0, 2)], (0, 3, 2, 2)),  # more pages than the block
        ([(0, 2, 0, 2)], (2, 2, 0, 2)),  # the next block, too early
        ([(0, 2, 0, 4)], (0, 2, 0, 4)),  # a block again
        ([(0, 2, 0, 4)], (2, 4, 0, 4)),  # beyond the prompt
        ([(0, 5, 0, 4)], (5, 1, 0, 4)),  # after the end
    ],
)
def test_what_does_not_come_next_is_refused(so_far: list[tuple[int, int, int, int]], run: tuple[int, ...]) -> None:
    before = landing(*so_far)
    with pytest.raises(ProtocolError):
        before.advance(PageRun(1, *run))
    assert vars(before) == vars(landing(*so_far)), "nothing has changed"
