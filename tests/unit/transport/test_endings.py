"""How links end, and what is left of one that has: nothing that the next one could trip over."""

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from pdserve.errors import Incompatible, LinkDown, ProtocolError, Unavailable
from pdserve.membership import WorkerInfo
from pdserve.request import Incarnation, WorkerId
from tests.unit.transport.pair import CARD, CONFIG, DECODE, LAYOUT, pair, peer, push
from transport.base import Own
from transport.loopback import Loopback, LoopbackWire
from transport.protocol import DecodeFrame, Hello, Landed, PrefillFrame
from transport.seams import Address, Control, Side, Wire
from transport.send import PrefillLinks


def prefill_with(control: Control, name: str = "prefill-1") -> PrefillLinks:
    return PrefillLinks(Own(WorkerId(name), Incarnation("x"), CARD), CONFIG, control, Loopback(CONFIG))


async def test_a_scrap_needs_no_reason() -> None:
    async with pair() as p:
        pushed = push(p.link, 1)
        offer = await p.offer()
        offer.scrap("")
        assert await pushed is False
        assert await offer.landed is None


async def test_nothing_is_kept_of_what_landed() -> None:
    async with pair() as p:
        pushed = push(p.link, 1)
        offer = await p.offer()
        offer.land()
        assert await pushed
        gone = weakref.ref(offer)
        del offer
        gc.collect()
        assert gone() is None


class HangsUp:
    """A decode worker that ends the stream at once; from prefill's end, a control."""

    async def open(self, peer: WorkerInfo, frames: AsyncIterator[PrefillFrame]) -> AsyncGenerator[DecodeFrame, None]:
        for frame in list[DecodeFrame]():
            yield frame


async def test_a_stream_without_a_first_frame_is_refused() -> None:
    async def frames() -> AsyncIterator[Hello]:
        for frame in list[Hello]():
            yield frame

    async with pair() as p:
        with pytest.raises(ProtocolError, match="Hello, not NoneType"):
            await anext(p.decode.serve(frames()))
    prefill = prefill_with(HangsUp())
    prefill.connect(peer())
    with pytest.raises(LinkDown, match="link to decode-0: decode-0 answered Hello with NoneType"):
        await prefill.wait_up(DECODE, 0.1)
    await prefill.close()


async def test_a_new_link_of_the_same_worker_ends_the_old_one() -> None:
    async with pair() as p:
        link = p.link
        other = PrefillLinks(Own(WorkerId("prefill-0"), Incarnation("p2"), CARD), CONFIG, p.loopback, p.loopback)
        other.connect(peer())
        assert "prefill opened a new link" in await asyncio.wait_for(link.down, 1)
        p.prefill.forget(DECODE)  # or the two would take turns
        await other.wait_up(DECODE, 1)
        await asyncio.sleep(0.01)  # the old one is gone at decode too
        assert p.decode.cut() == 1
        await other.close()
        await asyncio.sleep(0.01)
        assert p.decode._lines == {}


async def test_what_was_wrong_with_a_worker_is_forgotten_with_it() -> None:
    async with pair() as p:
        p.prefill.connect(peer(card=replace(CARD, kv_layout=replace(LAYOUT, page_tokens=8))))
        with pytest.raises(Incompatible):
            p.prefill.link(DECODE, Incarnation("d1"))
        p.prefill.forget(DECODE)
        with pytest.raises(LinkDown, match="there is no link"):
            p.prefill.link(DECODE, Incarnation("d1"))
        p.prefill.connect(peer())
        await p.prefill.wait_up(DECODE, 1)


async def test_close_waits_for_the_tasks_of_links() -> None:
    def tasks() -> set[str]:
        return {task.get_name() for task in asyncio.all_tasks()}

    async with pair() as p:
        assert "link to decode-0" in tasks()
        await p.prefill.close()
        assert "link to decode-0" not in tasks()


class LingeringWire:
    """A wire whose thread ends only when it is told to."""

    def __init__(self, wire: LoopbackWire) -> None:
        self._wire = wire
        self.up = wire.up
        self.ended: Future[None] = Future()

    def post(self, payload: torch.Tensor) -> Future[None]:
        return self._wire.post(payload)

    def fail(self, why: str) -> None:
        self._wire.fail(why)


class Lingering:
    """Makes such wires."""

    def __init__(self) -> None:
        self._loopback = Loopback(CONFIG)
        self.address = self._loopback.address
        self.buffers = self._loopback.buffers
        self.made: dict[Side, LingeringWire] = {}

    def make(self, side: Side, epoch: str, store: Address) -> Wire:
        self.made[side] = LingeringWire(self._loopback.make(side, epoch, store))
        return self.made[side]


async def test_close_waits_for_the_threads_of_wires() -> None:
    wires = Lingering()
    async with pair(wires=wires) as p:
        closings: dict[Side, asyncio.Future[None]] = {"send": asyncio.ensure_future(p.prefill.close())}
        await asyncio.sleep(0.05)  # the link is down at both ends
        closings["receive"] = asyncio.ensure_future(p.decode.close())
        await asyncio.sleep(0.05)
        for side, closing in closings.items():
            assert not closing.done()
            wires.made[side].ended.set_result(None)
            await asyncio.wait_for(closing, 1)


class Broken:
    """A control with an error in it."""

    async def open(self, peer: WorkerInfo, frames: AsyncIterator[PrefillFrame]) -> AsyncGenerator[DecodeFrame, None]:
        yield Landed(1 // 0)


async def test_an_error_of_our_own_condemns_the_process() -> None:
    prefill = prefill_with(Broken())
    prefill.connect(peer())
    assert (await asyncio.wait_for(prefill.fatal, 1)).startswith("link to decode-0: ZeroDivisionError: ")
    await prefill.close()


class Absent:
    """Nobody listens; tells when it was tried."""

    def __init__(self) -> None:
        self.tries: asyncio.Queue[float] = asyncio.Queue()

    async def open(self, peer: WorkerInfo, frames: AsyncIterator[PrefillFrame]) -> AsyncGenerator[DecodeFrame, None]:
        self.tries.put_nowait(asyncio.get_running_loop().time())
        raise Unavailable("nobody listens")
        yield Landed(0)


async def test_after_the_last_delay_it_is_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.send.RELINK_DELAYS_S", (0.0, 0.0, 0.02))
    absent = Absent()
    prefill = prefill_with(absent)
    prefill.connect(peer())
    tries = [await asyncio.wait_for(absent.tries.get(), 5) for _ in range(6)]
    assert tries[5] - tries[2] >= 0.059
    await prefill.close()
