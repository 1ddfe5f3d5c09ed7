"""The bounded queue of a router: requests wait here until a place is found for them.

Order: priority, then those that go on after a fault before new ones, then who is due: the shortest first, and nobody
overtaken for ever (pdserve.due). A request keeps its place and due over all attempts. Only the first in line may try;
whoever changes something that could let it in pokes the room.

Nobody behind the first one could go where it cannot: on every prefill worker at least as much goes before him, and what
resumes is computed before what is new. Decode pages are asked for by the first one alone, so that small requests do
not take them for ever from a large one.
"""

import asyncio
import heapq
from dataclasses import dataclass, field

from pdserve.due import PATIENCE, Arrivals
from pdserve.errors import QueueFull
from router.rank import Arrival, Rank

RETRY_AFTER_S = 1.0


@dataclass(order=True)
class Seat:
    """A place in line."""

    rank: Rank
    poked: asyncio.Event = field(default_factory=asyncio.Event, compare=False)
    has_left: bool = field(default=False, compare=False)


class WaitingRoom:
    """A line of at most `limit` new requests; resumed ones and further choices are let in whatever its length."""

    def __init__(self, limit: int, patience: int = PATIENCE) -> None:
        self._limit = limit
        self._arrivals = Arrivals(patience)
        self._line: list[Seat] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def arrive(self, priority: int, num_tokens: int) -> Arrival:
        """A request with so many prompt tokens to compute comes for the first time."""
        place = self._arrivals.add(num_tokens)
        return Arrival(priority, self._arrivals.due(place, num_tokens), place)

    def enter(self, arrival: Arrival, *, resumes: bool, follows: bool = False) -> Seat:
        """Take a seat; `follows`: for a further choice of a request that is in. Raises QueueFull."""
        if self._num_waiting >= self._limit and not (resumes or follows):
            raise QueueFull(f"{self._num_waiting} requests wait already, the limit is {self._limit}", RETRY_AFTER_S)
        seat = Seat(arrival.rank(resumes=resumes))
        heapq.heappush(self._line, seat)
        self._num_waiting += 1
        self.poke()
        return seat

    def leave(self, seat: Seat) -> None:
        """Give the seat up, wherever in the line it is."""
        seat.has_left = True
        self._num_waiting -= 1
        self.poke()

    def is_first(self, seat: Seat) -> bool:
        """Whether the seat may try."""
        self._drop_left()
        return self._line[0] is seat

    def poke(self) -> None:
        """Something changed: let the first in line try (again)."""
        self._drop_left()
        if self._line:
            self._line[0].poked.set()

    def _drop_left(self) -> None:
        if len(self._line) > 2 * self._num_waiting + 16:  # those who left behind the first one
            self._line = [seat for seat in self._line if not seat.has_left]
            heapq.heapify(self._line)
        while self._line and self._line[0].has_left:
            heapq.heappop(self._line)

    async def turn(self, seat: Seat) -> None:
        """Wait until something changed and the seat is first."""
        while True:
            await seat.poked.wait()  # the caller's deadline bounds it
            seat.poked.clear()
            if self.is_first(seat):
                return
