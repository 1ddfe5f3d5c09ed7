"""The decode worker's engine: commands in, `step()`, one update out. Runs in one thread; knows no network.

A step obeys its commands in order (reserve, decode, release, landed payloads), finds room for the newest token of every
running ticket, and computes one further token for all of them in one batch. Landed payloads are scattered into pages
here and nowhere else, so that no forward pass ever sees half a page; payloads of dead tickets are dropped.
"""

import zlib
from contextlib import suppress

from decode_worker.commands import (
    Command,
    Decode,
    Drain,
    Emitted,
    Ended,
    Expel,
    GaveUp,
    Landed,
    Release,
    Reserve,
    Reserved,
    StepUpdate,
    StreamGone,
    TicketFailed,
)
from decode_worker.entry import Entry
from decode_worker.growth import victim
from decode_worker.tickets import TicketTable
from engine.batch import Chunk
from engine.load import Engine
from engine.mailbox import Mailbox
from engine.pages import PageCounts, PagePool
from engine.pilot import pilot_of
from engine.sampler import Step, sample
from pdserve.errors import Draining, LegFailed, PdserveError, Preempted, ProtocolError, UnknownTicket
from pdserve.handover import NO_CHECKSUM
from pdserve.ledger import Ledger
from pdserve.request import Incarnation, Token, WorkerId, check


class DecodeWorker:
    """One engine that decodes."""

    def __init__(self, engine: Engine, worker: WorkerId, incarnation: Incarnation, max_batch: int) -> None:
        self._engine = engine
        self._max_batch = max_batch
        self._pool = PagePool(engine.cache.num_pages)
        self._tickets = TicketTable(worker, incarnation, self._pool, engine.card.kv_layout)
        self._commands: Mailbox[Command] = Mailbox()
        self._is_draining = False
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
        """The pages in numbers; from any thread."""
        return self._pool.counts()

    def ledger(self) -> Ledger:
        """Who holds which pages; between two steps."""
        return self._tickets.ledger()

    def step(self) -> StepUpdate:
        """Obey, then one token for every running ticket that has room for it."""
        update = StepUpdate()
        for command in self._commands.drain():
            self._obey(command, update)
        batch = self._batch(update)
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
            case Landed():
                self._land(command, update)
            case Drain():
                self._is_draining = True
            case _:
                self._end(command, update)

    def _end(self, command: Release | StreamGone | GaveUp | Expel, update: StepUpdate) -> None:
        match command:
            case Release(stream, ticket):
                with suppress(UnknownTicket):  # it has ended by itself, or never was this router's
                    self._drop(self._tickets.get(ticket, stream), "its router released it", update)
            case StreamGone(stream):
                for entry in self._tickets.of_stream(stream):
                    self._drop(entry, "its router is gone", update)
            case GaveUp(counter, error):
                given_up = self._tickets.find(counter)
                if given_up and not given_up.landing.is_complete:  # else it needs nothing more of prefill
                    self._fail(given_up, error, update)
            case Expel(error):
                for entry in self._tickets.all():
                    self._fail(entry, error, update)

    def _reserve(self, asked: Reserve) -> Reserved:
        try:
            check(asked.request, self._engine.card.vocab_size, self._engine.card.window)
            if self._is_draining:
                raise Draining("this decode worker is about to leave and takes no new work")
            return Reserved(asked.stream, asked.call, self._tickets.reserve(asked))
        except PdserveError as error:
            return Reserved(asked.stream, asked.call, error)

    def _adopt(self, command: Decode, update: StepUpdate) -> None:
        try:
            entry = self._tickets.get(command.ticket, command.stream)
        except UnknownTicket as error:
            update.failed.append(TicketFailed(command.stream, command.ticket.counter, error))
            return
        try:
            entry.adopt(command.first, self._engine.card.vocab_size)
            entry.pilot = pilot_of(entry.request, self._engine.card.vocab_size, self._engine.grammars)
            if entry.pilot is not None:
                entry.pilot.take(command.first)
                entry.pilot.check()
        except PdserveError as error:
            self._fail(entry, error, update)

    def _land(self, landed: Landed, update: StepUpdate) -> None:
        if entry := self._tickets.find(landed.run.counter):
            try:
                self._scatter(entry, landed)
            except PdserveError as error:
                self._fail(entry, error, update)
        landed.slot.give_back()

    def _scatter(self, entry: Entry, landed: Landed) -> None:
        """Raises ProtocolError, and LegFailed when the bytes are not those that prefill sent."""
        run, buffer, layout = landed.run, landed.slot.buffer, self._engine.card.kv_layout
        if run.num_pages * run.num_layers * layout.layer_bytes != len(buffer):
            raise ProtocolError(f"{run} came with {len(buffer)} bytes")
        if run.checksum not in (NO_CHECKSUM, zlib.crc32(buffer.cpu().numpy().data)):
            raise LegFailed(f"the checksum of {run} is wrong: its bytes changed on the way")
        page_ids = self._tickets.place(entry, run)
        self._engine.cache.write_pages(page_ids, buffer, range(run.first_layer, run.first_layer + run.num_layers))
        self._tickets.publish(entry)

    def _fail(self, entry: Entry, error: PdserveError, update: StepUpdate) -> None:
        self._drop(entry, str(error), update)
        update.failed.append(TicketFailed(entry.asked.stream, entry.counter, error))

    def _drop(self, entry: Entry, why: str, update: StepUpdate) -> None:
        self._tickets.drop(entry)
        update.ended.append(Ended(entry.counter, "" if entry.landing.is_complete else why))

    def _batch(self, update: StepUpdate) -> list[Entry]:
        """The oldest that have room; who sits out takes no row from others, whose pages it waits for."""
        batch: list[Entry] = []
        for entry in self._tickets.running():
            if len(batch) == self._max_batch:
                break
            if self._find_room(entry, update):
                batch.append(entry)
        return batch

    def _find_room(self, entry: Entry, update: StepUpdate) -> bool:
        """Whether there is a page for the newest token; for an older ticket's sake this one may have to end."""
        while self._tickets.is_live(entry.counter) and not self._tickets.make_room(entry):
            weakest = victim(self._tickets.all())
            if weakest is None:
                return False
            self._preempt(weakest, update)
        return self._tickets.is_live(entry.counter)

    def _preempt(self, entry: Entry, update: StepUpdate) -> None:
        pages, counts = f"{len(entry.page_ids)} held and {entry.num_promised} promised", self._pool.counts()
        older = f"an older request needs a page, {self._pool.available} of {counts.total} available"
        self._fail(entry, Preempted(f"ticket {entry.counter} gives up its KV pages ({pages}): {older}"), update)

    def _compute(self, batch: list[Entry], update: StepUpdate) -> None:
        logits = self._engine.runner.run([_as_chunk(entry) for entry in batch])
        steps = [Step(entry.request, entry.next_number, entry.pilot) for entry in batch]
        for entry, token in zip(batch, sample(logits, steps), strict=True):
            self._emit(entry, token if entry.pilot is None else entry.pilot.take(token), update)

    def _emit(self, entry: Entry, token: Token, update: StepUpdate) -> None:
        entry.token_ids.append(token.token_id)
        entry.num_steps += 1
        self._tickets.publish(entry)
        update.emitted.append(Emitted(entry.asked.stream, entry.counter, token, entry.num_steps))
        if token.finish:
            self._drop(entry, "", update)
        elif entry.pilot is not None and entry.pilot.problem is not None:
            self._fail(entry, entry.pilot.problem, update)


def _as_chunk(entry: Entry) -> Chunk:
    return Chunk([entry.token_ids[-1]], entry.position, entry.page_ids, sample=True)
