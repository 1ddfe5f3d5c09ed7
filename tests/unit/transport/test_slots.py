"""Slots and the quarantine of dead wires."""

import asyncio
import gc
import weakref
from concurrent.futures import Future

import torch

from pdserve.errors import LinkDown
from transport.slots import Quarantine, SlotPool


class DeadWire:
    def __init__(self) -> None:
        self.up: Future[None] = Future()
        self.ended: Future[None] = Future()

    def post(self, payload: torch.Tensor) -> Future[None]:
        raise AssertionError

    def fail(self, why: str) -> None:
        raise AssertionError


def test_a_slot_is_given_back_once() -> None:
    freed = []
    pool = SlotPool([torch.zeros(4, dtype=torch.uint8)], on_free=lambda: freed.append(1))
    slot = pool.take()
    assert slot is not None
    assert pool.take() is None
    slot.give_back()
    slot.give_back()
    assert freed == [1]
    assert pool.take() is not None
    slot.give_back()  # of its second life it knows nothing
    assert pool.take() is None


async def test_a_thread_that_ends_in_time_is_no_matter() -> None:
    quarantine, wire = Quarantine(limit_s=5), DeadWire()
    quarantine.put(wire)
    asyncio.get_running_loop().call_later(0.01, wire.ended.set_result, None)
    await asyncio.wait_for(quarantine.empty(), 1)
    assert not quarantine.fatal.done()


async def test_a_thread_that_does_not_end_is_fatal() -> None:
    quarantine, wire = Quarantine(limit_s=0.02), DeadWire()
    quarantine.put(wire)
    assert "has not ended in 0.02 s" in await asyncio.wait_for(quarantine.fatal, 1)
    wire.ended.set_result(None)


async def test_an_abort_that_missed_its_deadline_is_fatal_at_once() -> None:
    quarantine, wire = Quarantine(limit_s=60), DeadWire()
    quarantine.put(wire)
    wire.ended.set_exception(LinkDown("NCCL has not aborted"))
    assert "NCCL" in await asyncio.wait_for(quarantine.fatal, 1)
    await quarantine.empty()


async def test_a_wire_is_kept_for_as_long_as_it_may_touch_memory() -> None:
    quarantine = Quarantine(limit_s=60)
    wires = [DeadWire(), DeadWire()]
    memories = [weakref.ref(wire) for wire in wires]
    for wire in wires:
        quarantine.put(wire)
    wires[0].ended.set_result(None)
    wires[1].ended.set_exception(LinkDown("NCCL has not aborted"))
    await quarantine.empty()
    del wire, wires
    gc.collect()
    assert [memory() is None for memory in memories] == [True, False]
