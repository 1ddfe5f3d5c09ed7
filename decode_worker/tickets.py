"""The tickets of a decode worker: what was promised, what has landed, what runs. Plain bookkeeping.

    reserved ──pages land──> landed ──Decode(first)──> running ──last token──> gone
       (`Decode` may also come before the last page)        Release, a broken stream or an error end it in any state

A page whose tokens all have their KV is published: others find it, so the next turn of a chat finds this answer.
Who frees what: `TicketTable.drop` frees a ticket's pages and the rest of its promise, once, whoever asks.
"""

from itertools import islice

from decode_worker import growth
from decode_worker.commands import Reserve
from decode_worker.entry import Entry
from decode_worker.landing import Landing
from engine.pages import PagePool
from pdserve.errors import InvalidRequest, NoCapacity, UnknownTicket
from pdserve.handover import PageRun
from pdserve.ledger import Ledger
from pdserve.model_card import KvLayout
from pdserve.prefix import ROOT, page_hash, prompt_hashes
from pdserve.request import Incarnation, Ticket, WorkerId, WorkRequest


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

    def reserve(self, asked: Reserve) -> Ticket:
        """Pin what is cached of the prompt and promise the rest. Raises NoCapacity, InvalidRequest."""
        request, counter = asked.request, self._next_counter
        self._check(request)
        hashes = prompt_hashes(request.token_ids, self._layout.page_tokens)
        num_pages = growth.wanted_pages(self._layout, request, len(request.token_ids) - 1, whole=asked.whole)
        pinned = self._pin(hashes, num_pages, asked)
        self._next_counter += 1
        ticket = Ticket(self._worker, self._incarnation, counter, len(pinned))
        landing = Landing(self._layout.pages_for(len(request.token_ids)), self._layout.num_layers, len(pinned))
        num_promised, known = num_pages - len(pinned), hashes[: len(pinned)]
        self._entries[counter] = Entry(ticket, asked, landing, pinned, num_promised, list(request.token_ids), known)
        return ticket

    def _check(self, request: WorkRequest) -> None:
        """What never fits is refused; while the oldest ticket waits for a page, nobody else may take it."""
        total = self._pool.counts().total
        if growth.wanted_pages(self._layout, request, len(request.token_ids) - 1, whole=True) > total:
            held = total * self._layout.page_tokens
            raise InvalidRequest(
                "prompt", f"prompt and completion need {request.max_length} tokens, a worker holds {held}"
            )
        if any(entry.sits_out for entry in islice(self._entries.values(), 1)):
            raise NoCapacity(f"the oldest request waits for a page, {self._pool.available} of {total} available")

    def _pin(self, hashes: list[bytes], num_pages: int, asked: Reserve) -> list[int]:
        """Beside other tickets new work leaves the watermark; alone it may have all."""
        is_new = not asked.whole and self._entries
        kept_back = growth.watermark(self._pool.counts().total) if is_new else 0
        self._pool.promise(kept_back)
        try:
            return self._pool.reserve(hashes, num_pages, self._next_counter)
        finally:
            self._pool.unpromise(kept_back)

    def find(self, counter: int) -> Entry | None:
        """The ticket, if it is alive."""
        return self._entries.get(counter)

    def get(self, ticket: Ticket, stream: int) -> Entry:
        """The ticket, which must be alive, of this incarnation, and of this router's stream. Raises UnknownTicket."""
        entry = self._entries.get(ticket.counter)
        if ticket.incarnation != self._incarnation or entry is None or entry.asked.stream != stream:
            raise UnknownTicket(f"ticket {ticket.counter} of incarnation {ticket.incarnation} is not alive here")
        return entry

    def of_stream(self, stream: int) -> list[Entry]:
        """All tickets of one router."""
        return [entry for entry in self._entries.values() if entry.asked.stream == stream]

    def all(self) -> list[Entry]:
        """Every ticket, the oldest first."""
        return list(self._entries.values())

    def running(self) -> list[Entry]:
        """Tickets that can compute a token once there is room for it, the oldest first."""
        return [entry for entry in self._entries.values() if entry.is_running]

    def place(self, entry: Entry, run: PageRun) -> list[int]:
        """Page ids where a landed run belongs. Raises ProtocolError if it is not the run that comes next."""
        if entry.landing.advance(run):
            growth.take(entry, run.num_pages, self._pool)
        return entry.page_ids[run.first_page : run.first_page + run.num_pages]

    def make_room(self, entry: Entry) -> bool:
        """Whether there is a page for the newest token."""
        return growth.make_room(entry, self._pool, self._layout)

    def publish(self, entry: Entry) -> None:
        """Let others find the pages whose tokens all have their KV."""
        size = self._layout.page_tokens
        for index in range(len(entry.hashes), entry.num_stored(size) // size):
            parent = entry.hashes[-1] if entry.hashes else ROOT
            entry.hashes.append(page_hash(parent, entry.token_ids[index * size : (index + 1) * size]))
            self._pool.publish(entry.page_ids[index], entry.hashes[index])

    def drop(self, entry: Entry) -> None:
        """End a ticket: free its pages and what is left of its promise. A second time is no error."""
        if self._entries.pop(entry.counter, None) is None:
            return
        self._pool.give_back(entry.page_ids, entry.counter)
        self._pool.unpromise(entry.num_promised)

    def ledger(self) -> Ledger:
        """Every ticket, and what does not hold."""
        entries = self.all()
        held = [(entry.counter, entry.page_ids) for entry in entries]
        problems = self._pool.audit(held, sum(entry.num_promised for entry in entries))
        return Ledger(tuple(entry.as_ledger_entry() for entry in entries), tuple(problems))
