"""Every error that pdserve raises on purpose.

    PdserveError                 INTERNAL             the root; never raised itself
    ├── InvalidRequest           INVALID_ARGUMENT     a field of the request is wrong: names it and says what is allowed
    ├── NoTokenLeft              INVALID_ARGUMENT     what the request allows and bans leaves no token to choose
    ├── AlreadyComplete          INVALID_ARGUMENT     the tokens of a resume complete the grammar: nothing can follow
    ├── ModelNotFound            NOT_FOUND            no such model here
    ├── DeadlineExceeded         DEADLINE_EXCEEDED    the client's deadline passed
    ├── Cancelled                CANCELLED            the client went away or cancelled
    ├── QueueFull                RESOURCE_EXHAUSTED   too much waits already: says when to try again
    ├── NoCapacity               RESOURCE_EXHAUSTED   a worker has no pages to promise now: the router waits
    ├── Unavailable              UNAVAILABLE          nobody can serve it now
    │   └── LegFailed            UNAVAILABLE          one leg of an attempt ended before its time: the router resumes
    │       ├── WorkerLost       UNAVAILABLE          a worker died, got stuck or was replaced
    │       │   └── WorkerSilent UNAVAILABLE          nothing is heard of it: dead, or only slow
    │       ├── LinkDown         UNAVAILABLE          the link between two workers broke
    │       ├── Preempted        UNAVAILABLE          a decode worker needed the pages for older requests
    │       └── Draining         UNAVAILABLE          the worker is about to leave the cluster
    ├── UnknownTicket            FAILED_PRECONDITION  a ticket of another incarnation, or released already
    ├── ProtocolError            INTERNAL             a peer said something the protocol does not allow
    ├── Incompatible             FAILED_PRECONDITION  two workers differ in model or KV layout: says where
    └── ConfigError              INVALID_ARGUMENT     bad configuration or model files: one line, exit code 2

The status is a *name*, so that this module needs no grpc; `pdserve.rpc` maps names to codes.
"""


class PdserveError(Exception):
    """Root of the tree."""

    status = "INTERNAL"


class InvalidRequest(PdserveError):
    """A request that can never be served as it is."""

    status = "INVALID_ARGUMENT"

    def __init__(self, field: str, problem: str) -> None:
        """`field` is the path in the request message, `problem` says what is allowed."""
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class NoTokenLeft(PdserveError):
    """What the request allows and bans leaves no token to go on with."""

    status = "INVALID_ARGUMENT"


class AlreadyComplete(PdserveError):
    """The tokens so far complete the request's grammar. No fault: the router knows that the answer is whole."""

    status = "INVALID_ARGUMENT"


class ModelNotFound(PdserveError):
    """The request names a model that is not served here."""

    status = "NOT_FOUND"


class DeadlineExceeded(PdserveError):
    """The deadline of the client passed before the answer was complete."""

    status = "DEADLINE_EXCEEDED"


class Cancelled(PdserveError):
    """The client cancelled the request or went away."""

    status = "CANCELLED"


class QueueFull(PdserveError):
    """The router's queue is full."""

    status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoCapacity(PdserveError):
    """A decode worker cannot promise the pages at this moment."""

    status = "RESOURCE_EXHAUSTED"


class Unavailable(PdserveError):
    """Nobody can serve the request now."""

    status = "UNAVAILABLE"


class LegFailed(Unavailable):
    """One leg of an attempt ended before its time. No fault of the request: the router resumes it elsewhere."""


class WorkerLost(LegFailed):
    """A worker died, got stuck, or was replaced by a new incarnation."""


class WorkerSilent(WorkerLost):
    """No beat for too long. It may be alive: a machine that stands still, not a request, makes workers silent."""


class LinkDown(LegFailed):
    """The link between a prefill and a decode worker broke."""


class Preempted(LegFailed):
    """A decode worker needed the pages for older requests."""


class Draining(LegFailed):
    """The worker is about to leave the cluster."""


class UnknownTicket(PdserveError):
    """A ticket that this incarnation never gave out, or that was released already."""

    status = "FAILED_PRECONDITION"


class ProtocolError(PdserveError):
    """A peer said something that the protocol does not allow."""


class Incompatible(PdserveError):
    """Two workers do not agree on the model or on the KV layout."""

    status = "FAILED_PRECONDITION"


class ConfigError(PdserveError):
    """Bad configuration or bad model files; commands print it as one line and exit with code 2."""

    status = "INVALID_ARGUMENT"


def from_wire(kind: str, message: str) -> PdserveError:
    """The error that a peer described by its class name and message."""
    if kind == "InvalidRequest":
        field, _, problem = message.partition(": ")
        return InvalidRequest(field, problem)
    if kind == "QueueFull":
        return QueueFull(message, retry_after_s=1.0)
    legs = (LegFailed, WorkerLost, WorkerSilent, LinkDown, Preempted, Draining)
    plain = (
        NoTokenLeft,
        AlreadyComplete,
        ModelNotFound,
        DeadlineExceeded,
        Cancelled,
        NoCapacity,
        Unavailable,
        UnknownTicket,
        *legs,
    )
    by_name = {cls.__name__: cls for cls in (*plain, ProtocolError, Incompatible, ConfigError)}
    return by_name.get(kind, PdserveError)(message)
