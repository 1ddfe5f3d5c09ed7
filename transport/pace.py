"""Links that are slower than they could be, on demand: for rehearsed faults and for measurements.

A payload's life: `Lane.run` queues it behind the others of its link -> once first, it waits for as long as its bytes
would take at the rate, at most until the slow time is over -> it is posted. Belongs to the event loop's thread.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from pdserve.errors import InvalidRequest


class Pace:
    """The rate of each link of one process; there is none until `slow`."""

    def __init__(self) -> None:
        self._bytes_per_s = float("inf")
        self._until = 0.0  # of the loop's time

    def slow(self, bytes_per_s: float, for_s: float) -> None:
        """A fault on demand, for links that are and that will be. It replaces the one before, not a wait under way.

        One payload's wait must be shorter than the links' timeouts, or it ends its link. Raises InvalidRequest.
        """
        if not bytes_per_s > 0:
            raise InvalidRequest("bytes_per_s", f"must be more than 0, not {bytes_per_s:g}")
        self._bytes_per_s = bytes_per_s
        self._until = asyncio.get_running_loop().time() + for_s

    def wait_s(self, num_bytes: int) -> float:
        """How long a payload that is first now waits."""
        return min(num_bytes / self._bytes_per_s, self._until - asyncio.get_running_loop().time())


class Lane:
    """The payloads of one link, in order."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def run(self, num_bytes: int, post: Callable[[], None]) -> None:
        """Call `post` when its turn has come: at once, unless links are slow."""
        self._waiting.append((num_bytes, post))
        if len(self._waiting) == 1:
            self._next()

    def _next(self) -> None:
        while self._waiting:
            if (wait_s := self._pace.wait_s(self._waiting[0][0])) > 0:
                asyncio.get_running_loop().call_later(wait_s, self._first)
                return
            self._post()

    def _first(self) -> None:
        self._post()
        self._next()

    def _post(self) -> None:
        _, post = self._waiting.popleft()
        post()  # refused when the link went down meanwhile
