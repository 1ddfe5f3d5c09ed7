"""Wires with both ends in one process: order, depth, failure at once, and memory that outlives the failure."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from pdserve.errors import ConfigError, LinkDown
from tests.unit.transport.nccl_twin import Fabric
from transport.base import LinkConfig
from transport.seams import Address
from transport.torch_dist import Connect, RendezvousStore, TorchWires, gloo, make_slots
from transport.wire import TorchWire

CONFIG = LinkConfig(slot_bytes=2**16, op_timeout_s=2.0)
CPU = torch.device("cpu")
Ends = tuple[TorchWire, TorchWire]
Backend = Callable[[LinkConfig], Connect]


@pytest.fixture(params=["gloo", "nccl"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """What both must do alike; NCCL is its twin."""
    fabric = Fabric()
    yield gloo if request.param == "gloo" else fabric.connect
    assert fabric.violations == []
    assert fabric.memory_bytes == 0


def make_ends(backend: Backend, op_timeout_s: float = 2.0) -> Ends:
    connect = backend(LinkConfig(slot_bytes=2**16, op_timeout_s=op_timeout_s))
    store = c10d.HashStore()
    send = TorchWire(lambda: connect(store, "send"), "send")
    receive = TorchWire(lambda: connect(store, "receive"), "receive")
    send.up.result(timeout=10)
    receive.up.result(timeout=10)
    return send, receive


def close(*ends: TorchWire) -> None:
    for end in ends:
        end.fail("the test is over")
        end.ended.result(timeout=10)


def pattern(seed: int, num_bytes: int) -> torch.Tensor:
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_payloads_arrive_in_order_four_deep(backend: Backend) -> None:
    send, receive = make_ends(backend)
    sizes = [1, 2**16, 777, 4096] * 5
    targets = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    waiting: list[tuple[Future[None], Future[None]]] = []
    for seed, target in enumerate(targets):
        if len(waiting) == 4:
            for future in waiting.pop(0):
                future.result(timeout=5)
        waiting.append((receive.post(target), send.post(pattern(seed, sizes[seed]))))
    for pair in waiting:
        for future in pair:
            future.result(timeout=5)
    assert all(torch.equal(target, pattern(seed, sizes[seed])) for seed, target in enumerate(targets))
    close(send, receive)


def test_fail_frees_waiters_at_once_and_keeps_the_memory_until_the_thread_has_ended() -> None:
    send, receive = make_ends(gloo, op_timeout_s=1.5)
    target = torch.zeros(100, dtype=torch.uint8)
    memory = weakref.ref(target)
    done = receive.post(target)
    del target
    start = time.monotonic()
    receive.fail("control stream broke")
    with pytest.raises(LinkDown, match="control stream broke"):
        done.result(timeout=0.5)
    assert time.monotonic() - start < 0.5
    del done
    gc.collect()
    assert memory() is not None, "Gloo may still write here"
    assert not receive.ended.done()
    receive.ended.result(timeout=10)
    gc.collect()
    assert memory() is None
    close(send)


def test_an_operation_past_its_deadline_fails_the_wire(backend: Backend) -> None:
    send, receive = make_ends(backend, op_timeout_s=0.3)
    first, second = (receive.post(torch.zeros(8, dtype=torch.uint8)) for _ in range(2))
    for done in (first, second):
        with pytest.raises(LinkDown):
            done.result(timeout=5)
    with pytest.raises(LinkDown):
        receive.post(torch.zeros(8, dtype=torch.uint8)).result(timeout=0)
    receive.ended.result(timeout=5)
    with pytest.raises(LinkDown):
        send.post(torch.zeros(8, dtype=torch.uint8)).result(timeout=5)
    send.ended.result(timeout=5)


def test_idle_is_no_error(backend: Backend) -> None:
    send, receive = make_ends(backend, op_timeout_s=0.4)
    time.sleep(0.9)
    target = torch.zeros(3, dtype=torch.uint8)
    received, sent = receive.post(target), send.post(pattern(1, 3))
    received.result(timeout=5)
    sent.result(timeout=5)
    assert torch.equal(target, pattern(1, 3))
    close(send, receive)


def test_a_peer_that_never_comes_fails_the_connection_in_bounded_time(backend: Backend) -> None:
    store = RendezvousStore("127.0.0.1", 0.5)
    config = LinkConfig(slot_bytes=8, op_timeout_s=0.5)
    wires = TorchWires(config, CPU, store, backend(config))
    wire = wires.make("receive", "epoch", wires.address())
    with pytest.raises(LinkDown):
        wire.up.result(timeout=5)
    wire.ended.result(timeout=5)


def test_fail_during_connecting_frees_the_waiter_at_once() -> None:
    store = RendezvousStore("127.0.0.1", 1.0)
    wires = TorchWires(LinkConfig(slot_bytes=8, op_timeout_s=1.0), CPU, store)
    wire = wires.make("receive", "epoch", wires.address())
    wire.fail("forgotten")
    with pytest.raises(LinkDown, match="forgotten"):
        wire.up.result(timeout=0.2)
    wire.ended.result(timeout=5)


def test_a_dead_store_is_a_link_down() -> None:
    wires = TorchWires(LinkConfig(slot_bytes=8, op_timeout_s=0.3), CPU)
    wire = wires.make("send", "epoch", Address("127.0.0.1", 9))
    with pytest.raises(LinkDown):
        wire.up.result(timeout=10)
    wire.ended.result(timeout=5)


def test_the_store_listens_on_the_given_host_only() -> None:
    store = RendezvousStore("127.0.0.1", 1.0)
    with open("/proc/net/tcp") as table:
        addresses = {line.split()[1] for line in table}
    port = f":{store.address.port:04X}"
    assert {address for address in addresses if address.endswith(port)} == {f"0100007F{port}"}


def test_the_store_outlives_nothing_that_a_wire_needs() -> None:
    store = RendezvousStore("127.0.0.1", 2.0)
    wires = TorchWires(CONFIG, CPU, store)
    address = wires.address()
    receive, send = wires.make("receive", "e", address), wires.make("send", "e", address)
    receive.up.result(timeout=5)
    send.up.result(timeout=5)
    del store, wires
    gc.collect()
    target = torch.zeros(9, dtype=torch.uint8)
    received, sent = receive.post(target), send.post(pattern(3, 9))
    received.result(timeout=5)
    sent.result(timeout=5)
    assert torch.equal(target, pattern(3, 9))
    close(send, receive)


def test_threads_end_with_their_wires(backend: Backend) -> None:
    before = threading.active_count()
    for _ in range(5):
        close(*make_ends(backend))
    time.sleep(0.1)
    assert threading.active_count() <= before


def test_slots_for_the_cpu() -> None:
    slots = make_slots(CONFIG, CPU, 3)
    assert [(slot.dtype, tuple(slot.shape)) for slot in slots] == [(torch.uint8, (2**16,))] * 3


def test_nccl_without_cuda_is_a_config_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("this torch has NCCL")
    with pytest.raises(ConfigError, match="gloo"):
        TorchWires(LinkConfig(backend="nccl"), CPU)
