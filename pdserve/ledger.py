"""A worker's view of its KV pages, taken between two steps of its engine: what `pdserve kv audit` compares."""

from dataclasses import dataclass
from typing import Literal

from pdserve.request import Incarnation

State = Literal["queued", "computing", "pushing", "reserved", "landing", "running"]


@dataclass(frozen=True)
class LedgerEntry:
    """One holder of pages: a ticket on a decode worker, a call on a prefill worker."""

    number: int  # the ticket's counter, or the number of the call
    label: str  # the client's request id
    state: State
    num_pages: int  # held, shared ones included
    num_promised: int = 0  # beside them
    router: str = ""  # that owns it, where the worker knows
    pushes_to: tuple[Incarnation, int] | None = None  # the ticket of a prefill call: incarnation and counter


@dataclass(frozen=True)
class Ledger:
    """All holders, and what does not hold."""

    entries: tuple[LedgerEntry, ...]
    problems: tuple[str, ...]  # broken invariants; empty: none
