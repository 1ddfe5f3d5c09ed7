"""Both ends of links, noted by their hosts: to count their slots, and to compare `pushed` with what landed."""

import asyncio
from collections import Counter
from collections.abc import Awaitable
from typing import Any

from pdserve.handover import PageRun
from prefill_worker.commands import StepUpdate
from tests.chaos.simulation.virtual_loop import HOST
from transport.base import SendSlot
from transport.receive import DecodeLink
from transport.send import PrefillLink


class WatchedDecodeLink(DecodeLink):
    """Decode's end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if host := HOST.get():
            host.links.append(self)


class WatchedPrefillLink(PrefillLink):
    """Prefill's end: knows how many payloads of each ticket are on their way."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.flying: Counter[int] = Counter()

    def push(self, slot: SendSlot, num_bytes: int, meta: bytes) -> Awaitable[bool]:
        counter, known = PageRun.unpack(meta).counter, set(self._pushes)
        awaitable = super().push(slot, num_bytes, meta)
        (seq,) = self._pushes.keys() - known
        self.flying[counter] += 1
        self._pushes[seq].landed.add_done_callback(lambda landed: self._landed(counter, landed))
        return awaitable

    def _landed(self, counter: int, landed: "asyncio.Future[bool]") -> None:
        if not landed.exception():
            self.flying[counter] -= 1


def said_too_early(update: StepUpdate) -> list[str]:
    """Tickets of which `pushed` is said while a payload is on its way: allowed where the first token was the last."""
    if any(sampled.token.finish for sampled in update.sampled):
        return []
    ends = [(ended.link, PageRun.unpack(ended.meta).counter) for ended in update.ended if not ended.aborted]
    return [
        f"ticket {counter} is said to be pushed, and {link.flying[counter]} payloads are on their way"
        for link, counter in ends
        if isinstance(link, WatchedPrefillLink) and link.is_up and link.flying[counter]
    ]
