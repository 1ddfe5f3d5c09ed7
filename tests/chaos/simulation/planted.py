"""Bugs that are planted on purpose, to see that the suite finds them: real classes, changed for the time of a block.

Where an audit would see the bug at once, it is blinded: the answers alone must betray it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from decode_worker.commands import Reserve
from decode_worker.tickets import TicketTable
from engine.pages import PagePool
from engine.sampler import Step
from pdserve.request import Incarnation, Ticket, WorkerId
from prefill_worker import worker as prefill
from prefill_worker.commands import PushEnded, StepUpdate
from prefill_worker.worker import PrefillWorker
from transport import receive
from transport.send import PrefillLink, PrefillLinks
from transport.slots import Slot


@contextmanager
def page_freed_too_early() -> Iterator[None]:
    """Prefill gives the pages of a prompt back when it is computed, not when its last payload is packed."""
    sample, free = PrefillWorker._sample, PrefillWorker._free

    def sample_and_free(self: PrefillWorker, current: Any, update: StepUpdate) -> None:
        sample(self, current, update)
        for prompt in (chunk.prompt for chunk in current.plan if chunk.is_last):
            page_ids = list(prompt.page_ids)
            free(self, prompt)
            prompt.page_ids = page_ids  # still read from

    def free_once(self: PrefillWorker, prompt: Any) -> None:
        if prompt.is_computed:
            prompt.page_ids = []
        else:
            free(self, prompt)

    with (
        patch.object(PrefillWorker, "_sample", sample_and_free),
        patch.object(PrefillWorker, "_free", free_once),
        patch.object(PagePool, "audit", lambda *_, **__: []),
    ):
        yield


@contextmanager
def old_attempt_accepted() -> Iterator[None]:
    """Tickets are named by their counter alone, and counters are used again."""
    reserve = TicketTable.reserve

    def reserve_again(self: TicketTable, asked: Reserve) -> Ticket:
        self._next_counter = next(counter for counter in range(1, 1000) if self.find(counter) is None)
        return reserve(self, asked)

    def any_link(self: PrefillLinks, worker: WorkerId, incarnation: Incarnation) -> PrefillLink:
        return self._links[worker]

    with patch.object(TicketTable, "reserve", reserve_again), patch.object(PrefillLinks, "link", any_link):
        yield


@contextmanager
def ready_before_the_slot_is_free() -> Iterator[None]:
    """Decode lets the next payload into a slot that its engine has not emptied yet."""

    class Hasty(receive.LandedSlot):
        def __init__(self, slot: Slot, num_bytes: int) -> None:
            super().__init__(slot, num_bytes)
            slot.give_back()

    with patch.object(receive, "LandedSlot", Hasty):
        yield


@contextmanager
def completion_counted_twice() -> Iterator[None]:
    """A payload that has landed counts for two: `pushed` comes while one is still on its way."""
    push_ended = PrefillWorker._push_ended

    def twice(self: PrefillWorker, ended: PushEnded, update: StepUpdate) -> None:
        call = self._calls.get(ended.call)
        if call is not None and call.outgoing is not None and call.outgoing.num_flying > 1:
            call.outgoing.num_flying -= 1
        push_ended(self, ended, update)

    with patch.object(PrefillWorker, "_push_ended", twice):
        yield


@contextmanager
def resume_at_the_wrong_position() -> Iterator[None]:
    """The first token after a resume is drawn with the noise of its neighbour."""

    class Shifted(Step):
        @property
        def position(self) -> int:
            return super().position + (self.request.num_emitted > 0)

    with patch.object(prefill, "Step", Shifted):
        yield


PLANTS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    plant.__name__: plant
    for plant in (
        page_freed_too_early,
        old_attempt_accepted,
        ready_before_the_slot_is_free,
        completion_counted_twice,
        resume_at_the_wrong_position,
    )
}
