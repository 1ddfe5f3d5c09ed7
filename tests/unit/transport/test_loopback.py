"""Both ends of a link over the loopback: the life of payloads, and what is kept or given back."""

import asyncio

import pytest

from pdserve.errors import LinkDown, ProtocolError
from pdserve.request import Incarnation
from tests.unit.transport.pair import DECODE, pair, peer, push


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


async def test_held_payloads_arrive_on_release() -> None:
    async with pair() as p:
        p.loopback.hold()
        pushed = asyncio.ensure_future(push(p.link, 1))
        (await p.offer()).land()
        await asyncio.sleep(0.01)
        assert not pushed.done()
        p.loopback.release()
        assert await asyncio.wait_for(pushed, 1)


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
