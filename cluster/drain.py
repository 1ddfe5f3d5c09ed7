"""How a worker leaves: running work finishes or goes on elsewhere, and nobody is surprised.

A drain's life: `begin` (the command, or SIGTERM) -> new work is refused, and beats say so -> what runs finishes ->
after the limit what is left is expelled: its routers resume it on other workers -> the worker holds nothing, what it
said last has been sent -> `run` returns: the worker deregisters and ends for good.

Ray sends workers a SIGTERM only where it ends as a whole, and a SIGKILL 0.1 s later: `up` does not wait for drains.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from pdserve.errors import Draining, PdserveError

SIGTERM_LIMIT_S = 10.0  # who sends a SIGTERM mostly sends a SIGKILL some time later
EXPEL_LIMIT_S = 5.0  # for the engine to obey; after that its end frees everything
CHECK_S = 0.1
LINGER_S = 0.25  # for the last tokens and errors to reach the routers

C = TypeVar("C")
C_contra = TypeVar("C_contra", contravariant=True)


class DrainableWorker(Protocol[C_contra]):
    """What both workers offer."""

    @property
    def num_requests(self) -> int: ...

    def submit(self, command: C_contra) -> None: ...


class Drain(Generic[C]):
    """The way out of one worker; `run` must be running."""

    def __init__(self, worker: DrainableWorker[C], refuse: C, expel: Callable[[PdserveError], C]) -> None:
        """`refuse` is the worker's command to take nothing new; `expel` makes the one that fails all that is left."""
        self._worker = worker
        self._refuse = refuse
        self._expel = expel
        self._begun = asyncio.Event()
        self._due = 0.0  # on the loop's clock

    @property
    def is_draining(self) -> bool:
        """Whether the worker is about to leave."""
        return self._begun.is_set()

    def begin(self, limit_s: float) -> None:
        """Start to leave; a second time may shorten the limit."""
        due = asyncio.get_running_loop().time() + limit_s
        if not self.is_draining:
            self._worker.submit(self._refuse)
        self._due = min(due, self._due) if self.is_draining else due
        self._begun.set()

    async def run(self) -> str:
        """Wait for `begin`; return how it went, once the worker holds nothing or will not let go."""
        await self._begun.wait()
        await self._until_empty()
        num_left = self._worker.num_requests
        if num_left:
            self._worker.submit(self._expel(Draining("the worker has left the cluster, send the request again")))
            self._due = asyncio.get_running_loop().time() + EXPEL_LIMIT_S
            await self._until_empty()
        await asyncio.sleep(LINGER_S)
        return f"drained; {num_left} of its requests go on elsewhere" if num_left else "drained"

    async def _until_empty(self) -> None:
        """Wait until nothing is left, or the time is up."""
        # the count belongs to the engine's thread, which tells nobody; and the limit may change meanwhile
        while self._worker.num_requests and asyncio.get_running_loop().time() < self._due:  # noqa: ASYNC110
            await asyncio.sleep(CHECK_S)
