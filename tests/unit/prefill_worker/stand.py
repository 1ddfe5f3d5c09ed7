"""A prefill worker on a test stand: stepped by the test, with a link whose payloads land when the test says so."""

import zlib
from collections import defaultdict, deque
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace

import torch

from engine.load import Engine
from pdserve.errors import PdserveError
from pdserve.handover import PageRun
from pdserve.request import Incarnation, Sampling, Scored, Ticket, WorkerId, WorkRequest
from prefill_worker.commands import Cancel, Done, Push, PushEnded, Sampled, Start
from prefill_worker.worker import PrefillWorker

INCARNATION = Incarnation("inc")


@dataclass
class Slot:
    buffer: torch.Tensor
    home: list[torch.Tensor]

    def give_back(self) -> None:
        self.home.append(self.buffer)


class Link:
    """Four slots; pushing is the stand's own business."""

    def __init__(self, slot_bytes: int) -> None:
        self.is_up = True
        self.free = [torch.empty(slot_bytes, dtype=torch.uint8) for _ in range(4)]

    def try_slot(self) -> Slot | None:
        return Slot(self.free.pop(), self.free) if self.is_up and self.free else None

    def push(self, slot: object, num_bytes: int, meta: bytes) -> Awaitable[bool]:
        raise NotImplementedError

    def end(self, meta: bytes, aborted: str) -> None:
        raise NotImplementedError


def prompt(length: int, *, kind: int = 0, shared: int = 0, emitted: int = 0, max_tokens: int = 9) -> WorkRequest:
    """Prompts of different kinds differ from token `shared` on."""
    token_ids = tuple((7 * i * i + 13 * i + (kind if i >= shared else 0) * (i + 31)) % 500 + 3 for i in range(length))
    return WorkRequest(f"r{kind}", token_ids, length - emitted, Sampling(temperature=0.0), max_tokens, top_logprobs=5)


@dataclass
class Stand:
    """Steps the worker and checks its ledger after every step."""

    engine: Engine
    chunk_tokens: int = 64
    slot_pages: int = 2
    is_slow: bool = False  # payloads land only by `land`
    flying: deque[Push] = field(default_factory=deque)
    runs: dict[int, list[PageRun]] = field(default_factory=lambda: defaultdict(list))  # by ticket
    pages: dict[tuple[int, int, int], bytes] = field(default_factory=dict)  # by ticket, page, layer
    scored: dict[int, list[Scored]] = field(default_factory=lambda: defaultdict(list))
    sampled: dict[int, Sampled] = field(default_factory=dict)
    done: dict[int, Done] = field(default_factory=dict)
    failed: dict[int, PdserveError] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)  # by ticket: why it was aborted

    def __post_init__(self) -> None:
        self.layout = self.engine.card.kv_layout
        slot_bytes = self.slot_pages * self.layout.page_bytes
        self.worker = PrefillWorker(self.engine, self.chunk_tokens, slot_bytes, verify_kv=True)
        self.link = Link(slot_bytes)

    def start(self, call: int, work: WorkRequest, *, cached_pages: int = 0) -> None:
        """With ticket number 100 + call."""
        ticket = Ticket(WorkerId("decode-0"), INCARNATION, 100 + call, cached_pages)
        self.worker.submit(Start(call, work, ticket, self.link))

    def cancel(self, call: int) -> None:
        self.worker.submit(Cancel(call))

    def step(self) -> None:
        update = self.worker.step()
        assert self.worker.ledger().problems == ()
        for scores in update.scored:
            assert scores.call not in self.sampled, "scores come before the token"
            self.scored[scores.call] += scores.tokens
        self.sampled |= {each.call: each for each in update.sampled}
        assert not self.done.keys() & {each.call for each in update.done}
        self.done |= {each.call: each for each in update.done}
        self.failed |= {each.call: each.error for each in update.failed}
        self.ended |= {PageRun.unpack(each.meta).counter: each.aborted for each in update.ended}
        self.flying.extend(update.pushes)
        while self.flying and not self.is_slow:
            self.land()

    def land(self, problem: PdserveError | None = None) -> None:
        """The oldest payload that is under way; the slot is free again."""
        push = self.flying.popleft()
        payload, run = push.slot.buffer[: push.num_bytes], PageRun.unpack(push.meta)
        assert run.checksum == zlib.crc32(payload.numpy().data)
        self.runs[run.counter].append(replace(run, checksum=-1))
        parts = payload.view(run.num_pages, run.num_layers, -1)
        for page in range(run.num_pages):
            for layer in range(run.num_layers):
                key = (run.counter, run.first_page + page, run.first_layer + layer)
                assert key not in self.pages, "nothing is sent twice"
                self.pages[key] = parts[page, layer].numpy().tobytes()
        push.slot.give_back()
        self.worker.submit(PushEnded(push.call, problem))

    def run(self) -> None:
        """Until nothing happens any more."""
        self.is_slow = False
        self.step()
        while self.worker.num_requests or not self.worker.is_idle:
            self.step()

    def assert_clean(self) -> None:
        counts = self.worker.page_counts()
        assert (counts.in_use, counts.promised) == (0, 0)
        assert len(self.link.free) + len(self.flying) == 4
        assert self.worker.ledger().entries == ()

    def received(self, call: int) -> list[bytes]:
        """What was pushed for a call, in order of pages and layers."""
        return [part for (counter, _, _), part in sorted(self.pages.items()) if counter == 100 + call]
