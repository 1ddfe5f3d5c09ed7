"""A wire over a two-rank group: posts from the caller's thread, waits in one of its own.

A payload's life: `post` enqueues it in the group and returns a future -> the thread waits for it -> the future is
done. A wire's life: connecting (in its thread) -> up -> failed, by `fail` or by an operation that went wrong or
missed its deadline -> ended, when the thread has waited out everything that was posted and the group is closed.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Protocol

import torch
from torch._C import _distributed_c10d as c10d  # the typed home of what torch.distributed re-exports

from pdserve.errors import LinkDown
from transport.seams import Side


class Group(Protocol):
    """What a wire needs of a two-rank group. Making one blocks until both ends have met at the store.

    `post` may be called by one thread at a time; the rest belongs to the thread that made it.
    """

    def meet(self, failed: threading.Event) -> None:
        """Until the peer is reached; nothing is posted before."""

    def post(self, payload: torch.Tensor) -> c10d.Work:
        """Enqueue; never blocks."""

    def wait(self, work: c10d.Work, failed: threading.Event) -> None:
        """Until the payload is there. Raises when it will not be."""

    def close(self) -> None:
        """Let go of all memory, when nobody is inside the other calls. Raises when it cannot, or not in time."""


class TorchWire:
    """One end of the data path, see `Wire`: posts from the caller's thread, waits in its own."""

    def __init__(self, connect: Callable[[], Group], side: Side) -> None:
        self.up = running()
        self.ended = running()
        self._lock = threading.Lock()  # over _group, _why, _unfinished, and the order of posts
        self._group: Group | None = None
        self._why = ""
        self._failed = threading.Event()
        self._unfinished: set[Future[None]] = set()
        self._abandoned: list[torch.Tensor] = []  # not waited for to the end: NCCL may write until it is aborted
        # (work, payload, its future): the payload's memory stays referenced until the wait has returned
        self._posted: queue.SimpleQueue[tuple[c10d.Work, torch.Tensor, Future[None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(connect,), name=f"link-{side}", daemon=True).start()

    def post(self, payload: torch.Tensor) -> Future[None]:
        done = running()
        why = "a payload was posted before the wire was up"
        with self._lock:
            if self._group and self.up.done() and not self._why:
                try:
                    self._posted.put((self._group.post(payload), payload, done))
                    self._unfinished.add(done)
                    return done
                except RuntimeError as error:
                    why = brief(error)
        self.fail(why)
        settle(done, LinkDown(self._why))
        return done

    def fail(self, why: str) -> None:
        """See Wire; from any thread."""
        with self._lock:
            if self._why:
                return
            self._why = why
            unfinished, self._unfinished = self._unfinished, set()
        self._failed.set()
        self._posted.put(None)  # after everything that was posted: posts are refused from now on
        for future in (self.up, *unfinished):
            settle(future, LinkDown(why))

    def _run(self, connect: Callable[[], Group]) -> None:
        """The root of a thread."""
        try:
            self._group = connect()
        except Exception as error:  # the root of a thread; nothing was made
            self.fail(brief(error))
            settle(self.ended)
            return
        self._serve(self._group)
        try:
            self._group.close()
        except Exception as error:  # the root of a thread; the group and the payloads stay where they are
            settle(self.ended, error)
            return
        with self._lock:
            self._group = None  # before `ended`: what follows may be the end of the process
            self._abandoned.clear()
        settle(self.ended)

    def _serve(self, group: Group) -> None:
        """From connected to failed."""
        try:
            if not self._failed.is_set():
                group.meet(self._failed)
            settle(self.up)
            self._wait_for_all(group)
        except Exception as error:  # the root of a thread
            self.fail(brief(error))

    def _wait_for_all(self, group: Group) -> None:
        """Until the wire has failed and all that was posted has been waited for."""
        while (posted := self._posted.get()) is not None:
            work, payload, done = posted
            try:
                group.wait(work, self._failed)
            except (RuntimeError, LinkDown) as error:
                self._abandoned.append(payload)
                self.fail(brief(error))
            with self._lock:
                self._unfinished.discard(done)
            settle(done, LinkDown(self._why) if self._why else None)


def running() -> Future[None]:
    """A future that nobody's impatience can cancel."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


def settle(future: Future[None], error: Exception | None = None) -> None:
    """The thread and `fail` may both come to the end of a future: the first one counts."""
    try:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
    except InvalidStateError:
        pass


def brief(error: Exception) -> str:
    """The first line of a message of torch, which carries a stack trace behind it."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
