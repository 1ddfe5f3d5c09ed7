"""`pdserve kv audit`: do routers and workers agree on who holds which KV pages?

Each router is asked for every worker's ledger and for the tickets that it holds itself. Requests come and go while the
answers are collected, so a mismatch counts only where it is there in three samples; a request of its own moment is
not. What a worker says is wrong inside it, and a worker that does not answer, count at once.
"""

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from cluster.flags import DEFAULT_ADDRESS, AuditFlags
from cluster.status import aligned, cluster_service
from pdserve.v1 import cluster_pb2 as pb

NUM_SAMPLES = 3
SAMPLE_INTERVAL_S = 0.4
CALL_LIMIT_S = 10.0
_WORKER_HEAD = ("ID", "ROLE", "HOLDERS", "PAGES", "FREE", "CACHED", "IN USE", "PROMISED")
_ENTRY_HEAD = ("WORKER", "NUMBER", "STATE", "PAGES", "PROMISED", "ROUTER", "PUSHES TO", "REQUEST")

Sample = Sequence[pb.GetLedgerResponse]  # one answer per router


@dataclass(frozen=True, order=True)
class Finding:
    """Something that does not hold; equal to itself in another sample."""

    where: str  # a worker or a router
    rule: str
    subject: str = ""  # the ticket or call
    detail: str = field(default="", compare=False)  # may differ between samples

    def __str__(self) -> str:
        """One line."""
        return ": ".join(part for part in (self.where, self.rule, self.subject, self.detail) if part)


def audit(flags: AuditFlags) -> bool:
    """Ask, compare and print; whether all is well. Raises PdserveError."""
    samples = asyncio.run(collect(flags.address or [DEFAULT_ADDRESS]))
    findings = lasting(samples)
    last = samples[-1]
    sys.stdout.write((json.dumps(to_plain(last, findings)) if flags.json else report(last, findings)) + "\n")
    return not findings


async def collect(addresses: Sequence[str]) -> list[Sample]:
    """As many samples as it takes: one, where nothing is wrong."""
    samples: list[Sample] = []
    while len(samples) < NUM_SAMPLES and (not samples or lasting(samples)):
        if samples:
            await asyncio.sleep(SAMPLE_INTERVAL_S)
        samples.append(await asyncio.gather(*map(_ask, addresses)))
    return samples


async def _ask(address: str) -> pb.GetLedgerResponse:
    async with cluster_service(address) as service:
        return await service.GetLedger(pb.GetLedgerRequest(), timeout=CALL_LIMIT_S)


def lasting(samples: Sequence[Sample]) -> list[Finding]:
    """Mismatches of every sample, and problems of any, in order."""
    mismatches = set.intersection(*(set(_mismatches(sample)) for sample in samples))
    problems = {finding for sample in samples for answer in sample for finding in _problems(answer)}
    return sorted(mismatches | problems)


def _mismatches(sample: Sample) -> Iterator[Finding]:
    routers = {answer.router for answer in sample}
    for answer in sample:
        yield from _owners(answer, routers)
        yield from _pushes(answer)
        for worker in answer.workers:
            yield from _numbers(worker)


def _tickets(answer: pb.GetLedgerResponse) -> dict[tuple[str, int], pb.LedgerEntry]:
    decodes = [worker for worker in answer.workers if worker.role == "decode"]
    return {(worker.incarnation, entry.number): entry for worker in decodes for entry in worker.entries}


def _owners(answer: pb.GetLedgerResponse, routers: set[str]) -> Iterator[Finding]:
    """Every ticket on a decode worker is held by its router, and the other way round."""
    tickets, held = _tickets(answer), {(ticket.incarnation, ticket.counter): ticket for ticket in answer.held}
    names = {worker.incarnation: worker.id for worker in answer.workers}
    for (incarnation, number), entry in tickets.items():
        subject = f"ticket {number} ({entry.label})"
        if entry.router not in routers:
            rule = f"{entry.router or 'nobody'} owns it, a router that was not asked; name every router by --address"
            yield Finding(names[incarnation], rule, subject)
        elif entry.router == answer.router and (incarnation, number) not in held:
            yield Finding(names[incarnation], f"{entry.router} does not hold it any more", subject)
    for key, ticket in held.items():
        if key not in tickets and ticket.worker in names.values():
            subject = f"ticket {ticket.counter} ({ticket.label})"
            yield Finding(answer.router, f"{ticket.worker} does not know it", subject)


def _pushes(answer: pb.GetLedgerResponse) -> Iterator[Finding]:
    """Prefill calls push to tickets that are there."""
    tickets = _tickets(answer)
    for worker in answer.workers:
        for entry in worker.entries:
            if entry.ticket_incarnation and (entry.ticket_incarnation, entry.ticket) not in tickets:
                subject = f"call {entry.number} ({entry.label})"
                yield Finding(worker.id, f"pushes to ticket {entry.ticket}, which is not there", subject)


def _numbers(worker: pb.WorkerLedger) -> Iterator[Finding]:
    """The pages of a worker add up."""
    pages = worker.pages
    if pages.free + pages.cached + pages.in_use != pages.total:
        detail = f"{pages.free} + {pages.cached} + {pages.in_use}, {pages.total}"
        yield Finding(worker.id, "free + cached + in use is not the total", detail=detail)
    promised = sum(entry.promised for entry in worker.entries)
    if promised != pages.promised:
        detail = f"{promised} by tickets, {pages.promised} in all"
        yield Finding(worker.id, "promised pages do not add up", detail=detail)
    if pages.promised > pages.free + pages.cached:
        yield Finding(worker.id, "more pages are promised than there are")


def _problems(answer: pb.GetLedgerResponse) -> Iterator[Finding]:
    """What the answers themselves say is wrong."""
    yield from (Finding("", problem) for problem in answer.problems)
    yield from (Finding(worker.id, problem) for worker in answer.workers for problem in worker.problems)


def to_plain(sample: Sample, findings: Sequence[Finding]) -> dict[str, Any]:
    """The object that --json prints."""
    return {"clean": not findings, "problems": [*map(str, findings)], "routers": [*map(_plain, sample)]}


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return {each.name: _plain(getattr(value, each.name)) for each in value.DESCRIPTOR.fields}
    return value if isinstance(value, str | int | float) else [*map(_plain, value)]


def report(sample: Sample, findings: Sequence[Finding]) -> str:
    """The tables for a person, and the verdict."""
    workers = {worker.id: worker for answer in sample for worker in answer.workers}
    entries = [(worker, entry) for worker in workers.values() for entry in worker.entries]
    lines = aligned([_WORKER_HEAD, *map(_worker_row, workers.values())])
    if entries:
        lines += ["", *aligned([_ENTRY_HEAD, *(_entry_row(*each) for each in entries)])]
    verdict = f"{len(findings)} problems" if findings else "clean"
    return "\n".join([*lines, "", *map(str, findings), f"{verdict}: {len(workers)} workers, {len(entries)} holders"])


def _worker_row(worker: pb.WorkerLedger) -> tuple[str, ...]:
    pages = worker.pages
    numbers = (len(worker.entries), pages.total, pages.free, pages.cached, pages.in_use, pages.promised)
    return worker.id, worker.role, *map(str, numbers)


def _entry_row(worker: pb.WorkerLedger, entry: pb.LedgerEntry) -> tuple[str, ...]:
    target = f"ticket {entry.ticket}" if entry.ticket_incarnation else ""
    numbers = (str(entry.pages), str(entry.promised))
    return worker.id, str(entry.number), entry.state, *numbers, entry.router, target, entry.label
