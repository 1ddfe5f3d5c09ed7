"""The cells of the failure table: in which state a request is, what befalls the cluster, and what has to follow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import product
from typing import Literal

State = Literal["queued", "prefilling", "transferring", "decoding", "draining"]
Role = Literal["prefill", "decode"]

ROLES: frozenset[Role] = frozenset({"prefill", "decode"})
STATES: tuple[State, ...] = ("queued", "prefilling", "transferring", "decoding", "draining")
_ON_PREFILL: frozenset[State] = frozenset({"prefilling", "transferring"})
_ON_DECODE: frozenset[State] = frozenset({"prefilling", "transferring", "decoding"})
_NOWHERE: frozenset[State] = frozenset()


@dataclass(frozen=True)
class Victim:
    """What befalls the cluster. With a `role` it befalls one worker, and only requests on that one are hit."""

    name: str
    role: Role | None
    resumed: frozenset[State]  # in these states every hit must be resumed; where it is not, the cell is void


PREFILL_KILLED = Victim("prefill killed", "prefill", _ON_PREFILL | {"draining"})
DECODE_KILLED = Victim("decode killed", "decode", _ON_DECODE | {"draining"})
PREFILL_STOPPED = Victim("prefill stopped", "prefill", _ON_PREFILL | {"draining"})
DECODE_STOPPED = Victim("decode stopped", "decode", _ON_DECODE | {"draining"})
LINK_CUT = Victim("link cut", "prefill", _ON_PREFILL | {"draining"})
REDIS_GONE = Victim("Redis gone", None, _NOWHERE)
GCS_GONE = Victim("GCS gone", None, _NOWHERE)
ROUTER_KILLED = Victim("router killed", None, frozenset(STATES))
VICTIMS = (
    PREFILL_KILLED,
    DECODE_KILLED,
    PREFILL_STOPPED,
    DECODE_STOPPED,
    LINK_CUT,
    REDIS_GONE,
    GCS_GONE,
    ROUTER_KILLED,
)
HEALING_DRAINS = (PREFILL_KILLED, DECODE_KILLED)  # a draining worker that is killed comes back as a fresh one


def leaving(victim: Victim) -> frozenset[Role]:
    """Of which roles a worker is gone for good after a fault of this kind while it, or one of each role, drained."""
    if victim in HEALING_DRAINS:
        return frozenset()
    return frozenset({victim.role}) if victim.role else ROLES


@dataclass(frozen=True)
class Cell:
    """One field of the table."""

    state: State
    victim: Victim

    def __str__(self) -> str:
        """As `select` matches it."""
        return f"{self.state}/{self.victim.name}"

    @property
    def must_resume(self) -> bool:
        """Whether the fault takes the request's place from under it."""
        return self.state in self.victim.resumed


def every_cell() -> list[Cell]:
    """The whole table."""
    return [Cell(state, victim) for state, victim in product(STATES, VICTIMS)]


def select(patterns: Sequence[str]) -> list[Cell]:
    """The cells that one of the patterns matches: `decoding/*`, `*/decode killed`. Raises ValueError on none."""
    matches: Callable[[Cell], bool] = lambda cell: any(fnmatch(str(cell), pattern) for pattern in patterns)  # noqa: E731
    if not (chosen := [*filter(matches, every_cell())]):
        raise ValueError(f"no cell matches {', '.join(patterns)}; there are {', '.join(map(str, every_cell()))}")
    return chosen
