"""The ledger: promises are kept, pages are given back once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pages import PagePool
from pdserve.errors import NoCapacity


def test_promises_are_kept_and_limit_others() -> None:
    pool = PagePool(4)
    pool.promise(3)
    assert pool.available == 1
    with pytest.raises(NoCapacity, match="2 KV pages wanted, 1 of 4 available"):
        pool.take(2, "other")
    taken = pool.take_promised(3, "mine")
    assert len(set(taken)) == 3
    pool.give_back(taken, "mine")
    assert pool.counts().free == 4
    assert pool.counts().promised == 0


def test_a_page_is_freed_once_and_by_its_holder() -> None:
    pool = PagePool(2)
    pages = pool.take(1, "a")
    with pytest.raises(AssertionError):
        pool.give_back(pages, "b")
    pool = PagePool(2)
    pages = pool.take(1, "a")
    pool.give_back(pages, "a")
    with pytest.raises(KeyError):
        pool.give_back(pages, "a")


@given(
    st.lists(
        st.tuples(st.sampled_from(["promise", "take", "take_promised", "give_back", "unpromise"]), st.integers(0, 5))
    )
)
def test_invariants_hold_whatever_happens(actions: list[tuple[str, int]]) -> None:
    pool, held, promised = PagePool(8), [], 0
    for action, count in actions:
        try:
            if action == "promise":
                pool.promise(count)
                promised += count
            elif action == "take":
                held.append(pool.take(count, "holder"))
            elif action == "take_promised":
                held.append(pool.take_promised(min(count, promised), "holder"))
                promised -= min(count, promised)
            elif action == "unpromise":
                pool.unpromise(min(count, promised))
                promised -= min(count, promised)
            elif held:
                pool.give_back(held.pop(), "holder")
        except NoCapacity:
            assert count > pool.available
        pool.check()
    assert pool.counts().in_use == sum(len(pages) for pages in held)
    assert pool.counts().promised == promised
