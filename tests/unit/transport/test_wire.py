"""A wire over a group that does what the test says: what its futures fail with."""

import threading
import weakref

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from pdserve.errors import LinkDown
from transport.wire import TorchWire, brief


class Group:
    """Refuses every payload."""

    def __init__(self) -> None:
        self.is_closed = False

    def meet(self, failed: threading.Event) -> None:
        """At once."""

    def post(self, payload: torch.Tensor) -> c10d.Work:
        raise RuntimeError("connection reset\nand the stack behind it")

    def wait(self, work: c10d.Work, failed: threading.Event) -> None:
        raise AssertionError

    def close(self) -> None:
        self.is_closed = True


PAYLOAD = torch.zeros(4, dtype=torch.uint8)


def test_a_payload_that_the_group_refuses_fails_the_wire_with_the_first_line_of_why() -> None:
    group = Group()
    wire = TorchWire(lambda: group, "send")
    wire.up.result(5)
    for _ in range(2):
        with pytest.raises(LinkDown, match=r"^connection reset$"):
            wire.post(PAYLOAD).result(5)
    wire.ended.result(5)
    assert group.is_closed


def test_nothing_is_posted_before_the_wire_is_up() -> None:
    may_connect = threading.Event()

    def connect() -> Group:
        may_connect.wait(5)
        return Group()

    wire = TorchWire(connect, "receive")
    threads = [thread for thread in threading.enumerate() if thread.name == "link-receive"]
    assert threads
    assert all(thread.daemon for thread in threads), "a wire that hangs keeps no process alive"
    with pytest.raises(LinkDown, match=r"^a payload was posted before the wire was up$"):
        wire.post(PAYLOAD).result(5)
    assert not wire.ended.done()
    may_connect.set()
    wire.ended.result(5)
    with pytest.raises(LinkDown, match="before the wire was up"):
        wire.up.result(0)


def test_nothing_is_kept_of_a_payload_that_is_through() -> None:
    class Open(Group):
        def post(self, payload: torch.Tensor) -> c10d.Work:
            return c10d.Work()

        def wait(self, work: c10d.Work, failed: threading.Event) -> None:
            """It is there at once."""

    wire = TorchWire(Open, "send")
    wire.up.result(5)
    done = wire.post(PAYLOAD)
    done.result(5)
    first = weakref.ref(done)
    del done
    wire.post(PAYLOAD).result(5)  # what the thread holds in its hand is this one
    assert first() is None
    wire.fail("over")
    wire.ended.result(5)


def test_a_group_that_cannot_be_made_says_why() -> None:
    def connect() -> Group:
        raise RuntimeError("no route to host\nand the stack behind it")

    wire = TorchWire(connect, "send")
    with pytest.raises(LinkDown, match=r"^no route to host$"):
        wire.up.result(5)
    wire.ended.result(5)


def test_a_peer_that_is_not_met_says_why() -> None:
    class Alone(Group):
        def meet(self, failed: threading.Event) -> None:
            raise RuntimeError("nobody came")

    wire = TorchWire(Alone, "receive")
    with pytest.raises(LinkDown, match=r"^nobody came$"):
        wire.up.result(5)
    wire.ended.result(5)


def test_a_group_that_cannot_be_closed_is_what_the_wire_ends_with() -> None:
    class Stuck(Group):
        def close(self) -> None:
            raise RuntimeError("somebody is inside")

    wire = TorchWire(Stuck, "send")
    wire.up.result(5)
    wire.fail("over")
    with pytest.raises(RuntimeError, match="somebody is inside"):
        wire.ended.result(5)


def test_an_error_without_words_is_named() -> None:
    assert brief(KeyError()) == "KeyError"
    assert brief(RuntimeError("x" * 300)) == "x" * 200
