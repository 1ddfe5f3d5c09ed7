"""What goes into a decode worker's engine and what comes out of it: plain data."""

from dataclasses import dataclass, field

from pdserve.errors import PdserveError
from pdserve.handover import PageRun
from pdserve.request import Ticket, Token, WorkRequest
from transport.base import ReceiveSlot


@dataclass(frozen=True)
class Reserve:
    """Promise room for this request; the reply carries `call`."""

    stream: int  # of the router that asks: its tickets end with it
    call: int
    request: WorkRequest
    whole: bool = False  # room for all that may come, as a resumed request gets it; else for the next tokens
    router: str = ""  # for the ledger


@dataclass(frozen=True)
class Decode:
    """Go on from this first token as soon as all pages have landed."""

    stream: int
    ticket: Ticket
    first: Token


@dataclass(frozen=True)
class Release:
    """Forget the ticket in whatever state it is; a second time is no error."""

    stream: int
    ticket: Ticket


@dataclass(frozen=True)
class StreamGone:
    """The router's stream broke: all its tickets end at once."""

    stream: int


@dataclass(frozen=True)
class Landed:
    """A payload lies in a slot of its link; the slot goes back once its pages are scattered."""

    run: PageRun
    slot: ReceiveSlot


@dataclass(frozen=True)
class GaveUp:
    """Prefill aborted this ticket: its router must know, should its own call not tell it."""

    counter: int
    error: PdserveError


@dataclass(frozen=True)
class Drain:
    """From now on refuse new work; what is there runs on."""


@dataclass(frozen=True)
class Expel:
    """End all tickets with this error: their routers resume them elsewhere."""

    error: PdserveError


Command = Reserve | Decode | Release | StreamGone | Landed | GaveUp | Drain | Expel


@dataclass(frozen=True)
class Reserved:
    """The reply to `Reserve`: a ticket, or why not."""

    stream: int
    call: int
    outcome: Ticket | PdserveError


@dataclass(frozen=True)
class Emitted:
    """One token of a ticket, and the steps it has taken so far."""

    stream: int
    counter: int
    token: Token
    num_steps: int


@dataclass(frozen=True)
class TicketFailed:
    """The ticket ended with an error; its pages are free."""

    stream: int
    counter: int
    error: PdserveError


@dataclass(frozen=True)
class Ended:
    """The ticket is gone; `aborted` tells prefill why nothing more is wanted, "" when it had all its pages."""

    counter: int
    aborted: str


@dataclass
class StepUpdate:
    """All that one step brought."""

    reserved: list[Reserved] = field(default_factory=list)
    emitted: list[Emitted] = field(default_factory=list)
    failed: list[TicketFailed] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reserved or self.emitted or self.failed or self.ended)
