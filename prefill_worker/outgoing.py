"""What a prefill call still has to push: pages packed into slots, payloads on their way. Plain bookkeeping.

    computed pages ──pack──> payload in a slot ──announce, send, land──> acknowledged

A payload is packed when a whole slot's worth of pages is ready, or when the prompt is complete: a short prompt is one
message. Packing copies, so a call's pages can be freed when the last one is packed.
"""

from dataclasses import dataclass

from pdserve.handover import PageRun
from pdserve.model_card import KvLayout
from pdserve.request import Ticket
from transport.base import SendLink


@dataclass(eq=False)
class Outgoing:
    """The push side of one call."""

    ticket: Ticket
    link: SendLink
    layout: KvLayout
    pages_per_payload: int
    num_pages: int  # of the whole prompt
    num_packed: int = 0
    num_flying: int = 0  # payloads announced and not yet landed
    num_payloads: int = 0

    def next_run(self, num_computed: int, is_computed: bool) -> PageRun | None:
        """The pages to pack next, if enough tokens are computed."""
        ready = self.num_pages if is_computed else num_computed // self.layout.page_tokens
        num_pages = min(ready - self.num_packed, self.pages_per_payload)
        if num_pages == 0 or (num_pages < self.pages_per_payload and not is_computed):
            return None
        return PageRun(self.ticket.counter, self.num_packed, num_pages, 0, self.layout.num_layers)

    def packed(self, run: PageRun) -> None:
        """Note that `run` is on its way."""
        self.num_packed += run.num_pages
        self.num_flying += 1
        self.num_payloads += 1

    @property
    def is_packed(self) -> bool:
        """Whether nothing is left to pack."""
        return self.num_packed == self.num_pages

    @property
    def is_landed(self) -> bool:
        """Whether decode has everything."""
        return self.is_packed and self.num_flying == 0

    @property
    def kv_bytes(self) -> int:
        """KV bytes packed so far."""
        return self.num_packed * self.layout.page_bytes

    def whole(self) -> bytes:
        """The meta that stands for the ticket as a whole."""
        return PageRun.whole(self.ticket.counter).pack()
