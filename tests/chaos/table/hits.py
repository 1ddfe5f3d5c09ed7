"""Which requests a fault has hit, and in which state: a look just before it, and the request's own record after it.

The look says that the state had begun: no worker answered it before `Look.began`, and the fault followed it at once.
The record says that the state had not ended: which tokens had come by then, when the router found workers and when the
KV was there (`Timings`), and whether the request was resumed where the fault took its place from under it. A request
for which the two do not agree is no hit.
"""

from dataclasses import dataclass

from tests.chaos.table.cells import ROUTER_KILLED, Cell, State, Victim
from tests.chaos.table.eye import Look, Place
from tests.chaos.table.load import Job
from tests.chaos.table.record import Record, Verdict, judge

ON_THE_WAY_S = 0.01  # what a token may take from the router's clock to ours


@dataclass(frozen=True)
class Sent:
    """A job under way."""

    job: Job
    record: Record


@dataclass(frozen=True)
class Strike:
    """A fault that has happened."""

    victim: Victim
    worker: str  # that it befell; "": none
    draining: frozenset[str]  # workers
    look: Look
    at: float


@dataclass(frozen=True)
class Hit:
    """One request in one cell, and how it came out."""

    cell: Cell
    resumes: int
    verdict: Verdict
    pause_s: float | None  # from the fault to its next token


def candidates(look: Look, sent: list[Sent], victim: Victim, worker: str) -> dict[str, State]:
    """States of the requests that the fault hits if it comes right after this look, by label."""
    found: dict[str, State] = {}
    for each in sent:
        place = look.place(each.record.label)
        state = place.state()
        is_under_way = each.record.sent_at < look.began and not (
            state == "queued" and each.record.num_before(look.began)
        )
        if state and is_under_way and _is_befallen(place, state, victim, worker):
            found[each.record.label] = state
    return found


def _is_befallen(place: Place, state: State, victim: Victim, worker: str) -> bool:
    if not worker or (state == "queued" and place == Place()):
        return True
    return place.is_on(worker) or (state == "decoding" and victim.role == "prefill")


def hits(strike: Strike, sent: list[Sent]) -> list[Hit]:
    """All that are certain."""
    if strike.draining:
        on = [each for each in sent if _is_draining(strike, each)]
        found: dict[str, State] = {each.record.label: "draining" for each in on}
    else:
        found = candidates(strike.look, sent, strike.victim, strike.worker)
    return [
        _hit(strike, each, Cell(found[each.record.label], strike.victim))
        for each in sent
        if each.record.label in found and _is_certain(strike, each, found[each.record.label])
    ]


def _is_draining(strike: Strike, sent: Sent) -> bool:
    place = strike.look.place(sent.record.label)
    if strike.worker:
        return strike.worker in strike.draining and place.is_on(strike.worker)
    return any(place.is_on(worker) for worker in strike.draining)


def _is_certain(strike: Strike, sent: Sent, state: State) -> bool:
    """Whether the record, too, puts the fault inside the state. A failed request counts: it must not hide."""
    record = sent.record
    if record.finished is None:
        return True
    goes_on = record.next_after(strike.at) is not None
    if Cell(state, strike.victim).must_resume:
        goes_on = goes_on and record.resumes > 0
    return goes_on and _fits(strike, record, state)


def _fits(strike: Strike, record: Record, state: State) -> bool:
    received = record.num_before(strike.at)
    match state:
        case "queued":
            return received == 0 and _was_in_line(strike, record)
        case "prefilling":
            return received == 0
        case "transferring":
            return received <= 1 and _kv_was_missing(strike, record)
        case "decoding":
            return received > 1
        case "draining":
            return True


def _was_in_line(strike: Strike, record: Record) -> bool:
    """In a prefill worker's line, or the router had not found workers for it by then."""
    if record.finished is None or strike.victim is ROUTER_KILLED or strike.look.place(record.label) != Place():
        return True  # the next router knows nothing of the first one's times
    timings = record.finished.timings
    return record.tokens[0].at - (timings.ttft_ms - timings.queue_ms) / 1000 - ON_THE_WAY_S > strike.at


def _kv_was_missing(strike: Strike, record: Record) -> bool:
    if record.finished is None or strike.victim is ROUTER_KILLED:
        return True  # that the ledgers say so must do
    return record.tokens[0].at + record.finished.timings.transfer_ms / 1000 - ON_THE_WAY_S > strike.at


def _hit(strike: Strike, sent: Sent, cell: Cell) -> Hit:
    record = sent.record
    next_at = record.next_after(strike.at)
    pause_s = None if next_at is None else next_at - strike.at
    return Hit(cell, record.resumes, judge(record, sent.job.expected), pause_s)
