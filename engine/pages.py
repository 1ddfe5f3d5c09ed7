"""The ledger of KV pages: plain counting, no tensors.

A page is free, cached or in use. In use: it has holders, several when they share a prefix. Cached: it has none, but its
content is known by the hash of all tokens up to its end, and it is found again until its memory is needed, the least
recently used first.

    free ──take──> in use ──publish(hash)──> in use, findable ──give_back by the last holder──> cached ──evicted──> free
                                                   └──<──────────────── reserve(hashes) ─────────────┘

`promised` counts pages that may still be taken, so that a promise can always be kept. Always: free + cached + in use =
total, and free + cached >= promised.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from pdserve.errors import NoCapacity


@dataclass(frozen=True)
class PageCounts:
    """The ledger in numbers."""

    total: int
    free: int
    cached: int
    in_use: int
    promised: int


class PagePool:
    """Gives out page ids and takes them back."""

    def __init__(self, num_pages: int) -> None:
        self._total = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders: dict[int, list[Hashable]] = {}
        self._cached: dict[int, None] = {}  # the least recently used first
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._promised = 0

    @property
    def available(self) -> int:
        """Pages that are neither in use nor promised."""
        return len(self._free) + len(self._cached) - self._promised

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The pages of the longest known prefix."""
        page_ids = []
        for page_hash in hashes:
            if (page_id := self._page_of.get(page_hash)) is None:
                break
            page_ids.append(page_id)
        return page_ids

    def reserve(self, hashes: Sequence[bytes], num_pages: int, holder: Hashable) -> list[int]:
        """Pin the known prefix and promise the rest of `num_pages`; returns the pinned pages.

        Raises NoCapacity with the numbers, and then nothing has changed.
        """
        pinned = self.find(hashes)
        num_idle = sum(page_id in self._cached for page_id in pinned)
        self.promise(num_pages - len(pinned) + num_idle)
        self.unpromise(num_idle)
        for page_id in pinned:
            self._cached.pop(page_id, None)
            self._holders.setdefault(page_id, []).append(holder)
        return pinned

    def promise(self, num_pages: int) -> None:
        """Keep room for `num_pages` later calls of `take_promised`. Raises NoCapacity with the numbers."""
        if num_pages > self.available:
            raise NoCapacity(f"{num_pages} KV pages wanted, {self.available} of {self._total} available")
        self._promised += num_pages

    def unpromise(self, num_pages: int) -> None:
        """Give a promise back."""
        assert 0 <= num_pages <= self._promised
        self._promised -= num_pages

    def take_promised(self, num_pages: int, holder: Hashable) -> list[int]:
        """Take pages that were promised before: cannot fail."""
        self.unpromise(num_pages)
        page_ids = [self._free.pop() if self._free else self._evict() for _ in range(num_pages)]
        self._holders.update((page_id, [holder]) for page_id in page_ids)
        return page_ids

    def take(self, num_pages: int, holder: Hashable) -> list[int]:
        """Take pages that nobody was promised. Raises NoCapacity with the numbers."""
        self.promise(num_pages)
        return self.take_promised(num_pages, holder)

    def _evict(self) -> int:
        page_id = next(iter(self._cached))
        del self._cached[page_id]
        del self._page_of[self._hash_of.pop(page_id)]
        return page_id

    def publish(self, page_id: int, page_hash: bytes) -> None:
        """A page in use is complete, and will not change: others may find it. The first of equal pages stays."""
        assert page_id in self._holders, f"page {page_id} is not in use"
        if page_hash not in self._page_of and page_id not in self._hash_of:
            self._page_of[page_hash] = page_id
            self._hash_of[page_id] = page_hash

    def give_back(self, page_ids: Sequence[int], holder: Hashable) -> None:
        """Stop holding pages. Giving back what one does not hold is a bug of ours."""
        for page_id in reversed(page_ids):  # of a prefix the last page is the first to be evicted
            holders = self._holders[page_id]
            assert holder in holders, f"page {page_id} is not held by {holder}"
            holders.remove(holder)
            if not holders:
                self._retire(page_id)

    def _retire(self, page_id: int) -> None:
        del self._holders[page_id]
        if page_id in self._hash_of:
            self._cached[page_id] = None
        else:
            self._free.append(page_id)

    def counts(self) -> PageCounts:
        """The ledger in numbers; from any thread."""
        return PageCounts(self._total, len(self._free), len(self._cached), len(self._holders), self._promised)

    def check(self) -> None:
        """Assert the invariants that cost nothing: after every step."""
        assert len(self._free) + len(self._cached) + len(self._holders) == self._total
        assert 0 <= self._promised <= len(self._free) + len(self._cached)

    def audit(self, references: Sequence[tuple[Hashable, Sequence[int]]], num_promised: int) -> list[str]:
        """Every way in which the ledger disagrees with itself, or with what the holders say they hold."""
        held = sorted((page_id, holder) for page_id, holders in self._holders.items() for holder in holders)
        said = sorted((page_id, holder) for holder, page_ids in references for page_id in page_ids)
        everywhere = sorted([*self._free, *self._cached, *self._holders])
        known = sorted((page_id, page_hash) for page_hash, page_id in self._page_of.items())
        checks = {
            "a page is free, cached or in use": everywhere == list(range(self._total)),
            "every page in use has a holder": all(self._holders.values()),
            "references = holders": held == said,
            f"promised: {self._promised} here, {num_promised} by tickets": self._promised == num_promised,
            "promises can be kept": 0 <= self._promised <= len(self._free) + len(self._cached),
            "cached pages can be found": known == sorted(self._hash_of.items())
            and self._cached.keys() <= self._hash_of.keys(),
        }
        return [f"does not hold: {rule}" for rule, holds in checks.items() if not holds]
