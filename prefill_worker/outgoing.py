"""What a prefill call still has to push: pages packed into slots, payloads on their way. Plain bookkeeping.

    computed pages ──pack──> payload in a slot ──announce, send, land──> acknowledged

Pages go in blocks of consecutive pages: those that are complete, or else those of the chunk that is being computed. A
block that fits one slot is one payload. A larger one goes in groups of layers of equal size, each as soon as its layers
are computed, from the first to the last; then the next block. Pages that decode holds already are never pushed.

Packing copies, so a call's pages can be freed when the last one is packed.
"""

from dataclasses import dataclass

from pdserve.handover import PageRun
from pdserve.model_card import KvLayout
from pdserve.request import Incarnation, Ticket
from transport.base import SendLink


@dataclass(frozen=True)
class Ready:
    """How far a prompt's pages are: `whole` of them complete, those up to `begun` in their first `num_layers`."""

    whole: int
    begun: int = 0
    num_layers: int = 0


@dataclass(frozen=True)
class _Block:
    """Pages `first` up to `end`, whose layers up to `layer` are packed; `group` layers fit one payload."""

    first: int
    end: int
    group: int
    layer: int = 0


def group_size(num_pages: int, layout: KvLayout, slot_bytes: int) -> int:
    """Layers per payload, so that so many pages go in as few payloads as possible, of equal size, each in one slot."""
    most = max(1, slot_bytes // max(1, num_pages * layout.layer_bytes))
    num_groups = -(-layout.num_layers // most)
    return -(-layout.num_layers // num_groups)


class Outgoing:
    """The push side of one call."""

    def __init__(self, ticket: Ticket, link: SendLink, layout: KvLayout, slot_bytes: int, num_pages: int) -> None:
        self.ticket = ticket
        self.link = link
        self.num_flying = 0  # payloads announced and not yet landed
        self.num_payloads = 0
        self.kv_bytes = 0  # packed so far
        self._layout = layout
        self._slot_bytes = slot_bytes
        self._num_pages = num_pages  # of the whole prompt
        self._block = _Block(ticket.cached_pages, ticket.cached_pages, layout.num_layers)

    def next_run(self, ready: Ready) -> PageRun | None:
        """What to pack next, if enough is computed; `packed` notes that it is."""
        if self._block.layer == 0:
            self._block = self._next_block(ready)
        block, num_layers = self._block, self._layout.num_layers
        end = min(block.layer + block.group, num_layers)
        computed = num_layers if block.end <= ready.whole else ready.num_layers
        if block.first == block.end or computed < end:
            return None
        return PageRun(self.ticket.counter, block.first, block.end - block.first, block.layer, end - block.layer)

    def _next_block(self, ready: Ready) -> _Block:
        first, most = self._block.first, self._slot_bytes // self._layout.layer_bytes
        if ready.whole > first:
            most = max(1, self._slot_bytes // self._layout.page_bytes)
        end = min(max(first, ready.whole if ready.whole > first else ready.begun), first + most)
        return _Block(first, end, group_size(end - first, self._layout, self._slot_bytes))

    def packed(self, run: PageRun) -> None:
        """Note that `run` is on its way."""
        self.num_flying += 1
        self.num_payloads += 1
        self.kv_bytes += run.num_pages * run.num_layers * self._layout.layer_bytes
        block, layer = self._block, run.first_layer + run.num_layers
        if layer == self._layout.num_layers:
            self._block = _Block(block.end, block.end, layer)
        else:
            self._block = _Block(block.first, block.end, block.group, layer)

    @property
    def is_packed(self) -> bool:
        """Whether nothing is left to pack."""
        return self._block.first == self._num_pages

    @property
    def is_landed(self) -> bool:
        """Whether decode has everything."""
        return self.is_packed and self.num_flying == 0

    def is_to(self, incarnation: Incarnation, counter: int) -> bool:
        """Whether this is the push to that ticket."""
        return (self.ticket.incarnation, self.ticket.counter) == (incarnation, counter)

    def whole(self) -> bytes:
        """The meta that stands for the ticket as a whole."""
        return PageRun.whole(self.ticket.counter).pack()
