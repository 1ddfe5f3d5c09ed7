"""A decode worker that is stepped by hand, and payloads for it."""

import itertools
import zlib

import torch

from decode_worker.commands import Command, Decode, Landed, Reserve, StepUpdate
from decode_worker.entry import Entry
from decode_worker.worker import DecodeWorker
from engine.batch import Chunk
from engine.load import Engine
from engine.sampler import Step, sample
from pdserve.errors import PdserveError
from pdserve.handover import NO_CHECKSUM, PageRun
from pdserve.request import Incarnation, Sampling, Ticket, Token, WorkerId, WorkRequest


class Slot:
    """A payload that landed."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.times_back = 0

    def give_back(self) -> None:
        self.times_back += 1


def work(length: int, max_tokens: int, start: int = 3) -> WorkRequest:
    """A greedy request whose prompt counts upwards from `start`."""
    token_ids = tuple(3 + (start - 3 + i) % 500 for i in range(length))
    return WorkRequest(f"r{start}", token_ids, length, Sampling(temperature=0.0), max_tokens)


class Stage:
    """The worker and what a router and prefill workers would do for it."""

    def __init__(self, engine: Engine, max_batch: int = 8) -> None:
        self.engine = engine
        self.layout = engine.card.kv_layout
        self.worker = DecodeWorker(engine, WorkerId("decode-0"), Incarnation("inc"), max_batch)
        self.history: list[StepUpdate] = []
        self._calls = itertools.count()

    def step(self, *commands: Command) -> StepUpdate:
        """Commands, then one step; the ledger must hold after every one."""
        for command in commands:
            self.worker.submit(command)
        update = self.worker.step()
        self.history.append(update)
        assert self.worker.ledger().problems == ()
        return update

    def outcome(self, request: WorkRequest, *, whole: bool = False, stream: int = 0) -> Ticket | PdserveError:
        """What `Reserve` is answered."""
        return self.step(Reserve(stream, next(self._calls), request, whole, "router-0")).reserved[0].outcome

    def reserve(self, request: WorkRequest, *, whole: bool = False, stream: int = 0) -> Ticket:
        """A ticket."""
        outcome = self.outcome(request, whole=whole, stream=stream)
        assert isinstance(outcome, Ticket), outcome
        return outcome

    def entry(self, ticket: Ticket) -> Entry:
        """The worker's own view of a ticket."""
        entry = self.worker._tickets.find(ticket.counter)
        assert entry is not None
        return entry

    def landed(self, ticket: Ticket, first_page: int, num_pages: int, layers: range, crc: int | None = None) -> Landed:
        """A payload of zeros."""
        payload = torch.zeros(num_pages * len(layers) * self.layout.layer_bytes, dtype=torch.uint8)
        checksum = NO_CHECKSUM if crc is None else crc
        return Landed(
            PageRun(ticket.counter, first_page, num_pages, layers.start, len(layers), checksum), Slot(payload)
        )

    def rest(self, ticket: Ticket) -> Landed:
        """A payload of zeros with all pages that have not landed."""
        landing = self.entry(ticket).landing
        layers = range(self.layout.num_layers)
        return self.landed(ticket, landing.num_landed, landing.num_pages - landing.num_landed, layers)

    def start(self, request: WorkRequest, *, whole: bool = False, stream: int = 0) -> Ticket:
        """A ticket that runs: one token of decode is emitted already."""
        ticket = self.reserve(request, whole=whole, stream=stream)
        self.step(self.rest(ticket), Decode(stream, ticket, Token(request.num_emitted, 9)))
        return ticket

    def finish(self, ticket: Ticket, *commands: Command) -> list[int]:
        """Commands, then steps until the ticket is gone; the ids of its tokens meanwhile. Raises what it fails with."""
        update, token_ids = self.step(*commands), []
        while True:
            token_ids += [each.token.token_id for each in update.emitted if each.counter == ticket.counter]
            for failed in update.failed:
                raise failed.error
            if not self.worker.is_live(ticket.counter):
                return token_ids
            update = self.step()


class Prefill:
    """Computes prompts on another engine, and packs their KV as a prefill worker does."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._layout = engine.card.kv_layout

    def compute(self, request: WorkRequest) -> Token:
        """The KV of the whole prompt lies in pages 0, 1, ...; returns the first token."""
        pages = list(range(self._layout.pages_for(len(request.token_ids))))
        logits = self._engine.runner.run([Chunk(request.token_ids, 0, pages, sample=True)])
        return sample(logits, [Step(request, request.num_emitted)])[0]

    def payload(self, ticket: Ticket, pages: range, layers: range) -> Landed:
        """With a checksum."""
        buffer = torch.empty(len(pages) * len(layers) * self._layout.layer_bytes, dtype=torch.uint8)
        self._engine.cache.read_pages(pages, buffer, layers)
        crc = zlib.crc32(buffer.numpy().tobytes())
        return Landed(PageRun(ticket.counter, pages.start, len(pages), layers.start, len(layers), crc), Slot(buffer))

    def complete(self, request: WorkRequest) -> list[int]:
        """The token ids of the completion, by this engine alone."""
        pages = list(range(self._layout.pages_for(request.max_length)))
        tokens = [self.compute(request)]
        while not tokens[-1].finish:
            position = request.prompt_length + tokens[-1].number
            logits = self._engine.runner.run([Chunk([tokens[-1].token_id], position, pages, sample=True)])
            tokens += sample(logits, [Step(request, tokens[-1].number + 1)])
        return [token.token_id for token in tokens]


def failures(update: StepUpdate) -> list[tuple[int, type[PdserveError]]]:
    """Which tickets failed, and of what."""
    return [(failed.counter, type(failed.error)) for failed in update.failed]
