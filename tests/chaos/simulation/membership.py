"""The registry of a run: who is registered, told to every host that follows, each after a delay of its own.

As with Redis: a killed worker stays until its next incarnation replaces it, one that leaves is removed, and while the
registry is away the last view stands.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from pdserve.membership import WorkerInfo
from pdserve.request import Incarnation, WorkerId
from tests.chaos.simulation.network import Network

DELAY_S = (0.002, 0.1)

View = tuple[WorkerInfo, ...]


class Registry:
    """What is registered now."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._members: dict[WorkerId, WorkerInfo] = {}
        self._followers: dict[asyncio.Queue[View], None] = {}
        self._away_until = 0.0

    def register(self, info: WorkerInfo) -> None:
        """Add, or replace an earlier incarnation."""
        self._members[info.id] = info
        self._tell()

    def leave(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """Remove, unless replaced already."""
        if (info := self._members.get(worker)) and info.incarnation == incarnation:
            del self._members[worker]
            self._tell()

    def go_away(self, for_s: float) -> None:
        """Redis is gone for a while."""
        self._away_until = self._network.loop.time() + for_s

    @property
    def view(self) -> View:
        """Sorted by id."""
        return tuple(self._members[worker] for worker in sorted(self._members))

    def follow(self) -> "asyncio.Queue[View]":
        """Views, from now on."""
        queue: asyncio.Queue[View] = asyncio.Queue()
        self._followers[queue] = None
        self._tell_one(queue)
        return queue

    def unfollow(self, queue: "asyncio.Queue[View]") -> None:
        """No more."""
        self._followers.pop(queue, None)

    def _tell(self) -> None:
        for queue in self._followers:
            self._tell_one(queue)

    def _tell_one(self, queue: "asyncio.Queue[View]") -> None:
        now, random = self._network.loop.time(), self._network.random
        wait_s = max(0.0, self._away_until - now) + random.uniform(*DELAY_S)
        self._network.later(wait_s, lambda: self._deliver(queue))

    def _deliver(self, queue: "asyncio.Queue[View]") -> None:
        if queue in self._followers:
            queue.put_nowait(self.view)


@dataclass(frozen=True)
class Following:
    """See pdserve.membership.Membership; of one host."""

    registry: Registry

    async def views(self) -> AsyncGenerator[View, None]:
        """See Membership."""
        queue = self.registry.follow()
        last: View | None = None
        try:
            while True:
                view = await queue.get()
                if view != last:
                    last = view
                    yield view
        finally:
            self.registry.unfollow(queue)
