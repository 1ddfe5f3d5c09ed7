"""The decode worker's engine: commands in, `step()`, one update out. Runs in one thread; knows no network.

A step obeys its commands in order (reserve, decode, release, landed payloads), then computes one token for every
running ticket in one batch. Landed payloads are scattered into pages here and nowhere else, so that no forward pass
ever sees half a page; payloads of dead tickets are dropped.
"""

from contextlib import suppress

from decode_worker.commands import (
    Command,
    Decode,
    Emitted,
    GaveUp,
    Landed,
    Release,
    Reserve,
    Reserved,
    StepUpdate,
    StreamGone,
    TicketFailed,
)
from decode_worker.tickets import Entry, TicketTable
from engine.batch import Chunk
from engine.load import Engine
from engine.mailbox import Mailbox
from engine.pages import PageCounts, PagePool
from engine.sampler import Step, sample
from pdserve.errors import PdserveError, ProtocolError, UnknownTicket
from pdserve.request import Incarnation, Token, WorkerId, check


class DecodeWorker:
    """One engine that decodes."""

    def __init__(self, engine: Engine, worker: WorkerId, incarnation: Incarnation, max_batch: int) -> None:
        self._engine = engine
        self._max_batch = max_batch
        self._pool = PagePool(engine.cache.num_pages)
        self._tickets = TicketTable(worker, incarnation, self._pool, engine.card.kv_layout)
        self._commands: Mailbox[Command] = Mailbox()
        self.is_idle = True  # nothing to do before the next command

    def submit(self, command: Command) -> None:
        """Hand a command to the next step; from any thread."""
        self._commands.put(command)

    def wait_for_command(self, timeout_s: float) -> None:
        """Block the engine's thread until a command is there, at most `timeout_s`."""
        self._commands.wait(timeout_s)

    def is_live(self, counter: int) -> bool:
        """Whether payloads of this ticket are still wanted; from any thread."""
        return self._tickets.is_live(counter)

    @property
    def progress(self) -> int:
        """Layers computed so far; from any thread."""
        return self._engine.runner.progress

    @property
    def num_requests(self) -> int:
        """Tickets alive; from any thread."""
        return len(self._tickets)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait to be computed: never any on a decode worker."""
        return 0

    def page_counts(self) -> PageCounts:
        """The ledger; from any thread."""
        return self._pool.counts()

    def step(self) -> StepUpdate:
        """Obey, then one token for every running ticket."""
        update = StepUpdate()
        for command in self._commands.drain():
            self._obey(command, update)
        batch = self._tickets.running(self._max_batch)
        if batch:
            self._compute(batch, update)
        self.is_idle = not batch
        self._pool.check()
        return update

    def _obey(self, command: Command, update: StepUpdate) -> None:
        match command:
            case Reserve():
                update.reserved.append(self._reserve(command))
            case Decode():
                self._adopt(command, update)
            case Release(stream, ticket):
                with suppress(UnknownTicket):  # it has ended by itself, or never was this router's
                    self._tickets.drop(self._tickets.get(ticket, stream))
            case StreamGone(stream):
                for entry in self._tickets.of_stream(stream):
                    self._tickets.drop(entry)
            case Landed():
                self._land(command, update)
            case GaveUp(counter, error):
                if given_up := self._tickets.find(counter):
                    self._fail(given_up, error, update)

    def _reserve(self, command: Reserve) -> Reserved:
        try:
            check(command.request, self._engine.card.vocab_size, self._engine.card.window)
            return Reserved(command.stream, command.call, self._tickets.reserve(command.stream, command.request))
        except PdserveError as error:
            return Reserved(command.stream, command.call, error)

    def _adopt(self, command: Decode, update: StepUpdate) -> None:
        try:
            self._tickets.adopt(command.stream, command.ticket, command.first, self._engine.card.vocab_size)
        except PdserveError as error:
            update.failed.append(TicketFailed(command.stream, command.ticket.counter, error))

    def _land(self, landed: Landed, update: StepUpdate) -> None:
        entry = self._tickets.find(landed.run.counter)
        fits = landed.run.num_pages * self._engine.card.kv_layout.page_bytes == len(landed.slot.buffer)
        page_ids = self._tickets.place(entry, landed.run) if entry and fits else None
        if page_ids is not None:
            self._engine.cache.write_pages(page_ids, landed.slot.buffer)
        landed.slot.give_back()
        if entry is not None and page_ids is None:
            error = ProtocolError(f"pages {landed.run} landed where page {entry.num_landed} was expected")
            self._fail(entry, error, update)

    def _fail(self, entry: Entry, error: PdserveError, update: StepUpdate) -> None:
        self._tickets.drop(entry)
        update.failed.append(TicketFailed(entry.stream, entry.ticket.counter, error))

    def _compute(self, batch: list[Entry], update: StepUpdate) -> None:
        for entry in batch:
            self._tickets.make_room(entry)
        logits = self._engine.runner.run([_as_chunk(entry) for entry in batch])
        steps = [Step(entry.request, _last(entry).number + 1) for entry in batch]
        for entry, token in zip(batch, sample(logits, steps), strict=True):
            entry.last = token
            entry.num_steps += 1
            update.emitted.append(Emitted(entry.stream, entry.ticket.counter, token, entry.num_steps))
            if token.finish:
                self._tickets.drop(entry)


def _last(entry: Entry) -> Token:
    assert entry.last is not None
    return entry.last


def _as_chunk(entry: Entry) -> Chunk:
    return Chunk([_last(entry).token_id], entry.position, entry.page_ids, sample=True)
