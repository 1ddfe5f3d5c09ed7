"""Both ends of one link over the loopback, for the tests of this folder."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pdserve.membership import WorkerInfo
from pdserve.model_card import KvLayout, ModelCard
from pdserve.request import Incarnation, WorkerId
from transport.base import LinkConfig, Own, ReceiveLinks, SendLinks
from transport.loopback import Loopback
from transport.receive import DecodeLinks, DecodeOffer
from transport.seams import Wires
from transport.send import PrefillLink, PrefillLinks

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, page_tokens=4, dtype="float32", page_format="plain")
CARD = ModelCard("toy", 10, 64, (1,), "f00d", LAYOUT, exact=True)
CONFIG = LinkConfig(slot_bytes=64, op_timeout_s=0.2)
DECODE = WorkerId("decode-0")


def peer(incarnation: str = "d1", card: ModelCard = CARD) -> WorkerInfo:
    return WorkerInfo(DECODE, "decode", Incarnation(incarnation), "nowhere:1", 1, card)


def as_workers_see_them(prefill: PrefillLinks, decode: DecodeLinks) -> tuple[SendLinks, ReceiveLinks]:
    """For the type checker."""
    return prefill, decode


@dataclass
class Pair:
    loopback: Loopback
    prefill: PrefillLinks
    decode: DecodeLinks

    @property
    def link(self) -> PrefillLink:
        return self.prefill.link(DECODE, Incarnation("d1"))

    async def offer(self) -> DecodeOffer:
        return await asyncio.wait_for(anext(self.decode.offers()), 1)


@asynccontextmanager
async def pair(config: LinkConfig = CONFIG, wires: Wires | None = None) -> AsyncIterator[Pair]:
    """A link that is up; its control stream is the loopback's, and so is its wire unless other `wires` are given."""
    loopback = Loopback(config)
    decode = DecodeLinks(Own(DECODE, Incarnation("d1"), CARD), config, wires or loopback)
    loopback.add(DECODE, decode)
    prefill = PrefillLinks(Own(WorkerId("prefill-0"), Incarnation("p1"), CARD), config, loopback, wires or loopback)
    prefill.connect(peer())
    await prefill.wait_up(DECODE, 1)
    yield Pair(loopback, prefill, decode)
    await prefill.close()
    await decode.close()
    assert not prefill.fatal.done()
    assert not decode.fatal.done()


def push(link: PrefillLink, value: int, num_bytes: int = 8) -> Awaitable[bool]:
    slot = link.try_slot()
    assert slot is not None
    slot.buffer[:num_bytes] = value
    return link.push(slot, num_bytes, bytes([value]))
