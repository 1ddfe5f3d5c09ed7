"""One round: requests under way in all states, one fault, and what became of them.

talkers decode -> long readers are prefilled -> the others queue, are prefilled, transferred -> (a worker drains) ->
looks until one shows what the round is after -> the fault at once -> all answers -> the cluster is whole again -> audit

Links are slowed down until the fault, so that KV is on its way: from the moment that several prompts share a pass (the
first layers of all of them go first), or from the beginning where a worker drains.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import grpc.aio

from cluster.audit import lasting
from cluster.readiness import is_linked
from pdserve.v1 import cluster_pb2 as pb
from tests.chaos.table.cells import GCS_GONE, ROLES, ROUTER_KILLED, State, Victim, leaving
from tests.chaos.table.eye import CALL_LIMIT_S, Eye, Look
from tests.chaos.table.faults import STOP_S, Fault, faults
from tests.chaos.table.hits import Hit, Sent, Strike, candidates, hits
from tests.chaos.table.load import Job
from tests.chaos.table.record import Record, Verdict, follow, judge
from tests.chaos.table.stillness import Stillness
from tests.e2e.harness import Cluster

START_LIMIT_S = 60.0  # until all talkers decode
AIM_LIMIT_S = 3.0
WHOLE_LIMIT_S = 120.0
CLEAN_LIMIT_S = 5.0
SLOW_FOR_S = 8.0
FULL_SPEED = (1e12, 0.01)  # bytes per second, for so long
DRAIN_LIMIT_S = 60.0
DRAIN_LOAD = 8  # requests on a worker that is to drain; one less for each quarter of a second of waiting
DRAIN_SLOWER = 2  # a prefill worker that drains gets nothing new: what it has must still be there at the fault
AUDITS, AUDIT_INTERVAL_S = 3, 0.4


@dataclass(frozen=True)
class Stage:
    """Where rounds are played."""

    cluster: Cluster
    eye: Eye
    num_workers: int
    slow_bytes_per_s: float
    stillness: Stillness


@dataclass(frozen=True)
class Aim:
    """What a round is after: a fault, and the states that still lack hits, the neediest first."""

    victim: Victim
    states: Sequence[State]

    @property
    def drains(self) -> bool:
        """Whether workers drain at the fault."""
        return "draining" in self.states


@dataclass(frozen=True)
class Outcome:
    """What a round has shown."""

    victim: Victim
    hits: tuple[Hit, ...]
    verdicts: tuple[Verdict, ...]  # of all requests
    resumes: int  # of all requests
    look_age_s: float  # of the ledgers, at the fault
    detection_s: float | None
    still_s: float  # how long a CPU stood still between the fault and its detection, or soon after the fault
    leaked_pages: int | None  # None: the cluster was gone before it could be asked
    findings: tuple[str, ...]  # of the audit
    errors: tuple[str, ...]


async def play(stage: Stage, aim: Aim, jobs: Sequence[Job], name: str) -> Outcome:
    """One round."""
    await stage.eye.meet()
    made = faults(aim.victim, stage.cluster, stage.eye)
    sent, tasks = [Sent(job, Record(f"{name}-{number}")) for number, job in enumerate(jobs)], []
    try:
        tasks += _send(stage, aim, [each for each in sent if each.job.is_talker])
        await _until(lambda: all(len(each.record.tokens) > 3 for each in sent if each.job.is_talker), START_LIMIT_S)
        if aim.drains:
            await _slow(stage, stage.slow_bytes_per_s / DRAIN_SLOWER, SLOW_FOR_S)
        long = [each for each in sent if each.job.is_long]
        tasks += _send(stage, aim, long)
        await _under_way(stage, long)
        tasks += _send(stage, aim, [each for each in sent if not (each.job.is_talker or each.job.is_long)])
        strike, detection_s = await _strike(stage, aim, made, sent)
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return await _outcome(stage, strike, sent, detection_s)


def _send(stage: Stage, aim: Aim, sent: list[Sent]) -> "list[asyncio.Task[None]]":
    resumes = aim.victim is ROUTER_KILLED
    requests = [(each.job.named(each.record.label), each.record) for each in sent]
    return [
        asyncio.create_task(follow(stage.eye.address, request, record, resumes=resumes)) for request, record in requests
    ]


async def _under_way(stage: Stage, long: list[Sent]) -> None:
    """Wait until every prefill worker computes a long prompt: the others come to a line, whatever its order is."""
    num_workers, began = len(stage.eye.of_role("prefill")), time.monotonic()
    while time.monotonic() < began + AIM_LIMIT_S:
        look = await stage.eye.look()
        places = [look.place(each.record.label) for each in long]
        if sum(place.state() == "prefilling" for place in places) >= min(num_workers, len(long)):
            return
        await asyncio.sleep(0.002)  # ledgers are asked for, nobody tells


async def _slow(stage: Stage, bytes_per_s: float, for_s: float, but: Collection[str] = ()) -> None:
    workers = [name for name in stage.eye.of_role("prefill") if name not in but]
    with suppress(grpc.aio.AioRpcError):  # the cluster may be on its way out
        await stage.eye.inflict(workers, pb.Chaos(slow=pb.Slow(bytes_per_s=bytes_per_s, for_s=for_s)))


async def _strike(stage: Stage, aim: Aim, made: list[Fault], sent: list[Sent]) -> tuple[Strike, float | None]:
    draining = await _drain(stage, made) if aim.drains else frozenset[str]()
    fault, look = await _best_moment(stage, aim, made, sent)
    at = await fault.strike()
    try:
        but = {fault.worker} if fault.is_silencing else set[str]()
        slowing = asyncio.create_task(_slow(stage, *FULL_SPEED, but=but))
        detection_s = await fault.noticed(stage.eye, at, look)
        await asyncio.sleep(at + STOP_S - time.monotonic())
        await slowing
    finally:
        await fault.end()
    await _slow(stage, *FULL_SPEED)
    return Strike(aim.victim, fault.worker, draining, look, at), detection_s


async def _best_moment(stage: Stage, aim: Aim, made: list[Fault], sent: list[Sent]) -> tuple[Fault, Look]:
    """Look until a fault would hit the neediest state well; in the end take what there is."""
    began, coming = time.monotonic(), 0  # hits to be had since links are slow
    while True:
        look = await stage.eye.look()
        waited_s = time.monotonic() - began
        wanted = _wanted(aim, waited_s)
        fault, worth = max(((each, _worth(look, aim, each, sent)) for each in made), key=lambda each: each[1])
        if aim.drains or worth >= min(wanted, coming or wanted) or waited_s > AIM_LIMIT_S:
            return fault, look
        if not coming and aim.states[0] == "transferring":
            coming = max(num_coming(look, aim, each, sent, wanted) for each in made)
            if coming:
                await _slow(stage, stage.slow_bytes_per_s, SLOW_FOR_S)
        await asyncio.sleep(0.002)  # ledgers are asked for, nobody tells


def _wanted(aim: Aim, waited_s: float) -> int:
    """How many hits are worth it: of a pass, one decode worker gets half; less and less, as the readers get through."""
    most = 3 if aim.victim.role == "decode" else 4
    return max(1, most - int(1.5 * waited_s))


def num_coming(look: Look, aim: Aim, fault: Fault, sent: list[Sent], wanted: int) -> int:
    """Requests that it will hit while transferring if links are slow from now on; 0 if a later pass promises more."""
    found = candidates(look, sent, aim.victim, fault.worker)
    states = [found.get(each.record.label) for each in sent if not each.job.is_long]  # whose pass is their last
    num_computing = states.count("prefilling")
    return num_computing if num_computing >= min(wanted, states.count("queued")) else 0


def _worth(look: Look, aim: Aim, fault: Fault, sent: list[Sent]) -> float:
    """Requests that it would hit in the neediest state; a little for those in others."""
    states = list(candidates(look, sent, aim.victim, fault.worker).values())
    return states.count(aim.states[0]) + sum(states.count(state) for state in aim.states[1:]) / 100


async def _drain(stage: Stage, made: list[Fault]) -> frozenset[str]:
    """Let the busiest worker that a fault is for drain, or the busiest of each role, once they have work."""
    began = time.monotonic()
    workers = await _busiest(stage, [fault.worker for fault in made if fault.worker])
    for worker in workers:
        request = pb.DrainWorkerRequest(worker=worker, limit_s=DRAIN_LIMIT_S)
        await stage.eye.service.DrainWorker(request, timeout=CALL_LIMIT_S)
    made[:] = [fault for fault in made if fault.worker in {"", *workers}]
    await stage.eye.seen_after(
        began, 2 * AIM_LIMIT_S, lambda status: workers == {each.id for each in status.workers if each.draining}
    )
    return frozenset(workers)


async def _busiest(stage: Stage, befallen: list[str]) -> set[str]:
    """The one of these with most requests; of none: the one of each role."""
    groups = [befallen] if befallen else [stage.eye.of_role(role) for role in sorted(ROLES)]
    began = time.monotonic()
    while True:
        places = (await stage.eye.look()).places.values()
        loads = {worker: sum(place.is_on(worker) for place in places) for group in groups for worker in group}
        busiest = {max(group, key=loads.__getitem__) for group in groups}
        if min(loads[worker] for worker in busiest) >= DRAIN_LOAD - 4 * (time.monotonic() - began):
            return busiest
        await asyncio.sleep(0.002)  # ledgers are asked for, nobody tells


async def _outcome(stage: Stage, strike: Strike, sent: list[Sent], detection_s: float | None) -> Outcome:
    leaked, findings = await _audit(stage, strike)
    still_s = stage.stillness.longest_s(strike.at, strike.at + (detection_s or STOP_S))
    return Outcome(
        victim=strike.victim,
        hits=tuple(hits(strike, sent)),
        verdicts=tuple(judge(each.record, each.job.expected) for each in sent),
        resumes=sum(each.record.resumes for each in sent),
        look_age_s=strike.at - strike.look.began,
        detection_s=detection_s,
        still_s=still_s,
        leaked_pages=leaked,
        findings=findings,
        errors=tuple(f"{each.record.label}: {each.record.error}" for each in sent if each.record.error),
    )


async def _audit(stage: Stage, strike: Strike) -> tuple[int | None, tuple[str, ...]]:
    """Pages that somebody holds although nobody asks for anything, and what routers and workers disagree on."""
    if strike.victim is GCS_GONE:  # the cluster is leaving: ask the workers as long as they are there
        return await _pages_of_leaving(stage), ()
    gone = leaving(strike.victim) if strike.draining else ()
    await whole(stage.eye, stage.num_workers - len(gone))
    await stage.eye.meet()
    limit = time.monotonic() + CLEAN_LIMIT_S
    while (in_use := (await stage.eye.look()).in_use) and time.monotonic() < limit:
        await asyncio.sleep(0.05)
    return in_use, await _findings(stage)


async def _pages_of_leaving(stage: Stage) -> int | None:
    seen: int | None = None
    with suppress(grpc.aio.AioRpcError):
        while seen := (await stage.eye.look()).in_use:
            await asyncio.sleep(0.01)
    return seen


async def _findings(stage: Stage) -> tuple[str, ...]:
    samples: list[list[pb.GetLedgerResponse]] = []
    while len(samples) < AUDITS and (not samples or lasting(samples)):
        if samples:
            await asyncio.sleep(AUDIT_INTERVAL_S)
        samples.append([await stage.eye.service.GetLedger(pb.GetLedgerRequest(), timeout=2 * CALL_LIMIT_S)])
    return tuple(map(str, lasting(samples)))


async def whole(eye: Eye, num_workers: int) -> None:
    """Wait until so many workers are there, and linked. Raises TimeoutError."""
    began = time.monotonic()
    waited_s = await eye.seen_after(
        began, WHOLE_LIMIT_S, lambda status: len(status.workers) == num_workers and is_linked(status)
    )
    if waited_s > WHOLE_LIMIT_S:
        raise TimeoutError(f"not {num_workers} workers, all linked, within {WHOLE_LIMIT_S:g} s: {await eye.status()}")


async def _until(holds: Callable[[], bool], limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        while not holds():
            await asyncio.sleep(0.005)
