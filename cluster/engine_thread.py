"""The one thread that runs a worker's engine: step, hand the update to the event loop, wait for a command when idle.

Between two steps it makes the calls that others ask for (`call`): only there the ledger is consistent. When the engine
is idle it audits itself every few seconds; a rule that once was broken stays in what `audit` says.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from engine.pages import PageCounts
from pdserve.errors import Unavailable
from pdserve.ledger import Ledger
from pdserve.request import Incarnation
from pdserve.vitals import Vitals

Update = TypeVar("Update", covariant=True)
U = TypeVar("U")
T = TypeVar("T")
WATCH_INTERVAL_S = 1.0
IDLE_WAIT_S = 0.05  # how soon the thread sees that it should stop, or that there is a call
CALL_LIMIT_S = 2.0
AUDIT_INTERVAL_S = 5.0  # between audits of an idle engine

_log = logging.getLogger(__name__)


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

    def ledger(self) -> Ledger: ...

    def step(self) -> Update: ...

    def wait_for_command(self, timeout_s: float) -> None: ...


@dataclass(frozen=True)
class Audit:
    """A worker's ledger, and its pages in numbers at the same moment."""

    ledger: Ledger
    pages: PageCounts


class EngineThread(Generic[U]):
    """Runs `worker` from `start` to `stop`; `ended` fails with whatever the engine fails with."""

    def __init__(self, worker: Worker[U], deliver: Callable[[U], None]) -> None:
        self._worker = worker
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._stopping = False
        self._step_began = 0.0  # 0: between steps
        self._steps_s = 0.0  # of all steps that are over
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._audited_at = 0.0
        self._broken: dict[str, None] = {}  # every rule that ever was, in order
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    async def stop(self, limit_s: float = 5.0) -> None:
        """End after the present step; a step that outlasts `limit_s` ends with the process."""
        self._stopping = True
        await asyncio.to_thread(self._thread.join, limit_s)

    async def call(self, function: Callable[[], T], limit_s: float = CALL_LIMIT_S) -> T:
        """What `function` returns in the engine's thread, between two steps. Raises Unavailable after `limit_s`."""
        future: Future[T] = Future()
        self._calls.append((function, future))
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise Unavailable(f"the engine did not come to the end of a step within {limit_s:g} s") from None

    async def audit(self) -> Audit:
        """Who holds which pages, and what does not hold or once did not. Raises Unavailable."""
        return await self.call(self._audit)

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
        began, self._step_began = self._step_began, 0.0
        self._steps_s += time.monotonic() - began
        if update:
            self._loop.call_soon_threadsafe(self._deliver, update)
        self._make_calls()
        if self._worker.is_idle:
            if time.monotonic() - self._audited_at > AUDIT_INTERVAL_S:
                self._audit()
            self._worker.wait_for_command(IDLE_WAIT_S)

    def _make_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():  # else nobody waits any more
                try:
                    future.set_result(function())
                except Exception as error:  # root of the call: whoever asked gets it
                    future.set_exception(error)

    def _audit(self) -> Audit:
        ledger = self._worker.ledger()
        self._audited_at = time.monotonic()
        for problem in ledger.problems:
            if problem not in self._broken:
                _log.error("the ledger of KV pages: %s", problem)
                self._broken[problem] = None
        return Audit(replace(ledger, problems=tuple(self._broken)), self._worker.page_counts())

    def busy_s(self) -> float:
        """Time inside steps since the start, the present one included; from the event loop."""
        began, over_s = self._step_began, self._steps_s
        return over_s + (time.monotonic() - began if began else 0.0)

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
