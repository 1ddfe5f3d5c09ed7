"""Both ends of a link over the loopback: every fault, what it ends, and that the link comes back."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from dataclasses import replace

import pytest

from pdserve.errors import Incompatible, LinkDown, ProtocolError
from pdserve.membership import WorkerInfo
from pdserve.plain import to_plain
from pdserve.request import Incarnation, WorkerId
from tests.unit.transport.pair import CARD, CONFIG, DECODE, LAYOUT, pair, peer, push
from transport.base import Own
from transport.loopback import Loopback
from transport.protocol import Announce, DecodeFrame, Hello, Landed, PrefillFrame
from transport.receive import DecodeLinks
from transport.send import PrefillLink, PrefillLinks


async def test_an_offer_that_nobody_decides_ends_the_link() -> None:
    async with pair(replace(CONFIG, push_timeout_s=0.05)) as p:
        pushed = push(p.link, 1)
        offer = await p.offer()
        with pytest.raises(LinkDown, match=r"not landed in 0\.05 s"):
            await pushed
        with pytest.raises(LinkDown):
            await asyncio.wait_for(offer.landed, 1)


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
        with pytest.raises(LinkDown, match=link.down.result()):
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


async def test_an_end_that_is_not_there_is_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.send.RELINK_DELAYS_S", (0.0, 0.01))
    async with pair() as p:
        late = Loopback(CONFIG)
        other = PrefillLinks(Own(WorkerId("prefill-1"), Incarnation("x"), CARD), CONFIG, late, p.loopback)
        other.connect(peer())
        with pytest.raises(LinkDown, match="link to decode-0: nobody listens at nowhere:1"):
            await other.wait_up(DECODE, 0.1)
        late.add(DECODE, p.decode)
        await other.wait_up(DECODE, 1)
        await other.close()


class Silence:
    """A decode worker that takes a call and says nothing; from prefill's end, a control."""

    async def open(self, peer: WorkerInfo, frames: AsyncIterator[PrefillFrame]) -> AsyncGenerator[DecodeFrame, None]:
        await asyncio.Event().wait()
        yield Landed(0)


async def test_an_end_that_says_nothing_is_given_up() -> None:
    own = Own(WorkerId("prefill-1"), Incarnation("x"), CARD)
    prefill = PrefillLinks(own, CONFIG, Silence(), Loopback(CONFIG))
    prefill.connect(peer())
    with pytest.raises(LinkDown, match=r"has not answered in 0\.2 s"):
        await prefill.wait_up(DECODE, 0.5)
    await prefill.close()

    async def frames() -> AsyncIterator[Hello]:
        await asyncio.Event().wait()
        yield Hello("e", "prefill-9", "x", "", "gloo", 64, 4)

    decode = DecodeLinks(Own(DECODE, Incarnation("d1"), CARD), CONFIG, Loopback(CONFIG))
    async with asyncio.timeout(2):
        with pytest.raises(ProtocolError, match=r"no Hello within 0\.2 s"):
            await anext(decode.serve(frames()))


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


async def test_decode_refuses_another_card_by_itself() -> None:
    other = replace(CARD, kv_layout=replace(LAYOUT, page_tokens=8))

    async def frames() -> AsyncIterator[Hello]:
        yield Hello("e", "prefill-9", "x", json.dumps(to_plain(other)), "gloo", 64, 4)

    async with pair() as p:
        with pytest.raises(Incompatible, match="page_tokens"):
            await anext(p.decode.serve(frames()))


async def test_close_fails_what_waits() -> None:
    async with pair() as p:
        pushed = push(p.link, 1)
        offer = await p.offer()
        await p.decode.close()
        for lost in (pushed, offer.landed):
            with pytest.raises(LinkDown, match="decode is closing"):
                await lost
        with pytest.raises(LinkDown, match="link to decode-0: decode is closing"):
            await p.prefill.wait_up(DECODE, 0.2)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_cut_on_demand_fails_what_waits_and_links_come_back(side: str) -> None:
    async with pair() as p:
        link, lost = p.link, push(p.link, 1)
        offer = await p.offer()
        end = p.prefill if side == "prefill" else p.decode
        assert [end.cut(), end.cut()] == [1, 0]
        with pytest.raises(LinkDown, match="cut by chaos"):  # decode's reason travels to prefill
            await asyncio.wait_for(lost, 1)
        with pytest.raises(LinkDown):
            await asyncio.wait_for(offer.landed, 1)
        await p.prefill.wait_up(DECODE, 1)
        assert p.link is not link
        again = push(p.link, 2)
        (await p.offer()).land()
        assert await again


async def test_there_may_be_nothing_to_cut() -> None:
    async with pair() as p:
        p.prefill.forget(DECODE)
        assert p.prefill.cut() == 0
        with pytest.raises(LinkDown, match=r"no link to decode-0 after 0\.01 s"):
            await p.prefill.wait_up(DECODE, 0.01)
