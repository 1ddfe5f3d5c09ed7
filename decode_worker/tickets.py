"""The tickets of a decode worker: what was promised, what has landed, what runs. Plain bookkeeping.

    reserved ──pages land──> landed ──Decode(first)──> running ──last token──> gone
       (`Decode` may also come before the last page)        Release, a broken stream or an error end it in any state

Who frees what: `TicketTable.drop` frees a ticket's pages and the rest of its promise, once, whoever asks.
"""

from dataclasses import dataclass, field

from engine.pages import PagePool
from pdserve.errors import InvalidRequest, ProtocolError, UnknownTicket
from pdserve.handover import PageRun
from pdserve.model_card import KvLayout
from pdserve.request import Incarnation, Ticket, Token, WorkerId, WorkRequest


@dataclass(eq=False)
class Entry:
    """One ticket that is alive."""

    ticket: Ticket
    stream: int
    request: WorkRequest
    num_promised: int  # pages not taken yet
    num_prompt_pages: int
    page_ids: list[int] = field(default_factory=list)
    num_landed: int = 0  # prompt pages
    last: Token | None = None  # the newest token; its KV is not in the pages yet
    num_steps: int = 0

    @property
    def is_running(self) -> bool:
        """Whether the next step can compute a token."""
        return self.last is not None and self.num_landed == self.num_prompt_pages

    @property
    def position(self) -> int:
        """Absolute position of the newest token."""
        assert self.last is not None
        return self.request.prompt_length + self.last.number


class TicketTable:
    """All tickets that are alive, oldest first."""

    def __init__(self, worker: WorkerId, incarnation: Incarnation, pool: PagePool, layout: KvLayout) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._pool = pool
        self._layout = layout
        self._entries: dict[int, Entry] = {}
        self._next_counter = 1

    def __len__(self) -> int:
        return len(self._entries)

    def is_live(self, counter: int) -> bool:
        """Whether payloads of this ticket are still wanted; from any thread."""
        return counter in self._entries

    def reserve(self, stream: int, request: WorkRequest) -> Ticket:
        """Promise pages for all that the request may still become. Raises NoCapacity, InvalidRequest."""
        num_prompt_pages = self._layout.pages_for(len(request.token_ids))
        num_pages = self._layout.pages_for(request.max_length - 1)  # the last token's KV is never needed
        num_pages = max(num_pages, num_prompt_pages)
        if num_pages > self._pool.counts().total:
            total = self._pool.counts().total * self._layout.page_tokens
            raise InvalidRequest(
                "prompt", f"prompt and completion need {request.max_length} tokens, a worker holds {total}"
            )
        self._pool.promise(num_pages)
        ticket = Ticket(self._worker, self._incarnation, self._next_counter)
        self._next_counter += 1
        self._entries[ticket.counter] = Entry(ticket, stream, request, num_pages, num_prompt_pages)
        return ticket

    def find(self, counter: int) -> Entry | None:
        """The ticket, if it is alive."""
        return self._entries.get(counter)

    def get(self, ticket: Ticket, stream: int) -> Entry:
        """The ticket, which must be alive, of this incarnation, and of this router's stream. Raises UnknownTicket."""
        entry = self._entries.get(ticket.counter)
        if ticket.incarnation != self._incarnation or entry is None or entry.stream != stream:
            raise UnknownTicket(f"ticket {ticket.counter} of incarnation {ticket.incarnation} is not alive here")
        return entry

    def adopt(self, stream: int, ticket: Ticket, first: Token, vocab_size: int) -> None:
        """Let the ticket go on from `first`. Raises UnknownTicket, ProtocolError."""
        entry = self.get(ticket, stream)
        is_next = entry.last is None and first.number == entry.request.num_emitted and first.token_id < vocab_size
        if not is_next or first.finish or first.number + 1 >= entry.request.max_tokens:
            raise ProtocolError(f"ticket {ticket.counter} cannot go on from {first}, its last token is {entry.last}")
        entry.last = first

    def of_stream(self, stream: int) -> list[Entry]:
        """All tickets of one router."""
        return [entry for entry in self._entries.values() if entry.stream == stream]

    def running(self, limit: int) -> list[Entry]:
        """The oldest tickets that can compute a token."""
        runnable = (entry for entry in self._entries.values() if entry.is_running)
        return [entry for entry, _ in zip(runnable, range(limit), strict=False)]

    def place(self, entry: Entry, run: PageRun) -> list[int] | None:
        """Page ids where a landed run belongs, taken from the promise; None if it is not the run that comes next."""
        if run.first_page != entry.num_landed or run.first_page + run.num_pages > entry.num_prompt_pages:
            return None
        entry.num_landed += run.num_pages
        return self._grow(entry, run.num_pages)

    def make_room(self, entry: Entry) -> None:
        """Take one more page from the promise when the newest token begins one."""
        if entry.position // self._layout.page_tokens == len(entry.page_ids):
            self._grow(entry, 1)

    def _grow(self, entry: Entry, num_pages: int) -> list[int]:
        page_ids = self._pool.take_promised(num_pages, entry.ticket.counter)
        entry.num_promised -= num_pages
        entry.page_ids += page_ids
        return page_ids

    def drop(self, entry: Entry) -> None:
        """End a ticket: free its pages and what is left of its promise. A second time is no error."""
        if self._entries.pop(entry.ticket.counter, None) is None:
            return
        self._pool.give_back(entry.page_ids, entry.ticket.counter)
        self._pool.unpromise(entry.num_promised)
