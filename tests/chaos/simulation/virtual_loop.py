"""An event loop in virtual time, and the hosts that share it.

When nothing is ready, time jumps to the next timer: an hour of waiting costs nothing, and a run depends on nothing but
its inputs. Every task, timer and callback belongs to the host in whose context it was made; a host can be stopped, when
everything of it is set aside until it continues (SIGSTOP), and killed, when its tasks end and nobody hears of it again.
Nothing ready and no timer is a deadlock; virtual time that never ends is a livelock: both are errors with a list of
who waits where.
"""

import asyncio
from asyncio.base_events import BaseEventLoop
from collections import deque
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context
from functools import partial
from heapq import heappop, heappush
from math import inf
from typing import Any, TypeVar

from pdserve.errors import LinkDown

T = TypeVar("T")

HOST: ContextVar["Host | None"] = ContextVar("host", default=None)


class Stuck(Exception):
    """Somebody waits for ever, or for longer than the run may take; the message says who waits where."""


class Host:
    """A process of the simulated cluster: whose tasks and timers they are."""

    def __init__(self, name: str, loop: "VirtualLoop") -> None:
        self.name = name
        self.is_stopped = False
        self.is_dead = False
        self.context = copy_context()
        self.context.run(HOST.set, self)
        self._loop = loop
        self._held: deque[_Callback] = deque()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._num_kept = 64
        self.links: list[Any] = []  # receiving ends of links, noted by `run`

    def spawn(self, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """A task that belongs to this host, whoever asks for it."""
        return self._loop.create_task(
            work, name=name or f"{self.name}: {getattr(work, '__qualname__', work)}", context=self.own()
        )

    def own(self) -> Context:
        """A context of this host for one callback."""
        return self.context.copy()

    def note(self, task: asyncio.Task[Any]) -> None:
        """A task of this host was made."""
        self._tasks[task] = None
        if len(self._tasks) > self._num_kept:
            self._tasks = dict.fromkeys(self.tasks)
            self._num_kept = 64 + 2 * len(self._tasks)

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Those that have not ended."""
        return [task for task in self._tasks if not task.done()]

    def hold(self, handle: "_Callback") -> None:
        """Set a callback aside until the host continues."""
        self._held.append(handle)

    def stop(self) -> None:
        """SIGSTOP."""
        self.is_stopped = True
        self._loop.stopped.add(self)

    def cont(self) -> None:
        """SIGCONT: everything that became due meanwhile runs now."""
        self.is_stopped = False
        self._loop.stopped.discard(self)
        self._loop.add(self._held)
        self._held.clear()

    async def end(self) -> None:
        """SIGKILL: cancel everything. Whoever brings messages sees to it that nothing of what still runs is heard."""
        self.is_dead = True
        self.cont()
        while tasks := self.tasks:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


class _Callback(list[Any]):
    """asyncio's handle, thousands in each run: [callback, arguments, context], and empty once it is cancelled."""

    __slots__ = ()

    def cancel(self) -> None:
        """Do not run it; see asyncio.Handle."""
        self.clear()

    def cancelled(self) -> bool:
        """See asyncio.Handle."""
        return not self


class VirtualLoop(BaseEventLoop):
    """See the module."""

    _ready: deque[_Callback]
    _stopping: bool
    get_debug = bool  # False; each future and task asks, and C answers sooner

    def __init__(self, limit_s: float) -> None:
        super().__init__()
        self.problems: list[str] = []  # what tasks failed with when nobody looked
        self.stopped: set[Host] = set()
        self.set_exception_handler(self._note_problem)
        self._limit_s = limit_s
        self.now = 0.0
        self._timers: list[tuple[float, int, _Callback]] = []
        self._num_timers = 0
        self.create_future = partial(asyncio.Future, loop=self)  # type: ignore[method-assign]

    def time(self) -> float:
        return self.now

    def create_task(self, coro: Any, *, name: Any = None, context: Context | None = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        host = context.get(HOST) if context is not None else HOST.get()
        if host is not None:
            host.note(task)
        return task

    def add(self, handles: deque[_Callback]) -> None:
        """Callbacks that were set aside."""
        self._ready.extend(handles)

    def finish(self, main: Coroutine[Any, Any, T]) -> T:
        """Run to the end of `main`, and close."""
        task: asyncio.Task[T] = self.create_task(main)
        try:
            return self.run_until_complete(task)
        except Stuck:
            self._limit_s = inf
            task.cancel()
            self.run_until_complete(asyncio.wait((task,)))
            raise
        finally:
            self.close()

    def call_soon(  # type: ignore[override]  # typeshed ties `args` to the callback
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        handle = _Callback((callback, args, copy_context() if context is None else context))
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there are no threads

    def call_at(  # type: ignore[override]  # typeshed ties `args` to the callback
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        timer = _Callback((callback, args, copy_context() if context is None else context))
        self._num_timers += 1  # of equal times the earlier call is first
        heappush(self._timers, (when, self._num_timers, timer))
        return timer

    def call_later(  # type: ignore[override]  # typeshed ties `args` to the callback
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        """All that is ready, and what it makes ready, until time has to go on. In one piece: this is the hot loop."""
        timers, ready, stopped = self._timers, self._ready, self.stopped
        if not ready and not self._stopping:
            self._jump()
        while True:
            while timers and timers[0][0] <= self.now:
                ready.append(heappop(timers)[2])
            for _ in range(len(ready)):
                if not (handle := ready.popleft()):
                    continue
                callback, args, context = handle
                if stopped and (host := context.get(HOST)) in stopped:
                    host.hold(handle)
                    continue
                try:
                    context.run(callback, *args)
                except (Exception, asyncio.CancelledError) as error:  # root of a callback: a finding of the run
                    self.call_exception_handler({"message": f"exception in {callback!r}", "exception": error})
            if not ready or self._stopping:
                return

    def _jump(self) -> None:
        while self._timers and not self._timers[0][2]:
            heappop(self._timers)
        if not self._timers:
            raise Stuck(f"nothing is left to run at {self.now:.3f} s\n{self.waiting()}")
        self.now = max(self.now, self._timers[0][0])
        if self.now > self._limit_s:
            raise Stuck(f"not over after {self._limit_s:g} virtual seconds\n{self.waiting()}")

    def waiting(self) -> str:
        """One line per task: its name, and the innermost place where it waits."""
        lines = (f"  {task.get_name()}: {_place(task.get_coro())}" for task in asyncio.all_tasks(self))
        return "\n".join(sorted(lines))

    def _note_problem(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, LinkDown) and "at this end" in str(error):
            return  # of a push whose owner was killed before it could look
        self.problems.append(f"{context['message']}: {error!r} {context.get('task') or context.get('future') or ''}")

    def _write_to_self(self) -> None:
        """There is nothing to wake."""

    def _process_events(self, event_list: object) -> None:
        """There are no sockets."""


def _place(coroutine: Any) -> str:
    """Where a suspended coroutine waits: from its own line to the innermost one."""
    places = []
    while frame := getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None):
        places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return " > ".join(places) or str(coroutine)
