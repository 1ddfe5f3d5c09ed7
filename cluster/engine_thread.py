"""The one thread that runs a worker's engine: step, hand the update to the event loop, wait for a command when idle."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from engine.pages import PageCounts
from pdserve.request import Incarnation
from pdserve.vitals import Vitals

Update = TypeVar("Update", covariant=True)
U = TypeVar("U")
WATCH_INTERVAL_S = 1.0
IDLE_WAIT_S = 0.25  # how soon the thread sees that it should stop


class Worker(Protocol[Update]):
    """What both workers offer."""

    is_idle: bool

    @property
    def progress(self) -> int: ...

    @property
    def num_requests(self) -> int: ...

    @property
    def queued_tokens(self) -> int: ...

    def page_counts(self) -> PageCounts: ...

    def step(self) -> Update: ...

    def wait_for_command(self, timeout_s: float) -> None: ...


class EngineThread(Generic[U]):
    """Runs `worker` from `start` to `stop`; `ended` fails with whatever the engine fails with."""

    def __init__(self, worker: Worker[U], deliver: Callable[[U], None]) -> None:
        self._worker = worker
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._stopping = False
        self._step_began = 0.0  # 0: between steps
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    async def stop(self, limit_s: float = 5.0) -> None:
        """End after the present step; a step that outlasts `limit_s` ends with the process."""
        self._stopping = True
        await asyncio.to_thread(self._thread.join, limit_s)

    async def watch(self, stuck_after_s: float) -> str:
        """Returns why the worker must be started again: its engine failed, or has not moved for so long."""
        progress, moved_at = -1, time.monotonic()
        while not self.ended.done():
            if self._worker.progress != progress or not self._step_began:
                progress, moved_at = self._worker.progress, time.monotonic()
            elif time.monotonic() - moved_at > stuck_after_s:
                return f"the engine has been in one layer for {stuck_after_s:g} s"
            await asyncio.wait((self.ended,), timeout=WATCH_INTERVAL_S)
        self.ended.result()
        return "the engine ended"

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._step()
        except Exception as error:  # root of the thread: the engine's failure is the worker's
            self._loop.call_soon_threadsafe(self.ended.set_exception, error)

    def _step(self) -> None:
        self._step_began = time.monotonic()
        update = self._worker.step()
        self._step_began = 0.0
        if update:
            self._loop.call_soon_threadsafe(self._deliver, update)
        if self._worker.is_idle:
            self._worker.wait_for_command(IDLE_WAIT_S)

    def vitals(self, linked: tuple[Incarnation, ...] = ()) -> Vitals:
        """The worker's state at this moment, from the event loop."""
        began, pages = self._step_began, self._worker.page_counts()
        return Vitals(
            progress=self._worker.progress,
            busy_s=time.monotonic() - began if began else 0.0,
            requests=self._worker.num_requests,
            queued_tokens=self._worker.queued_tokens,
            pages_total=pages.total,
            pages_free=pages.free,
            pages_cached=pages.cached,
            pages_in_use=pages.in_use,
            pages_promised=pages.promised,
            linked=linked,
        )
