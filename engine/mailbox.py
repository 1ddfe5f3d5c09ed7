"""How commands reach an engine's thread: a queue that can be drained at once and waited for."""

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Many threads put, one thread drains."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._filled = threading.Event()

    def put(self, item: T) -> None:
        """Add an item; from any thread."""
        self._items.append(item)
        self._filled.set()

    def drain(self) -> list[T]:
        """All items so far, in order."""
        self._filled.clear()  # before taking: what is put meanwhile sets it again
        return [self._items.popleft() for _ in range(len(self._items))]

    def wait(self, timeout_s: float) -> None:
        """Block until an item is there, at most `timeout_s`."""
        self._filled.wait(timeout_s)
