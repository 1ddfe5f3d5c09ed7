"""The decode side of links.

A link's life is one control stream: `serve` checks Hello, answers Welcome, connects the wire, and ends when the link is
down. An offer's life: announced -> landing (waits for a free slot of its link, and for nothing else) or scrapped ->
ready, its receive posted -> landed -> its slot given back.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator

import torch

from pdserve.errors import Incompatible, LinkDown, ProtocolError
from pdserve.model_card import ModelCard, difference
from pdserve.plain import from_plain
from transport.base import LinkConfig, Own
from transport.line import Line, Outbox
from transport.protocol import Abort, Announce, DecodeFrame, End, Hello, PrefillFrame, ReceiveEnd, Welcome
from transport.seams import Wires
from transport.slots import Quarantine, Slot, SlotPool


class LandedSlot:
    """See base.ReceiveSlot."""

    def __init__(self, slot: Slot, num_bytes: int) -> None:
        self.buffer = slot.buffer[:num_bytes]
        self.give_back = slot.give_back


class DecodeOffer:
    """See base.Offer."""

    def __init__(self, link: "DecodeLink", frame: Announce) -> None:
        self.meta = frame.meta
        self.num_bytes = frame.num_bytes
        self.seq = frame.seq
        self.landed: asyncio.Future[LandedSlot | None] = asyncio.get_running_loop().create_future()
        self._link = link
        self._is_decided = False

    def land(self) -> None:
        self._decide()
        self._link.land(self)

    def scrap(self, reason: str) -> None:
        self._decide()
        self._link.scrap(self, reason)

    def _decide(self) -> None:
        if self._is_decided:
            raise ProtocolError("an offer is landed or scrapped once")
        self._is_decided = True

    def abort(self, reason: str) -> None:
        self._link.abort(self.meta, reason)


class Arrivals:
    """What all links of one process bring to its worker."""

    def __init__(self) -> None:
        self.offers: asyncio.Queue[DecodeOffer] = asyncio.Queue()  # bounded: num_slots per link
        self.ends: asyncio.Queue[tuple[bytes, str]] = asyncio.Queue()


class DecodeLink:
    """One link that is up, or was."""

    def __init__(
        self, line: Line[DecodeFrame], config: LinkConfig, buffers: list[torch.Tensor], arrivals: Arrivals
    ) -> None:
        self._line = line
        self._end = ReceiveEnd(config.limits)
        self._scratch = buffers.pop()
        self._pool = SlotPool(buffers, on_free=lambda: line.call(self._land_more))
        self._arrivals = arrivals
        self._landing: deque[DecodeOffer] = deque()  # wait for a slot
        self._open: set[DecodeOffer] = set()  # not landed
        line.down.add_done_callback(self._lose_all)

    def take(self, frame: PrefillFrame) -> None:
        """Act on what prefill says. Raises ProtocolError."""
        match frame:
            case Announce():
                self._end.announced(frame)
                offer = DecodeOffer(self, frame)
                self._open.add(offer)
                self._arrivals.offers.put_nowait(offer)
            case End(meta, aborted):
                self._arrivals.ends.put_nowait((meta, aborted))
            case Hello():
                raise ProtocolError("prefill said Hello twice")

    def land(self, offer: DecodeOffer) -> None:
        """Receive it into the next free slot."""
        self._landing.append(offer)
        self._land_more()

    def scrap(self, offer: DecodeOffer, reason: str) -> None:
        """Receive it into memory that nobody reads."""
        self._receive(offer, None, reason or "unwanted")

    def abort(self, meta: bytes, reason: str) -> None:
        """Tell prefill to stop."""
        self._line.say(Abort(meta, reason))

    def _land_more(self) -> None:
        while self._line.is_up and self._landing and (slot := self._pool.take()):
            self._receive(self._landing.popleft(), slot, "")

    def _receive(self, offer: DecodeOffer, slot: Slot | None, scrap: str) -> None:
        """Post first, say ready then: both in the same order for all payloads."""
        if not self._line.is_up:
            return
        ready = self._end.ready(offer.seq, scrap)
        buffer = slot.buffer if slot else self._scratch

        def landed() -> None:
            self._line.say(self._end.landed(offer.seq))
            self._open.discard(offer)
            if not offer.landed.done():
                offer.landed.set_result(LandedSlot(slot, offer.num_bytes) if slot else None)
            elif slot:  # nobody waits any more
                slot.give_back()

        self._line.when_done(self._line.wire.post(buffer[: offer.num_bytes]), landed)
        self._line.say(ready)

    def _lose_all(self, down: asyncio.Future[str]) -> None:
        for offer in self._open:
            if not offer.landed.done():
                offer.landed.set_exception(LinkDown(down.result()))
                offer.landed.exception()  # looked at: its owner may have gone
        self._open.clear()
        self._landing.clear()


class DecodeLinks:
    """All links of one decode worker: see base.ReceiveLinks. Made on a running event loop."""

    def __init__(self, own: Own, config: LinkConfig, wires: Wires) -> None:
        self._own = own
        self._config = config
        self._wires = wires
        self._quarantine = Quarantine()
        self.fatal = self._quarantine.fatal
        self._arrivals = Arrivals()
        self._lines: dict[str, Line[DecodeFrame]] = {}  # by prefill worker
        self._is_closed = False

    async def offers(self) -> AsyncIterator[DecodeOffer]:
        while True:
            yield await self._arrivals.offers.get()

    async def ends(self) -> AsyncIterator[tuple[bytes, str]]:
        while True:
            yield await self._arrivals.ends.get()

    def cut(self, why: str = "cut by chaos") -> int:
        """A fault on demand: fail every link, also those that connect; prefill makes new ones. Returns how many."""
        lines = [line for line in self._lines.values() if line.is_up]
        for line in lines:
            line.fail(why)
        return len(lines)

    async def close(self) -> None:
        self._is_closed = True
        self.cut("decode is closing")
        await self._quarantine.empty()

    async def serve(self, frames: AsyncIterator[PrefillFrame]) -> AsyncGenerator[DecodeFrame, None]:
        """One link: prefill's frames in, ours out. Raises why the link was refused or is down."""
        try:
            async with asyncio.timeout(self._config.op_timeout_s):
                hello = await anext(frames, None)
        except TimeoutError:
            raise ProtocolError(f"no Hello within {self._config.op_timeout_s:g} s") from None
        if not isinstance(hello, Hello):
            raise ProtocolError(f"the first frame of a link is Hello, not {type(hello).__name__}")
        self._check(hello)
        outbox = Outbox[DecodeFrame]()
        line = Line(self._wires.make("receive", hello.epoch, self._wires.address()), outbox)
        self._replace(hello.worker, line)
        try:
            yield self._welcome()
            await line.connected(self._config.op_timeout_s)
            buffers = self._wires.buffers(self._config.num_slots + 1)
            link = DecodeLink(line, self._config, buffers, self._arrivals)
            async with line.listening(frames, link.take):
                async for frame in outbox:
                    yield frame
                raise LinkDown(line.down.result())
        finally:
            line.fail("the control stream broke")
            self._quarantine.put(line.wire)
            if self._lines.get(hello.worker) is line:
                del self._lines[hello.worker]

    def _welcome(self) -> Welcome:
        store = self._wires.address()
        return Welcome(store.host, store.port, self._own.incarnation)

    def _replace(self, worker: str, line: Line[DecodeFrame]) -> None:
        """A prefill worker that opens a new link has lost the old one, even if we have not heard of it yet."""
        if old := self._lines.get(worker):
            old.fail("prefill opened a new link")
        self._lines[worker] = line

    def _check(self, hello: Hello) -> None:
        if self._is_closed:
            raise LinkDown("decode is closing")
        try:
            theirs = from_plain(ModelCard, json.loads(hello.card))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"Hello's model card: {error}") from error
        if found := difference(self._own.card, theirs):
            raise Incompatible(found)
        ours = (self._config.backend, self._config.slot_bytes, self._config.num_slots)
        if ours != (told := (hello.backend, hello.slot_bytes, hello.num_slots)):
            raise Incompatible(f"(backend, slot_bytes, num_slots): {ours} here, {told} there")
