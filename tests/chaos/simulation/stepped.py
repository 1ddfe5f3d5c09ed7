"""What runs a worker's engine in virtual time: step, let the time of the step pass, deliver its update.

The time passes after the step has obeyed its commands and before anybody hears of it, as with a real engine's thread.
After each step the worker's pages are audited.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, Protocol, TypeVar

from cluster.engine_thread import IDLE_WAIT_S, Worker
from pdserve.errors import Preempted
from pdserve.request import Incarnation
from pdserve.vitals import Vitals

U = TypeVar("U")
Update = TypeVar("Update", covariant=True)


class SubmittingWorker(Worker[Update], Protocol[Update]):
    """Both workers."""

    def submit(self, command: Any) -> None: ...


@dataclass
class Speed:
    """Of one engine; faults change it."""

    step_s: tuple[float, float]
    slow_until: float = 0.0
    factor: float = 1.0
    hang_s: float = 0.0  # of the next step


class SteppedEngine(Generic[U]):
    """See the module; `run` must be running."""

    def __init__(self, worker: Any, deliver: Callable[[U], None], speed: Speed, random: Random) -> None:
        self.speed = speed
        self.problems: list[str] = []
        self.num_steps = 0
        self.num_preempted = 0
        self._worker: SubmittingWorker[U] = worker
        self._deliver = deliver
        self._random = random
        self._commanded = asyncio.Event()
        self._began: float | None = None

    def submit(self, command: Any) -> None:
        """Hand a command to the next step."""
        self._worker.submit(command)
        self._commanded.set()

    async def run(self) -> None:
        """Step for ever."""
        loop = asyncio.get_running_loop()
        while True:
            self._commanded.clear()
            self._began = loop.time()
            update: Any = self._worker.step()
            self.num_steps += 1
            self.num_preempted += sum(isinstance(failed.error, Preempted) for failed in update.failed)
            self.problems += self._worker.ledger().problems
            await asyncio.sleep(self._take_time(loop.time()))
            self._began = None
            if update:
                self._deliver(update)
            if self._worker.is_idle:
                await self._idle()

    def _take_time(self, now: float) -> float:
        speed = self.speed
        hang_s, speed.hang_s = speed.hang_s, 0.0
        if self._worker.is_idle:
            return hang_s or 0.0001
        return hang_s + self._random.uniform(*speed.step_s) * (speed.factor if now < speed.slow_until else 1.0)

    async def _idle(self) -> None:
        """Until there is a command; while there are requests, look around as the engine's thread does."""
        if not self._worker.num_requests:
            await self._commanded.wait()
            return
        try:
            async with asyncio.timeout(IDLE_WAIT_S):
                await self._commanded.wait()
        except TimeoutError:
            pass

    def vitals(self, *, linked: tuple[Incarnation, ...], draining: bool) -> Vitals:
        """As cluster.engine_thread says it, and what its node adds."""
        pages = self._worker.page_counts()
        return Vitals(
            progress=self._worker.progress,
            busy_s=asyncio.get_running_loop().time() - self._began if self._began is not None else 0.0,
            requests=self._worker.num_requests,
            queued_tokens=self._worker.queued_tokens,
            pages_total=pages.total,
            pages_free=pages.free,
            pages_cached=pages.cached,
            pages_in_use=pages.in_use,
            pages_promised=pages.promised,
            linked=linked,
            draining=draining,
        )
