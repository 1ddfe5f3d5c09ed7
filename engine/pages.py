"""The ledger of KV pages: plain counting, no tensors.

A page is free or in use by one holder. `promised` counts pages that tickets may still take, so that a promise can
always be kept. Always: free + in use = total, and free >= promised.
"""

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
        self._holders: dict[int, object] = {}
        self._promised = 0

    @property
    def available(self) -> int:
        """Pages that are neither in use nor promised."""
        return len(self._free) - self._promised

    def promise(self, num_pages: int) -> None:
        """Keep room for `num_pages` later calls of `take_promised`. Raises NoCapacity with the numbers."""
        if num_pages > self.available:
            raise NoCapacity(f"{num_pages} KV pages wanted, {self.available} of {self._total} available")
        self._promised += num_pages

    def unpromise(self, num_pages: int) -> None:
        """Give a promise back."""
        assert 0 <= num_pages <= self._promised
        self._promised -= num_pages

    def take_promised(self, num_pages: int, holder: object) -> list[int]:
        """Take pages that were promised before: cannot fail."""
        self.unpromise(num_pages)
        return self._take(num_pages, holder)

    def take(self, num_pages: int, holder: object) -> list[int]:
        """Take pages that nobody was promised. Raises NoCapacity with the numbers."""
        self.promise(num_pages)
        return self.take_promised(num_pages, holder)

    def _take(self, num_pages: int, holder: object) -> list[int]:
        page_ids = [self._free.pop() for _ in range(num_pages)]
        self._holders.update((page_id, holder) for page_id in page_ids)
        return page_ids

    def give_back(self, page_ids: list[int], holder: object) -> None:
        """Free pages. Giving back what one does not hold is a bug of ours."""
        for page_id in page_ids:
            held_by = self._holders.pop(page_id)
            assert held_by == holder, f"page {page_id} is not held by {holder}"
            self._free.append(page_id)

    def counts(self) -> PageCounts:
        """The ledger in numbers."""
        return PageCounts(self._total, len(self._free), 0, len(self._holders), self._promised)

    def check(self) -> None:
        """Assert the invariants that cost nothing: after every step."""
        assert len(self._free) + len(self._holders) == self._total
        assert 0 <= self._promised <= len(self._free)
