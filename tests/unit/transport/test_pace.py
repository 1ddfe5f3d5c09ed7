"""Slow links: nothing arrives too soon, the order holds, deadlines hold, and the slow time ends."""

import asyncio
from dataclasses import replace

import pytest

from pdserve.errors import InvalidRequest, LinkDown
from tests.unit.transport.pair import CONFIG, DECODE, Pair, pair, push


async def land(p: Pair) -> int:
    """The next payload's value, once it is there."""
    offer = await p.offer()
    offer.land()
    slot = await asyncio.wait_for(offer.landed, 5)
    assert slot is not None
    value = int(slot.buffer[0])
    slot.give_back()
    return value


async def test_payloads_take_their_time_and_keep_their_order() -> None:
    async with pair() as p:
        start = asyncio.get_running_loop().time()
        p.prefill.slow(bytes_per_s=160, for_s=60)
        pushes = [push(p.link, value) for value in range(3)]  # 8 bytes each: 50 ms
        assert await asyncio.gather(*(land(p) for _ in pushes)) == [0, 1, 2]
        assert await asyncio.gather(*pushes) == [True] * 3
        assert asyncio.get_running_loop().time() - start >= 0.149


async def test_when_the_slow_time_is_over_all_that_waits_goes_in_order() -> None:
    async with pair() as p:
        p.prefill.slow(bytes_per_s=0.1, for_s=0.1)  # 80 s for each payload
        pushes = [push(p.link, value) for value in range(3)]
        landings = [asyncio.ensure_future(land(p)) for _ in pushes]
        await asyncio.sleep(0.05)
        assert not any(landing.done() for landing in landings)
        assert await asyncio.gather(*landings) == [0, 1, 2]
        assert await asyncio.gather(*pushes) == [True] * 3


async def test_the_latest_order_counts_from_the_next_payload() -> None:
    async with pair() as p:
        p.prefill.slow(bytes_per_s=80, for_s=60)
        pushes = [push(p.link, value) for value in range(2)]
        landings = [asyncio.ensure_future(land(p)) for _ in pushes]
        await asyncio.sleep(0.01)
        p.prefill.slow(bytes_per_s=80, for_s=0)
        assert await asyncio.gather(*landings, *pushes) == [0, 1, True, True]


async def test_the_push_deadline_holds_and_the_next_link_is_slow_too() -> None:
    async with pair(replace(CONFIG, push_timeout_s=0.1)) as p:
        p.prefill.slow(bytes_per_s=1, for_s=60)
        for _ in range(2):
            pushed, offer = push(p.link, 1), await p.offer()
            offer.land()
            with pytest.raises(LinkDown, match=r"not landed in 0\.1 s"):
                await pushed
            with pytest.raises(LinkDown):
                await offer.landed
            await p.prefill.wait_up(DECODE, 1)
        assert p.loopback.num_arrived == 0


async def test_a_cut_ends_the_wait_too() -> None:
    failures: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    async with pair() as p:
        p.prefill.slow(bytes_per_s=160, for_s=60)
        lost, offer = push(p.link, 1), await p.offer()
        offer.land()
        await asyncio.sleep(0)
        p.prefill.cut()
        with pytest.raises(LinkDown):
            await lost
        await asyncio.sleep(0.1)  # 50 ms for the payload
        assert failures == []
        assert p.loopback.num_arrived == 0


@pytest.mark.parametrize("bytes_per_s", [0, -1, float("nan")])
async def test_a_rate_of_nothing_is_refused(bytes_per_s: float) -> None:
    async with pair() as p:
        with pytest.raises(InvalidRequest, match="bytes_per_s: must be more than 0"):
            p.prefill.slow(bytes_per_s, 1)
