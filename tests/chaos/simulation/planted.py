"""Bugs that are planted on purpose, to see that the suite finds them: real classes, changed for the time of a block."""

from collections.abc import Callable
from contextlib import AbstractContextManager

PLANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {}
