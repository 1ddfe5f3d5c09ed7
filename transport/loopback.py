"""Links inside one process: the same two ends and protocol, without gRPC, torch.distributed, threads or clocks.

One `Loopback` is both `Control` and `Wires` of all links in it. Faults are ordered by the number of a payload, counted
from 0 over all links in the order of arrival. Belongs to the event loop's thread; time is the loop's.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Future
from contextlib import aclosing

import torch

from pdserve.errors import LinkDown, Unavailable
from pdserve.membership import WorkerInfo
from pdserve.request import WorkerId
from transport.base import LinkConfig
from transport.protocol import DecodeFrame, PrefillFrame
from transport.receive import DecodeLinks
from transport.seams import Address, Side


class Loopback:
    """Where the links of one process meet, and where faults are ordered."""

    def __init__(self, config: LinkConfig, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s  # of every payload
        self.num_arrived = 0  # payloads, dropped ones included
        self._config = config
        self._decode: dict[WorkerId, DecodeLinks] = {}
        self._passages: dict[str, Passage] = {}  # by epoch
        self._corrupt: dict[int, int] = {}  # payload: byte
        self._drop: set[int] = set()
        self.is_held = False

    def add(self, worker: WorkerId, links: DecodeLinks) -> None:
        """Let prefill reach this decode worker; a second call replaces the first."""
        self._decode[worker] = links

    def corrupt(self, payload: int, byte: int) -> None:
        """Invert one byte of a payload in flight."""
        self._corrupt[payload] = byte

    def drop(self, payload: int) -> None:
        """Lose a payload: both ends wait for it until their deadline."""
        self._drop.add(payload)

    def hold(self) -> None:
        """Let nothing arrive until `release`."""
        self.is_held = True

    def release(self) -> None:
        """The inverse of `hold`."""
        self.is_held = False
        for passage in list(self._passages.values()):
            passage.advance()

    def cut(self, why: str = "cut") -> None:
        """Break all wires that are up; links are made anew."""
        for passage in list(self._passages.values()):
            passage.break_off(why)

    async def open(self, peer: WorkerInfo, frames: AsyncIterator[PrefillFrame]) -> AsyncGenerator[DecodeFrame, None]:
        if peer.id not in self._decode:
            raise Unavailable(f"nobody listens at {peer.address}")
        async with aclosing(self._decode[peer.id].serve(frames)) as answers:
            async for frame in answers:
                yield frame

    def address(self) -> Address:
        return Address("loopback", 0)

    def make(self, side: Side, epoch: str, store: Address) -> "LoopbackWire":  # noqa: ARG002 - there is but one place
        passage = self._passages.setdefault(epoch, Passage(self))
        return passage.attach(side)

    def buffers(self, count: int) -> list[torch.Tensor]:
        return [torch.empty(self._config.slot_bytes, dtype=torch.uint8) for _ in range(count)]

    def deliver(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        """One payload arrives, or not."""
        number = self.num_arrived
        self.num_arrived += 1
        target.copy_(source)
        if (byte := self._corrupt.pop(number, None)) is not None:
            target[byte] ^= 0xFF
        return number not in self._drop

    def forget(self, passage: "Passage") -> None:
        """It is broken."""
        self._passages = {epoch: other for epoch, other in self._passages.items() if other is not passage}

    @property
    def op_timeout_s(self) -> float:
        """Of a lost payload."""
        return self._config.op_timeout_s


class Passage:
    """What lies between the two ends of one wire. It breaks as a whole."""

    def __init__(self, loopback: Loopback) -> None:
        self._loopback = loopback
        self._ends: dict[Side, LoopbackWire] = {}
        self._is_busy = False
        self._is_broken = False

    def attach(self, side: Side) -> "LoopbackWire":
        """One end; the wire is up when both are there."""
        wire = self._ends[side] = LoopbackWire(self)
        if len(self._ends) == 2:
            for end in self._ends.values():
                end.up.set_result(None)
        return wire

    def advance(self) -> None:
        """Start the next payload when both ends have posted it."""
        is_ready = len(self._ends) == 2 and all(end.posted for end in self._ends.values())
        if is_ready and not (self._is_busy or self._is_broken or self._loopback.is_held):
            self._is_busy = True
            asyncio.get_running_loop().call_later(self._loopback.delay_s, self._arrive)

    def _arrive(self) -> None:
        if self._is_broken:
            return
        (source, sent), (target, received) = (self._ends[side].posted[0] for side in ("send", "receive"))
        if not self._loopback.deliver(source, target):
            asyncio.get_running_loop().call_later(self._loopback.op_timeout_s, self.break_off, "a payload was lost")
            return
        for end in self._ends.values():
            end.posted.popleft()
        sent.set_result(None)
        received.set_result(None)
        self._is_busy = False
        self.advance()

    def break_off(self, why: str) -> None:
        """Both ends fail, once."""
        if not self._is_broken:
            self._is_broken = True
            self._loopback.forget(self)
            for end in self._ends.values():
                end.lose(why)


class LoopbackWire:
    """See seams.Wire."""

    def __init__(self, passage: Passage) -> None:
        self.up: Future[None] = Future()
        self.ended: Future[None] = Future()
        self.posted: deque[tuple[torch.Tensor, Future[None]]] = deque()
        self._passage = passage
        self._why = ""

    def post(self, payload: torch.Tensor) -> Future[None]:
        done: Future[None] = Future()
        if self._why:
            done.set_exception(LinkDown(self._why))
        else:
            self.posted.append((payload, done))
            self._passage.advance()
        return done

    def fail(self, why: str) -> None:
        self._passage.break_off(why)

    def lose(self, why: str) -> None:
        """The passage is broken."""
        self._why = why
        waiting = [done for _, done in self.posted]
        for future in waiting if self.up.done() else [self.up]:
            future.set_exception(LinkDown(why))
        self.posted.clear()
        self.ended.set_result(None)
