"""What goes into a prefill worker's engine and what comes out of it: plain data.

The asyncio side submits commands; the engine's thread answers with one `StepUpdate` per step.
"""

from dataclasses import dataclass, field

from pdserve.errors import PdserveError
from pdserve.request import Incarnation, Scored, Ticket, Token, WorkRequest
from transport.base import SendLink, SendSlot


@dataclass(frozen=True)
class Start:
    """Compute this prompt; with a ticket, push its pages over the link. Lower priority is computed first."""

    call: int  # names the prefill call, unique in this process
    request: WorkRequest
    ticket: Ticket | None = None
    link: SendLink | None = None
    priority: int = 0


@dataclass(frozen=True)
class Cancel:
    """Forget the call in whatever state it is; a second time is no error."""

    call: int


@dataclass(frozen=True)
class PushEnded:
    """One payload landed, was scrapped, or was lost with its link: a slot may be free again."""

    call: int
    problem: PdserveError | None = None


@dataclass(frozen=True)
class Abort:
    """Decode wants nothing more of this ticket; an unknown one is no error."""

    incarnation: Incarnation
    counter: int
    reason: str


@dataclass(frozen=True)
class Drain:
    """From now on refuse new calls; those that are there go on."""


@dataclass(frozen=True)
class Expel:
    """Fail every call that is left."""

    error: PdserveError


Command = Start | Cancel | PushEnded | Abort | Drain | Expel


@dataclass(frozen=True)
class Sampled:
    """The first token of a call, and how many prompt tokens were computed for it, or taken from the cache."""

    call: int
    token: Token
    computed_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class PromptScored:
    """The next prompt tokens of a call, with their log-probabilities."""

    call: int
    tokens: list[Scored]


@dataclass(frozen=True)
class Push:
    """A packed payload: to be announced in the order of the updates."""

    call: int
    link: SendLink
    slot: SendSlot
    num_bytes: int
    meta: bytes


@dataclass(frozen=True)
class Done:
    """Decode has all the KV of this call; its pages are free here."""

    call: int
    kv_bytes: int
    payloads: int


@dataclass(frozen=True)
class Failed:
    """The call ended with an error; its pages are free here."""

    call: int
    error: PdserveError


@dataclass(frozen=True)
class Ended:
    """To be told to decode: the ticket's payloads are complete, or prefill gave up."""

    link: SendLink
    meta: bytes
    aborted: str = ""


@dataclass
class StepUpdate:
    """All that one step brought."""

    scored: list[PromptScored] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    pushes: list[Push] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.scored or self.sampled or self.pushes or self.done or self.failed or self.ended)
