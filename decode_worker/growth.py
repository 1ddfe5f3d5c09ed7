"""How much room a ticket is promised, and who gives way when there is none left. Plain counting.

Room is promised for the next `BLOCK_TOKENS` tokens and, when they are used up, for as many again. Where the pool has
nothing left, the youngest ticket gives way. It is resumed with a promise of the whole and never asked again, so every
request gives way at most once. The oldest of all never does: where everybody else was promised the whole, it sits out.
Nothing is admitted meanwhile, and the others need no more than they have, so they end and their pages come back.
"""

from collections.abc import Sequence

from decode_worker.entry import Entry
from engine.pages import PagePool
from pdserve.model_card import KvLayout
from pdserve.request import WorkRequest

BLOCK_TOKENS = 64
_WATERMARK = 50  # new work leaves one page in so many, at least one, to what runs and may grow


def wanted_pages(layout: KvLayout, request: WorkRequest, position: int, *, whole: bool) -> int:
    """Pages for the tokens up to `position` and the next block of them, or all that may come."""
    end = request.max_length - 1  # the last token's KV is never needed
    if not whole:
        end = min(end, position + BLOCK_TOKENS)
    return layout.pages_for(end)


def watermark(num_pages: int) -> int:
    """Pages that new work must leave available, in a pool of so many."""
    return max(1, num_pages // _WATERMARK)


def make_room(entry: Entry, pool: PagePool, layout: KvLayout) -> bool:
    """Take a page when the newest token begins one, from the promise or from a further one; False: there is none."""
    if entry.position // layout.page_tokens < len(entry.page_ids):
        return True
    if not entry.num_promised:
        wanted = wanted_pages(layout, entry.request, entry.position, whole=False) - len(entry.page_ids)
        entry.num_promised = min(wanted, pool.available)
        pool.promise(entry.num_promised)
    entry.sits_out = not entry.num_promised
    if not entry.sits_out:
        take(entry, 1, pool)
    return not entry.sits_out


def take(entry: Entry, num_pages: int, pool: PagePool) -> None:
    """Pages from the promise."""
    entry.page_ids += pool.take_promised(num_pages, entry.counter)
    entry.num_promised -= num_pages


def victim(oldest_first: Sequence[Entry]) -> Entry | None:
    """Who gives way: the youngest that was not promised the whole, but never the oldest of all."""
    younger = reversed(oldest_first[1:])
    return next((entry for entry in younger if not entry.asked.whole), None)
