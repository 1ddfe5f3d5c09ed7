"""What lies between hosts: messages take time, arrive in order within a call, and are lost when a connection breaks.

A message's life: `Pipe.put` -> on its way, behind those before it -> arrived -> read. A pipe that breaks loses what is
on its way, as a TCP connection does; a stopped host reads nothing, and its peers give it up after `KEEPALIVE_S`.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from tests.chaos.simulation.virtual_loop import Host, VirtualLoop

if TYPE_CHECKING:
    from tests.chaos.simulation.channel import ClientCall
    from tests.chaos.simulation.server import Server

KEEPALIVE_S = 4.0  # pdserve.rpc: a ping every 2 s, an answer within 2 s


@dataclass(frozen=True)
class Weather:
    """How the network is in one run."""

    delay_s: tuple[float, float] = (0.0002, 0.002)  # of a message
    notice_s: tuple[float, float] = (0.0, 0.05)  # until an end learns that its connection broke
    window: int = 4  # messages that may be unread before a writer waits


class Network:
    """All connections of one run."""

    def __init__(self, loop: VirtualLoop, random: Random, weather: Weather) -> None:
        self.loop = loop
        self.random = random
        self.weather = weather
        self.servers: dict[str, Server] = {}  # by address
        self.calls: dict[ClientCall, None] = {}  # open ones
        self.problems: list[str] = []  # servicers that raised what they should not
        self.trace: list[tuple[float, str, object]] = []
        self._context = Context()  # of no host: a message arrives whether or not somebody is awake
        self._apart: dict[frozenset[str], int] = {}  # pairs of hosts between which nothing passes, and the cuts
        self._dammed: list[Callable[[], None]] = []

    def delay(self) -> float:
        """Of one message."""
        return self.random.uniform(*self.weather.delay_s)

    def later(self, delay_s: float, then: Callable[[], None]) -> None:
        """Run it, whoever sleeps."""
        self.loop.call_at(self.loop.now + delay_s, then, context=self._context)

    def note(self, what: str, detail: object) -> None:
        """Into the trace."""
        self.trace.append((self.loop.now, what, detail))

    def are_apart(self, a: Host, b: Host) -> bool:
        """Whether nothing passes between these hosts now."""
        return bool(self._apart) and frozenset((a.name, b.name)) in self._apart

    def dam(self, then: Callable[[], None]) -> None:
        """Try again when some hosts reach each other again."""
        self._dammed.append(then)

    def part(self, a: str, b: str, for_s: float) -> None:
        """Let nothing pass for a while; connections that are not answered in time break."""
        pair = frozenset((a, b))
        self._apart[pair] = self._apart.get(pair, 0) + 1
        if for_s > KEEPALIVE_S:
            self.later(KEEPALIVE_S, lambda: self.break_between(a, b))
        self.later(for_s, lambda: self._join(pair))

    def _join(self, pair: frozenset[str]) -> None:
        self._apart[pair] -= 1
        if not self._apart[pair]:
            del self._apart[pair]
        dammed, self._dammed = self._dammed, []
        for then in dammed:
            then()

    def stop(self, host: Host, for_s: float) -> None:
        """SIGSTOP, then SIGCONT."""
        host.stop()
        if for_s > KEEPALIVE_S:
            self.later(KEEPALIVE_S, lambda: self.break_of(host))
        self.later(for_s, host.cont)

    def break_between(self, a: str, b: str) -> None:
        """All calls between two hosts break."""
        pair = {a, b}
        for call in [call for call in self.calls if {call.client.name, call.server_name} == pair]:
            call.break_off()

    def break_of(self, host: Host) -> None:
        """All calls from and to a host break."""
        for call in [call for call in self.calls if call.client is host or call.server_host is host]:
            call.break_off()

    def notice_s(self) -> float:
        """How long until one end learns that a connection broke."""
        return self.random.uniform(*self.weather.notice_s)


class Pipe:
    """One direction of a call: bytes in order, then one end. `End` is an exception, or None for a good end."""

    def __init__(self, network: Network, sender: Host, receiver: Host, name: str) -> None:
        self._network = network
        self._sender, self._receiver = sender, receiver
        self._name = name
        self._flying: deque[bytes | Exception | None] = deque()
        self._arrived: deque[bytes] = deque()
        self._due_at = 0.0  # of the newest
        self._wake: asyncio.Future[None] | None = None  # of the reader
        self._room: asyncio.Future[None] | None = None  # of the writer
        self.is_closed = False  # nothing more may be put
        self.is_over = False  # nothing more will arrive
        self.end: BaseException | None = None

    def put(self, item: bytes) -> None:
        """Send a message; lost when the pipe is closed."""
        if not self.is_closed:
            self._send(item)

    def close(self, end: Exception | None = None) -> None:
        """Send the end."""
        if not self.is_closed:
            self.is_closed = True
            self._send(end)

    def _send(self, item: bytes | Exception | None) -> None:
        now = self._network.loop.now
        self._due_at = max(self._due_at, now + self._network.delay())
        self._flying.append(item)
        self._network.later(self._due_at - now, self._arrive)

    def _arrive(self) -> None:
        if self._network.are_apart(self._sender, self._receiver):
            self._network.dam(self._arrive)
            return
        if self.is_over or not self._flying:
            return
        item = self._flying.popleft()
        if isinstance(item, bytes):
            self._network.note(self._name, len(item))
            self._arrived.append(item)
            self._awake()
        else:
            self._finish(item)

    def lose(self) -> None:
        """What is on its way is lost, and whatever follows; the reader does not know yet."""
        self.is_closed = True
        self._flying.clear()

    def break_off(self, error: BaseException) -> None:
        """The same, and the reader learns it now."""
        self.lose()
        if not self.is_over:
            self._finish(error)

    def _finish(self, end: BaseException | None) -> None:
        self.is_over = True
        self.end = end
        self._awake()
        self._make_room()

    def _awake(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _make_room(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    @property
    def is_full(self) -> bool:
        """Whether a writer should wait for the reader."""
        return len(self._flying) + len(self._arrived) > self._network.weather.window

    async def room(self) -> None:
        """Wait until the reader is not far behind."""
        while self.is_full and not self.is_over:
            self._room = self._network.loop.create_future()
            await self._room

    async def get(self) -> bytes | None:
        """The next message; None at a good end. Raises what the pipe ended with."""
        while not self._arrived:
            if self.is_over:
                if self.end is not None:
                    raise self.end
                return None
            self._wake = self._network.loop.create_future()
            await self._wake
        item = self._arrived.popleft()
        self._make_room()
        return item
