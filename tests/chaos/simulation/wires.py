"""The data path of links between hosts: `transport.seams.Wires`, with what goes wrong on a real one.

A payload's life: posted at both ends -> under way -> copied -> both futures are done, each in its own host. As with
Gloo: a payload that takes more than the operation's timeout fails its end; a wire that has failed may still be written
to until it has `ended`; the peer of a dead process hears it from the control stream, or by the timeout.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch

from pdserve.errors import LinkDown
from tests.chaos.simulation.network import Network
from tests.chaos.simulation.virtual_loop import Host
from transport.base import LinkConfig
from transport.seams import Address, Side


class WireNet:
    """Where the ends of all wires meet, by epoch."""

    def __init__(self, network: Network, config: LinkConfig) -> None:
        self.network = network
        self.config = config
        self.num_arrived = 0
        self.on_arrival: Callable[[torch.Tensor], None] = lambda _: None
        self._passages: dict[str, Passage] = {}

    def attach(self, epoch: str, side: Side, host: Host) -> "SimWire":
        """One end of a wire."""
        passage = self._passages.setdefault(epoch, Passage(self))
        return passage.attach(side, host)

    def cut(self, a: str, b: str) -> int:
        """Break the wires between two hosts; returns how many."""
        found = [passage for passage in self._passages.values() if passage.joins(a, b)]
        for passage in found:
            passage.cut()
        return len(found)

    def forget(self, passage: "Passage") -> None:
        """Both ends have ended."""
        self._passages = {epoch: other for epoch, other in self._passages.items() if other is not passage}

    @property
    def num_open(self) -> int:
        """Wires of which some living end has not ended."""
        return sum(not passage.is_over for passage in self._passages.values())


class HostWires:
    """See seams.Wires; of one host."""

    def __init__(self, net: WireNet, host: Host) -> None:
        self._net = net
        self._host = host

    def address(self) -> Address:
        return Address(self._host.name, 1)

    def make(self, side: Side, epoch: str, store: Address) -> "SimWire":
        return self._net.attach(epoch, side, self._host)

    def buffers(self, count: int) -> list[torch.Tensor]:
        return [torch.zeros(self._net.config.slot_bytes, dtype=torch.uint8) for _ in range(count)]


class Passage:
    """What lies between the two ends of one wire."""

    def __init__(self, net: WireNet) -> None:
        self.net = net
        self.ends: dict[Side, SimWire] = {}
        self._is_busy = False
        self._is_cut = False

    def attach(self, side: Side, host: Host) -> "SimWire":
        """One end; the wire is up when both are there."""
        wire = self.ends[side] = SimWire(self, host)
        if len(self.ends) == 2:
            self.net.network.later(self.net.network.delay(), self._meet)
        return wire

    def _meet(self) -> None:
        for end in self.ends.values():
            if not end.why:
                end.settle(end.up)

    @property
    def is_over(self) -> bool:
        """Whether nobody needs it any more."""
        return all(end.host.is_dead or end.has_ended for end in self.ends.values())

    def joins(self, a: str, b: str) -> bool:
        """Whether these are its two hosts."""
        return {end.host.name for end in self.ends.values()} == {a, b}

    def cut(self) -> None:
        """Nothing passes any more; each end learns it in its own time, or by the timeout of an operation."""
        self._is_cut = True
        network = self.net.network
        for end in self.ends.values():
            if network.random.random() < 0.7:
                network.later(network.notice_s(), end.lose)

    def advance(self) -> None:
        """Start the next payload when both ends have posted it."""
        if len(self.ends) == 2 and not self._is_busy and all(end.posted for end in self.ends.values()):
            self._is_busy = True
            network = self.net.network
            network.later(network.delay() + network.delay(), self._arrive)

    def _arrive(self) -> None:
        send, receive = self.ends["send"], self.ends["receive"]
        network = self.net.network
        if self._is_cut or send.host.is_dead or receive.host.is_dead:
            self._end_failed()
            return
        if send.host.is_stopped or receive.host.is_stopped or network.are_apart(send.host, receive.host):
            network.later(0.05, self._arrive)  # bounded by the timeout of the operation
            return
        self._copy(send, receive)
        self._is_busy = False
        self._end_failed()
        self.advance()

    def _copy(self, send: "SimWire", receive: "SimWire") -> None:
        """Also into a wire that has failed: nobody can call a payload back."""
        (source, sent), (target, received) = send.posted.popleft(), receive.posted.popleft()
        target.copy_(source)
        self.net.on_arrival(target)
        self.net.num_arrived += 1
        send.settle(sent)
        receive.settle(received)
        for end in self.ends.values():
            end.watch()

    def quiet(self, end: "SimWire") -> None:
        """This end has failed: what it has posted is waited out."""
        network = self.net.network
        if not self._is_writing:
            network.later(network.notice_s(), lambda: self._end_idle(end))
        for other in self.ends.values():
            if other is not end and network.random.random() < 0.5:  # a closed socket is noticed, a lost one is not
                network.later(network.notice_s(), other.lose)

    def _end_idle(self, end: "SimWire") -> None:
        if not self._is_writing:  # the peer may have begun meanwhile: then its payload is waited out
            end.ends()

    @property
    def _is_writing(self) -> bool:
        return self._is_busy and not self._is_cut and not any(end.host.is_dead for end in self.ends.values())

    def _end_failed(self) -> None:
        for end in self.ends.values():
            if end.why:
                end.ends()


class SimWire:
    """See seams.Wire."""

    def __init__(self, passage: Passage, host: Host) -> None:
        self.up: Future[None] = _running()
        self.ended: Future[None] = _running()
        self.posted: deque[tuple[torch.Tensor, Future[None]]] = deque()
        self.host = host
        self.why = ""
        self.has_ended = False
        self._passage = passage
        self._network = passage.net.network
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: dict[Future[None], None] = {}

    def post(self, payload: torch.Tensor) -> Future[None]:
        done = _running()
        if self.why:
            done.set_exception(LinkDown(self.why))
            return done
        self.posted.append((payload, done))
        self._waiting[done] = None
        if len(self.posted) == 1:
            self.watch()
        self._passage.advance()
        return done

    def watch(self) -> None:
        """A timeout for the first payload."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.posted and not self.why:
            timeout_s, loop = self._passage.net.config.op_timeout_s, self._network.loop
            why = f"a payload took more than {timeout_s:g} s"
            self._timer = loop.call_later(timeout_s, self.fail, why, context=self.host.own())

    def lose(self) -> None:
        """The peer is gone."""
        if not self.host.is_dead:
            self._network.loop.call_soon(self.fail, "connection closed by peer", context=self.host.own())

    def fail(self, why: str) -> None:
        if self.why:
            return
        self.why = why or "failed"
        self.watch()
        waiting = [*self._waiting, self.up]
        self._waiting.clear()
        for future in waiting:
            self.settle(future, LinkDown(self.why))
        self._passage.quiet(self)

    def ends(self) -> None:
        """Nothing touches the payloads any more."""
        self.settle(self.ended)
        self.has_ended = True
        self.posted.clear()
        if self._passage.is_over:
            self._passage.net.forget(self._passage)

    def settle(self, future: "Future[None]", error: Exception | None = None) -> None:
        """Done, as seen by this host, once; never heard of when the host is dead."""
        self._waiting.pop(future, None)
        if self.host.is_dead or future.done():
            return
        self._network.loop.call_soon(_settle, future, error, context=self.host.own())


def _running() -> "Future[None]":
    """A future that nobody's impatience can cancel."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


def _settle(future: "Future[None]", error: Exception | None) -> None:
    if not future.done():
        future.set_exception(error) if error else future.set_result(None)
