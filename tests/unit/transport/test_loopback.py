"""Both ends of a link over the loopback: the life of payloads, every fault, and what is kept or given back."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from pdserve.errors import Incompatible, LinkDown, ProtocolError
from pdserve.membership import WorkerInfo
from pdserve.model_card import KvLayout, ModelCard
from pdserve.request import Incarnation, WorkerId
from transport.base import LinkConfig, Own, ReceiveLinks, SendLinks
from transport.loopback import Loopback
from transport.protocol import Announce, Hello
from transport.receive import DecodeLinks, DecodeOffer
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
async def pair(config: LinkConfig = CONFIG) -> AsyncIterator[Pair]:
    loopback = Loopback(config)
    decode = DecodeLinks(Own(DECODE, Incarnation("d1"), CARD), config, loopback)
    loopback.add(DECODE, decode)
    prefill = PrefillLinks(Own(WorkerId("prefill-0"), Incarnation("p1"), CARD), config, loopback, loopback)
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


async def test_a_payload_lands() -> None:
    async with pair() as p:
        pushed = push(p.link, 7)
        offer = await p.offer()
        assert (offer.meta, offer.num_bytes) == (b"\x07", 8)
        offer.land()
        slot = await offer.landed
        assert slot is not None
        assert slot.buffer.tolist() == [7] * 8
        assert await pushed is True
        slot.give_back()
        slot.give_back()
        assert p.prefill.links_up() == {DECODE: "d1"}


async def test_every_slot_is_used_and_comes_back() -> None:
    async with pair() as p:
        for round_ in range(3):
            pushes = [push(p.link, 10 * round_ + i) for i in range(4)]
            assert p.link.try_slot() is None
            for i in range(4):
                offer = await p.offer()
                assert offer.meta == bytes([10 * round_ + i])
                offer.land()
                slot = await offer.landed
                assert slot is not None
                assert slot.buffer[0] == 10 * round_ + i
                slot.give_back()
            assert await asyncio.gather(*pushes) == [True] * 4


async def test_ready_waits_for_a_slot_of_the_link_and_scrap_for_nothing() -> None:
    async with pair() as p:
        held = []
        for value in range(4):
            pushed = push(p.link, value)
            offer = await p.offer()
            offer.land()
            held.append(await offer.landed)
            await pushed
        late, scrapped = push(p.link, 4), push(p.link, 5)
        first, second = await p.offer(), await p.offer()
        first.land()
        second.scrap("dead ticket")
        assert await scrapped is False
        assert await second.landed is None
        await asyncio.sleep(0.01)
        assert not first.landed.done()
        assert held[2] is not None
        await asyncio.to_thread(held[2].give_back)
        slot = await asyncio.wait_for(first.landed, 1)
        assert slot is not None
        assert slot.buffer[0] == 4
        assert await late is True


async def test_cancelling_a_push_stops_nothing() -> None:
    async with pair() as p:
        task = asyncio.ensure_future(push(p.link, 3))
        offer = await p.offer()
        task.cancel()
        offer.land()
        slot = await offer.landed
        assert slot is not None
        assert slot.buffer[0] == 3
        await asyncio.sleep(0)
        assert task.cancelled()
        slots = [p.link.try_slot() for _ in range(4)]
        assert None not in slots


async def test_cancelling_the_wait_for_a_landing_costs_no_slot() -> None:
    async with pair() as p:
        for value in range(9):
            p.loopback.hold()
            pushed = push(p.link, value)
            offer = await p.offer()
            offer.land()
            waiter = asyncio.ensure_future(offer.landed)
            waiter.cancel()
            p.loopback.release()
            assert await asyncio.wait_for(pushed, 1)


async def test_an_offer_is_decided_once() -> None:
    async with pair() as p:
        pushed = push(p.link, 1)
        offer = await p.offer()
        offer.land()
        for again in (offer.land, lambda: offer.scrap("changed my mind")):
            with pytest.raises(ProtocolError, match="once"):
                again()
        assert await pushed


async def test_an_offer_that_nobody_decides_ends_the_link() -> None:
    async with pair(replace(CONFIG, push_timeout_s=0.05)) as p:
        pushed = push(p.link, 1)
        offer = await p.offer()
        with pytest.raises(LinkDown, match=r"not landed in 0\.05 s"):
            await pushed
        with pytest.raises(LinkDown):
            await asyncio.wait_for(offer.landed, 1)


async def test_ends_and_aborts_travel() -> None:
    async with pair() as p:
        pushed = push(p.link, 1)
        p.link.end(b"t1", "")
        p.link.end(b"t2", "gave up")
        ends = p.decode.ends()
        assert [await anext(ends), await anext(ends)] == [(b"t1", ""), (b"t2", "gave up")]
        offer = await p.offer()
        offer.abort("no room")
        assert await anext(p.prefill.aborts()) == ("d1", b"\x01", "no room")
        offer.scrap("no room")
        assert await pushed is False


async def test_an_abort_on_a_dead_link_is_lost_and_never_reaches_the_next() -> None:
    async with pair() as p:
        link, lost = p.link, push(p.link, 1)
        offer = await p.offer()
        offer.abort("said before the link died, heard after")
        link.fail("the test cut it")
        offer.abort("said on a dead link")
        with pytest.raises(LinkDown):
            await lost
        await p.prefill.wait_up(DECODE, 1)
        pushed = push(p.link, 2)
        offer = await p.offer()
        offer.abort("no room")
        offer.scrap("no room")
        assert await pushed is False
        assert await anext(p.prefill.aborts()) == ("d1", b"\x02", "no room")


@pytest.mark.parametrize("num_bytes", [0, 65])
async def test_a_push_of_a_wrong_size_harms_nothing(num_bytes: int) -> None:
    async with pair() as p:
        for _ in range(5):
            slot = p.link.try_slot()
            assert slot is not None
            with pytest.raises(ProtocolError):
                p.link.push(slot, num_bytes, b"")
        pushed = push(p.link, 1)
        (await p.offer()).land()
        assert await pushed


async def test_corruption_is_seen_in_the_payload_named_and_no_other() -> None:
    async with pair() as p:
        p.loopback.corrupt(payload=1, byte=3)
        arrived = []
        for _ in range(3):
            pushed = push(p.link, 1)
            offer = await p.offer()
            offer.land()
            slot = await offer.landed
            await pushed
            assert slot is not None
            arrived.append(slot.buffer.tolist())
        assert arrived == [[1] * 8, [1, 1, 1, 0xFE, 1, 1, 1, 1], [1] * 8]


async def test_held_payloads_arrive_on_release() -> None:
    async with pair() as p:
        p.loopback.hold()
        pushed = asyncio.ensure_future(push(p.link, 1))
        (await p.offer()).land()
        await asyncio.sleep(0.01)
        assert not pushed.done()
        p.loopback.release()
        assert await asyncio.wait_for(pushed, 1)


@pytest.mark.parametrize("fault", ["cut", "drop", "protocol"])
async def test_a_fault_fails_both_ends_and_the_link_comes_back(fault: str) -> None:
    async with pair() as p:
        link = p.link
        p.loopback.hold()
        pushed, waiting = push(link, 1), push(link, 2)
        offer, undecided = await p.offer(), await p.offer()
        offer.land()
        match fault:
            case "cut":
                await asyncio.sleep(0.01)
                p.loopback.cut("pulled the plug")
            case "drop":
                p.loopback.drop(0)
                p.loopback.release()
            case "protocol":
                link._line.say(Announce(17, 8, b""))  # a sequence number out of turn
        for lost in (pushed, waiting, offer.landed, undecided.landed):
            with pytest.raises(LinkDown):
                await asyncio.wait_for(lost, 1)
        assert link.try_slot() is None
        undecided.land()  # too late, harmless
        offer.abort("too late")
        p.loopback.release()
        await p.prefill.wait_up(DECODE, 1)
        with pytest.raises(LinkDown):
            push_on_dead(link, p.link)
        again = push(p.link, 9)
        (await p.offer()).land()
        assert await again


def push_on_dead(dead: PrefillLink, live: PrefillLink) -> Awaitable[bool]:
    slot = live.try_slot()
    assert slot is not None
    slot.give_back()
    return dead.push(slot, 1, b"")


async def test_a_link_is_to_one_incarnation() -> None:
    async with pair() as p:
        with pytest.raises(LinkDown, match="incarnation d1, not to d2"):
            p.prefill.link(DECODE, Incarnation("d2"))
        link = p.link
        lost = push(link, 1)
        p.prefill.connect(peer("d2"))  # membership is ahead of the worker itself
        with pytest.raises(LinkDown, match="replaced"):
            await lost
        with pytest.raises(LinkDown, match="is incarnation d1 now, not d2"):
            await p.prefill.wait_up(DECODE, 0.1)


async def test_forget_closes_and_connect_is_idempotent() -> None:
    async with pair() as p:
        link = p.link
        p.prefill.connect(peer())
        assert p.link is link
        p.prefill.forget(DECODE)
        assert p.prefill.links_up() == {}
        with pytest.raises(LinkDown, match="there is no link"):
            p.prefill.link(DECODE, Incarnation("d1"))
        slot = link.try_slot()
        assert slot is None
        p.prefill.connect(peer())
        await p.prefill.wait_up(DECODE, 1)


async def test_a_difference_is_logged_once_and_not_retried(caplog: pytest.LogCaptureFixture) -> None:
    other = replace(CARD, kv_layout=replace(LAYOUT, page_tokens=8))
    async with pair() as p:
        for _ in range(3):
            p.prefill.connect(peer(card=other))
        with pytest.raises(Incompatible, match="page_tokens"):
            await p.prefill.wait_up(DECODE, 1)
        with pytest.raises(Incompatible):
            p.prefill.link(DECODE, Incarnation("d1"))
        assert sum("page_tokens" in record.message for record in caplog.records) == 1


async def test_decode_refuses_other_settings_and_prefill_gives_up() -> None:
    async with pair() as p:
        config = replace(CONFIG, slot_bytes=32)
        other = PrefillLinks(Own(WorkerId("prefill-1"), Incarnation("x"), CARD), config, p.loopback, p.loopback)
        other.connect(peer())
        with pytest.raises(Incompatible, match="64"):
            await other.wait_up(DECODE, 1)
        await other.close()


@pytest.mark.parametrize("card", ["", "[]", "{}", '{"name": 3}'])
async def test_a_malformed_hello_is_refused(card: str) -> None:
    async def frames() -> AsyncIterator[Hello]:
        yield Hello("e", "prefill-9", "x", card, "gloo", 64, 4)

    async with pair() as p:
        with pytest.raises(ProtocolError, match="model card"):
            await anext(p.decode.serve(frames()))


async def test_close_fails_what_waits() -> None:
    async with pair() as p:
        pushed = push(p.link, 1)
        offer = await p.offer()
        await p.decode.close()
        with pytest.raises(LinkDown, match="decode is closing"):
            await pushed
        with pytest.raises(LinkDown):
            await offer.landed
