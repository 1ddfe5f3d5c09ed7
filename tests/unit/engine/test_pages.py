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


HASHES = [bytes([n]) * 16 for n in range(8)]


def _published(pool: PagePool, num_pages: int, holder: str) -> list[int]:
    page_ids = pool.take(num_pages, holder)
    for page_id, page_hash in zip(page_ids, HASHES, strict=False):
        pool.publish(page_id, page_hash)
    return page_ids


def test_a_published_page_is_found_shared_and_kept_after_its_last_holder() -> None:
    pool = PagePool(6)
    page_ids = _published(pool, 3, "a")
    assert pool.reserve(HASHES[:4], 5, "b") == page_ids
    assert (pool.counts().in_use, pool.counts().promised) == (3, 2)
    pool.give_back(page_ids, "a")
    assert pool.counts().cached == 0
    pool.give_back(page_ids, "b")
    pool.unpromise(2)
    assert (pool.counts().free, pool.counts().cached) == (3, 3)
    assert pool.find([HASHES[0], HASHES[7], HASHES[1]]) == page_ids[:1]
    assert pool.audit([], 0) == []


def test_memory_comes_from_the_least_recently_used_and_of_a_prefix_from_its_end() -> None:
    pool = PagePool(4)
    first = _published(pool, 2, "a")
    pool.give_back(first, "a")
    other = pool.take(2, "b")
    pool.publish(other[0], HASHES[5])
    pool.give_back(other, "b")
    assert pool.reserve(HASHES[:1], 1, "c") == first[:1]  # used again: now the youngest
    pool.give_back(first[:1], "c")
    pool.take(2, "d")  # the free page, then the end of the first prefix
    assert pool.find(HASHES[:2]) == first[:1]
    assert pool.find(HASHES[5:6]) == other[:1]
    pool.take(1, "d")
    assert pool.find(HASHES[5:6]) == []


def test_a_promise_that_needs_cached_pages_is_kept_from_whoever_pins_them() -> None:
    pool = PagePool(4)
    page_ids = _published(pool, 3, "a")
    pool.give_back(page_ids, "a")
    pool.promise(2)
    with pytest.raises(NoCapacity):
        pool.reserve(HASHES[:3], 3, "b")  # pinning all three would leave one page for two promises
    assert pool.counts().cached == 3
    assert pool.reserve(HASHES[:2], 2, "b") == page_ids[:2]
    pool.check()


def test_an_audit_names_what_is_wrong() -> None:
    pool = PagePool(4)
    page_ids = pool.take(2, "a")
    pool.promise(1)
    assert pool.audit([("a", page_ids)], 1) == []
    assert pool.audit([("a", page_ids[:1])], 1) == ["does not hold: references = holders"]
    assert pool.audit([("a", page_ids)], 0) == ["does not hold: promised: 1 here, 0 by tickets"]
