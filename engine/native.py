"""The compiled kernels."""

from typing import Protocol


class Library(Protocol):
    """The C functions."""


def load() -> Library | None:
    """None until the C kernels are there."""
    return None
