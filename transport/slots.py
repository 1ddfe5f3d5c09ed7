"""Slots: the staging buffers of one link, and what happens to them when it dies.

A slot's life: free -> taken (filled or emptied by the engine's thread) -> given back. A link never gets the slots of
another one: when it goes down its slots are never handed out again, and their memory lives on for as long as the thread
of its wire refers to it. So no late write of a dead link can reach a live payload; `Quarantine` sees to it that those
threads end.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import torch

from transport.seams import Wire

QUARANTINE_LIMIT_S = 30.0


class Slot:
    """One buffer on loan. `give_back` may be called from any thread; only the first call counts."""

    def __init__(self, buffer: torch.Tensor, home: "SlotPool") -> None:
        self.buffer = buffer  # uint8 [slot_bytes]
        self._home: SlotPool | None = home

    def give_back(self) -> None:
        """Return the buffer to its link."""
        home, self._home = self._home, None
        if home is not None:
            home.put(self.buffer)


class SlotPool:
    """The free slots of one link. Safe to use from any thread: a deque's pop and append are atomic."""

    def __init__(self, buffers: Sequence[torch.Tensor], on_free: Callable[[], None] | None = None) -> None:
        self._free = deque(buffers)
        self._on_free = on_free

    def take(self) -> Slot | None:
        """A free slot, or None."""
        try:
            return Slot(self._free.popleft(), self)
        except IndexError:
            return None

    def put(self, buffer: torch.Tensor) -> None:
        """Called by `Slot.give_back`."""
        self._free.append(buffer)
        if self._on_free is not None:
            self._on_free()


class Quarantine:
    """Waits until the threads of dead wires have ended.

    `fatal` gets a message when one does not end in time: its process can only be saved by a restart.
    """

    def __init__(self, limit_s: float = QUARANTINE_LIMIT_S) -> None:
        self.fatal: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._limit_s = limit_s
        self._watches: set[asyncio.Task[None]] = set()
        self._wires: set[Wire] = set()  # and with them the memory that they may touch, for as long as they may

    def put(self, wire: Wire) -> None:
        """Watch a wire that has failed."""
        self._wires.add(wire)
        watch = asyncio.create_task(self._watch(wire))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _watch(self, wire: Wire) -> None:
        ended = asyncio.wrap_future(wire.ended)
        await asyncio.wait({ended}, timeout=self._limit_s)
        if not ended.done():
            self.condemn(f"the thread of a dead link has not ended in {self._limit_s:g} s")
        elif error := ended.exception():
            self.condemn(str(error))
        else:
            self._wires.discard(wire)

    def condemn(self, why: str) -> None:
        """This process cannot go on; the first reason stays."""
        if not self.fatal.done():
            self.fatal.set_result(why)

    async def empty(self) -> None:
        """Wait for all watched wires; bounded by the limit of each."""
        if self._watches:
            await asyncio.wait(self._watches)
