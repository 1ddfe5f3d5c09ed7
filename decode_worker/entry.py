"""One ticket that is alive: what was asked, how far it is, which pages it holds. Plain data."""

from dataclasses import dataclass

from decode_worker.commands import Reserve
from decode_worker.landing import Landing
from engine.pilot import Pilot
from pdserve.errors import ProtocolError
from pdserve.ledger import LedgerEntry
from pdserve.request import Ticket, Token, WorkRequest


@dataclass(eq=False)
class Entry:
    """A ticket's pages: the cached ones of its prompt, which are never written, then those that land, then its own."""

    ticket: Ticket
    asked: Reserve
    landing: Landing
    page_ids: list[int]
    num_promised: int  # pages not taken yet
    token_ids: list[int]  # all so far; the KV of the newest one, once adopted, is not in the pages yet
    hashes: list[bytes]  # of the pages that others may find
    sits_out: bool = False  # its next token waits for a page of somebody else
    num_steps: int = 0
    pilot: Pilot | None = None  # of all tokens so far, once adopted; None where the request is not steered

    @property
    def counter(self) -> int:
        """Names the ticket in this incarnation, and is the holder of its pages."""
        return self.ticket.counter

    @property
    def request(self) -> WorkRequest:
        """What is to be completed."""
        return self.asked.request

    @property
    def position(self) -> int:
        """Absolute position of the newest token."""
        return len(self.token_ids) - 1

    @property
    def next_number(self) -> int:
        """Of the completion token that comes next."""
        return len(self.token_ids) - self.request.prompt_length

    @property
    def is_adopted(self) -> bool:
        """Whether the first token is here."""
        return len(self.token_ids) > len(self.request.token_ids)

    @property
    def is_running(self) -> bool:
        """Whether the next step can compute a token."""
        return self.is_adopted and self.landing.is_complete

    def num_stored(self, page_tokens: int) -> int:
        """Tokens whose KV is in the pages, in all layers."""
        if self.is_running:
            return self.position
        return min(self.landing.num_landed * page_tokens, len(self.request.token_ids))

    def adopt(self, first: Token, vocab_size: int) -> None:
        """Go on from `first`. Raises ProtocolError."""
        is_next = not self.is_adopted and first.number == self.next_number and first.token_id < vocab_size
        if not is_next or first.finish or first.number + 1 >= self.request.max_tokens:
            raise ProtocolError(
                f"ticket {self.counter} cannot go on from {first}: it is at token {self.next_number}"
                f" of {self.request.max_tokens}, adopted: {self.is_adopted}"
            )
        self.token_ids.append(first.token_id)

    def as_ledger_entry(self) -> LedgerEntry:
        """What the audit sees of it."""
        has_landed = len(self.page_ids) > self.ticket.cached_pages
        return LedgerEntry(
            number=self.counter,
            label=self.request.label,
            state="running" if self.is_running else "landing" if has_landed else "reserved",
            num_pages=len(self.page_ids),
            num_promised=self.num_promised,
            router=self.asked.router,
        )
