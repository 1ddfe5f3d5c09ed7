"""Links over NCCL's twin: order, what a wrong size costs, aborts with nobody inside, and memory that comes back."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from pdserve.errors import LinkDown
from tests.unit.transport.nccl_twin import MEMORY_BYTES, Fabric, TwinGroup
from tests.unit.transport.pair import CONFIG, DECODE, Pair, pair, push
from transport.base import LinkConfig
from transport.slots import Quarantine
from transport.torch_dist import RendezvousStore, TorchWires
from transport.wire import Group, TorchWire

NCCL = LinkConfig(backend="nccl", slot_bytes=64, op_timeout_s=3.0)
CPU = torch.device("cpu")


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    """At the end no rule was broken and all memory is back, unless the test has said so."""
    fabric = Fabric()
    yield fabric
    assert fabric.violations == []
    assert fabric.memory_bytes == 0


def wires(fabric: Fabric, config: LinkConfig = NCCL) -> TorchWires:
    return TorchWires(config, CPU, RendezvousStore("127.0.0.1", 5.0), fabric.connect(config))


def ends(fabric: Fabric, config: LinkConfig = NCCL) -> tuple[TorchWire, TorchWire]:
    store, connect = c10d.HashStore(), fabric.connect(config)
    send, receive = (
        TorchWire(lambda: connect(store, "send"), "send"),
        TorchWire(lambda: connect(store, "receive"), "receive"),
    )
    send.up.result(timeout=5)
    receive.up.result(timeout=5)
    return send, receive


def close(*wires: TorchWire) -> None:
    for wire in wires:
        wire.fail("the test is over")
        wire.ended.result(timeout=5)


def filled(num_bytes: int, value: int = 0) -> torch.Tensor:
    return torch.full((num_bytes,), value, dtype=torch.uint8)


async def transfer(p: Pair, value: int) -> None:
    """One payload arrives."""
    pushed = push(p.link, value)
    offer = await p.offer()
    offer.land()
    slot = await asyncio.wait_for(offer.landed, 5)
    assert slot is not None
    assert slot.buffer.tolist() == [value] * 8
    slot.give_back()
    assert await pushed is True


async def test_whole_links_deliver_in_the_order_of_the_readys_and_relinks_leak_nothing(fabric: Fabric) -> None:
    async with pair(NCCL, wires(fabric)) as p:
        pushes = [push(p.link, value) for value in range(4)]
        offers = [await p.offer() for _ in pushes]
        for which in (2, 0, 3, 1):  # decode decides in any order, scraps one
            offers[which].scrap("unwanted") if which == 3 else offers[which].land()
        landed = [await offer.landed for offer in offers]
        assert [slot and int(slot.buffer[0]) for slot in landed] == [0, 1, 2, None]
        assert await asyncio.gather(*pushes) == [True, True, True, False]
        for slot in landed:
            if slot:
                slot.give_back()
        for value in range(5):
            old = p.link
            (p.prefill if value % 2 else p.decode).cut()
            await asyncio.wait({old.down})
            await p.prefill.wait_up(DECODE, 5)
            await transfer(p, value)
        while fabric.memory_bytes > 2 * MEMORY_BYTES:  # an old link's abort is under way
            await asyncio.sleep(0.01)
        assert len(fabric.groups) == 2


def test_only_the_event_tells_that_a_payload_is_there(fabric: Fabric) -> None:
    send, receive = ends(fabric)
    fabric.hold()
    target = filled(8)
    received, sent = receive.post(target), send.post(filled(8, 7))
    time.sleep(0.05)
    assert not received.done()
    assert not sent.done()
    fabric.release()
    received.result(timeout=5)
    sent.result(timeout=5)
    assert target.tolist() == [7] * 8
    close(send, receive)


def test_a_wrong_size_fails_its_link_at_the_timeout_and_nothing_else(fabric: Fabric) -> None:
    (send, receive), others = ends(fabric, replace(NCCL, op_timeout_s=0.5)), ends(fabric)
    first, target = filled(8), filled(16)
    delivered = [receive.post(first), send.post(filled(8, 1))]
    lost = [receive.post(target), send.post(filled(8, 2)), receive.post(filled(8)), send.post(filled(8, 3))]
    for done in delivered:
        done.result(timeout=5)
    for done in lost:
        with pytest.raises(LinkDown, match=r"more than 0\.5 s"):
            done.result(timeout=5)
    assert (first.tolist(), target.tolist()) == ([1] * 8, [0] * 16)
    for end in (send, receive):
        end.ended.result(timeout=5)
    target = filled(8)
    for done in (others[1].post(target), others[0].post(filled(8, 9))):
        done.result(timeout=5)
    assert target.tolist() == [9] * 8
    close(*others)


def post_many(wire: TorchWire) -> None:
    for _ in range(10):
        wire.post(filled(8))


def test_no_abort_while_a_thread_posts_or_looks(fabric: Fabric) -> None:
    fabric.post_s = 0.001
    for round_ in range(10):
        send, receive = ends(fabric)
        poster = threading.Thread(target=post_many, args=(receive,))
        poster.start()
        time.sleep(0.0005 * round_)
        close(receive, send)
        poster.join(5)


def test_the_twin_sees_an_abort_with_a_thread_inside() -> None:
    fabric = Fabric()
    group = TwinGroup(fabric, c10d.HashStore(), 0)
    with group.inside("a post"), pytest.raises(RuntimeError, match="inside a post"):
        group.abort()
    assert fabric.violations == ["abort while a thread is inside a post"]


def test_payloads_of_a_failed_link_are_kept_until_it_is_aborted(fabric: Fabric) -> None:
    send, receive = ends(fabric, replace(NCCL, op_timeout_s=60))  # not waited for: a failed link is aborted at once
    fabric.may_abort.clear()
    target = filled(8)
    memory = weakref.ref(target)
    done = receive.post(target)
    del target
    receive.fail("the control stream broke")
    with pytest.raises(LinkDown, match="control stream"):
        done.result(timeout=1)
    time.sleep(0.05)
    gc.collect()
    assert memory() is not None
    assert not receive.ended.done()
    fabric.may_abort.set()
    receive.ended.result(timeout=5)
    gc.collect()
    assert memory() is None
    close(send)


def lonely(fabric: Fabric) -> tuple[c10d.Store, TorchWire]:
    """A wire whose peer does not come."""
    store, connect = c10d.HashStore(), fabric.connect(NCCL)
    return store, TorchWire(lambda: connect(store, "send"), "send")


def test_a_rendezvous_that_torch_gives_up_is_aborted(fabric: Fabric) -> None:
    fabric.give_up_s = 0.05
    _, wire = lonely(fabric)
    with pytest.raises(LinkDown, match="NCCL timeout"):
        wire.up.result(timeout=5)
    wire.ended.result(timeout=5)
    assert not fabric.groups


def test_a_wire_that_failed_before_its_rendezvous_enters_none(fabric: Fabric) -> None:
    may_connect, store = threading.Event(), c10d.HashStore()

    def connect() -> Group:
        may_connect.wait()
        return fabric.connect(NCCL)(store, "send")

    wire = TorchWire(connect, "send")
    wire.fail("forgotten")
    may_connect.set()
    wire.ended.result(timeout=5)


async def test_a_hung_rendezvous_condemns_the_process_unless_the_peer_comes(fabric: Fabric) -> None:
    patient, impatient = Quarantine(limit_s=60), Quarantine(limit_s=0.05)
    store, wire = lonely(fabric)
    while not any(group.calls for group in list(fabric.groups)):
        await asyncio.sleep(0.001)
    assert not wire.up.done()
    wire.fail("forgotten")
    with pytest.raises(LinkDown, match="forgotten"):
        wire.up.result(timeout=0)
    patient.put(wire)
    impatient.put(wire)
    assert "has not ended" in await asyncio.wait_for(impatient.fatal, 5)
    late = TorchWire(lambda: fabric.connect(NCCL)(store, "receive"), "receive")
    await asyncio.wait_for(patient.empty(), 5)  # the peer came, too late to matter: aborted like any other
    assert not patient.fatal.done()
    close(late)


async def test_an_abort_that_hangs_or_fails_condemns_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.torch_dist.NCCL_ABORT_LIMIT_S", 0.1)
    fabric = Fabric()
    for word in ("has not aborted", "could not abort"):
        send, receive = ends(fabric)
        if word == "has not aborted":
            fabric.may_abort.clear()
        else:
            fabric.may_abort.set()
            monkeypatch.setattr(TwinGroup, "abort", lambda self: 1 / 0)
        quarantine = Quarantine()
        for wire in (send, receive):
            wire.fail("over")
            quarantine.put(wire)
        assert word in await asyncio.wait_for(quarantine.fatal, 5)
        await quarantine.empty()


async def test_a_link_that_fails_while_it_connects_is_tried_again(fabric: Fabric) -> None:
    async with pair(CONFIG, wires(fabric)) as p:
        fabric.hold()  # the greeting does not arrive
        old = p.link
        while p.decode.cut():
            await asyncio.wait({old.down})
        while not p.decode.cut():  # the next one, not up yet
            await asyncio.sleep(0.001)
        assert p.prefill.links_up() == {}
        fabric.release()
        await p.prefill.wait_up(DECODE, 5)
        await transfer(p, 1)
