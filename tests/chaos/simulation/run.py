"""One seed, one run: build the scenario, let it happen, check everything.

python -m tests.chaos.simulation.run --seeds 0:500 [--jobs 2]       a summary, and every problem with its seed
python -m tests.chaos.simulation.run --trace 17                     what happened in the run of seed 17
"""

import argparse
import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

import torch

from decode_worker import growth
from tests.chaos.simulation import planted
from tests.chaos.simulation.checks import census, until_clean, wrong_answers
from tests.chaos.simulation.client import Client, Job
from tests.chaos.simulation.cluster import Cluster
from tests.chaos.simulation.faults import KINDS
from tests.chaos.simulation.scenario import FIRST_S, Scenario, scenario
from tests.chaos.simulation.virtual_loop import Stuck, VirtualLoop
from tests.chaos.simulation.watched import WatchedDecodeLink, WatchedPrefillLink
from transport import receive, send

LIMIT_S = 150.0  # of virtual time, for all
CLEAN_S = 20.0
PART_SEEDS = 25  # that a process takes at a time: the last part is over soon


@dataclass
class Report:
    """What a run brought."""

    seed: int
    problems: list[str] = field(default_factory=list)
    trace: list[tuple[float, str, object]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class _Errors(logging.Handler):
    """Whatever production code logs as an error is a finding."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(f"logged: {self.format(record)}")


@contextmanager
def _surroundings(plan: Scenario, plants: Sequence[str]) -> Iterator[_Errors]:
    """What a run needs of this process: no garbage collection at odd moments, and no log but errors."""
    errors, root, last = _Errors(), logging.getLogger(), logging.lastResort
    with ExitStack() as stack:
        stack.enter_context(patch.object(growth, "BLOCK_TOKENS", plan.shape.block_tokens))
        stack.enter_context(patch.object(receive, "DecodeLink", WatchedDecodeLink))
        stack.enter_context(patch.object(send, "PrefillLink", WatchedPrefillLink))
        for name in plants:
            stack.enter_context(planted.PLANTS[name]())
        root.addHandler(errors)
        logging.lastResort = None
        gc.disable()
        try:
            yield errors
        finally:
            root.removeHandler(errors)
            logging.lastResort = last
            gc.enable()


def run_seed(seed: int, plants: Sequence[str] = ()) -> Report:
    """The run of a seed; what it finds is in `problems`."""
    report, plan = Report(seed), scenario(seed)
    loop = VirtualLoop(LIMIT_S)
    with _surroundings(plan, plants) as errors:
        try:
            loop.finish(_Run(loop, plan, report).main())
        except Stuck as stuck:
            report.problems.append(str(stuck))
        gc.collect(0)  # whatever nobody waits for any more says so now, not in another run
        report.problems += [*loop.problems, *errors.found]
    return report


class _Run:
    """One run in its loop."""

    def __init__(self, loop: VirtualLoop, plan: Scenario, report: Report) -> None:
        self._loop = loop
        self._plan = plan
        self._report = report

    async def main(self) -> None:
        """From an empty cluster to an empty cluster."""
        cluster = Cluster(self._loop, self._plan.shape, Random(self._plan.seed + 1))
        self._report.trace = cluster.network.trace
        cluster.start()
        try:
            await asyncio.sleep(FIRST_S - 0.01)
            await self._let_happen(cluster)
        finally:
            for host in cluster.hosts():
                await cluster.kill(host)
        self._report.problems += cluster.network.problems

    async def _let_happen(self, cluster: Cluster) -> None:
        report, at_rest = self._report, census(cluster)
        clients = [Client(cluster, job, Random(self._plan.seed * 1000 + job.number)) for job in self._plan.jobs]
        for fault in self._plan.faults:
            self._loop.call_at(fault.at_s, partial(self._inflict, cluster, fault))
        ended = await asyncio.gather(*(client.run() for client in clients), return_exceptions=True)
        report.problems += [f"a client failed: {error!r}" for error in ended if error]
        report.problems += wrong_answers(clients, may_fail=self._plan.may_fail)
        await asyncio.sleep(max([fault.at_s for fault in self._plan.faults], default=0.0) - self._loop.time())
        await cluster.settled()
        report.problems += [f"left over: {left}" for left in await until_clean(cluster, at_rest, CLEAN_S)]
        clients += await self._again(cluster)
        report.problems += [f"at last: {left}" for left in await until_clean(cluster, at_rest, CLEAN_S)]
        report.problems += [problem for node in cluster.all_nodes() for problem in node.engine.problems]
        self._count(cluster, clients)

    async def _again(self, cluster: Cluster) -> list[Client]:
        """The last request once more, now that everything is well: what is cached must be right."""
        now, jobs = self._loop.time(), self._plan.jobs[-1:]
        again = [Job(job.number, now, job.work, job.answer) for job in jobs]
        clients = [Client(cluster, job, Random(job.number)) for job in again]
        await asyncio.gather(*(client.run() for client in clients))
        self._report.problems += [f"at last: {wrong}" for wrong in wrong_answers(clients)]
        return clients

    def _inflict(self, cluster: Cluster, fault: Any) -> None:
        cluster.note(str(fault))
        self._report.counts[type(fault).__name__] += 1
        fault.inflict(cluster)

    def _count(self, cluster: Cluster, clients: Sequence[Client]) -> None:
        records = [record for client in clients for record in client.records]
        nodes = cluster.all_nodes()
        self._report.counts.update(
            requests=len(clients),
            tokens=sum(len(client.received) for client in clients),
            left=sum(client.has_left for client in clients),
            failed=sum(client.error is not None for client in clients),
            resumes=sum(record.resumes for record in records),
            new_routers=len(records) - len(clients),
            cached_tokens=sum(record.cached_tokens for record in records),
            preempted=sum(node.engine.num_preempted for node in nodes),
            steps=sum(node.engine.num_steps for node in nodes),
            payloads=cluster.wires.num_arrived,
            virtual_s=round(self._loop.time()),
        )


def run_seeds(seeds: range, plants: Sequence[str] = ()) -> Iterator[Report]:
    """One after another, in this process."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    for seed in seeds:
        yield run_seed(seed, plants)


@dataclass(frozen=True)
class _Part:
    """What some seeds brought, and what they cost."""

    problems: dict[int, list[str]]  # by seed
    counts: Counter[str]
    cpu_s: float


def _part(seeds: range, plants: Sequence[str]) -> _Part:
    began = time.process_time()
    reports = list(run_seeds(seeds, plants))
    problems = {report.seed: report.problems for report in reports if report.problems}
    counts = sum((report.counts for report in reports), Counter[str]())
    return _Part(problems, counts, time.process_time() - began)


def main() -> int:
    """The command line; 1 when something was found."""
    parser = argparse.ArgumentParser(description="runs of the simulated cluster, a seed each")
    parser.add_argument("--seeds", default="0:200", metavar="FROM:TO")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--trace", type=int, metavar="SEED", help="print all that happens in one run")
    parser.add_argument(
        "--plant", action="append", default=[], choices=sorted(planted.PLANTS), help="a bug, on purpose"
    )
    options = parser.parse_args()
    if options.trace is not None:
        return _print_trace(run_seed(options.trace, options.plant))
    first, _, end = options.seeds.partition(":")
    return _run_all(range(int(first), int(end)), options.jobs, options.plant)


def _print_trace(report: Report) -> int:
    for at_s, what, detail in report.trace:
        print(f"{at_s:10.4f}  {what} {detail}")
    print("\n".join(["", f"seed {report.seed}: {dict(report.counts)}", *report.problems]))
    return int(bool(report.problems))


def _run_all(seeds: range, jobs: int, plants: Sequence[str]) -> int:
    began, cpu_s, bad, counts = time.perf_counter(), 0.0, list[int](), Counter[str]()
    parts = [seeds[at : at + PART_SEEDS] for at in range(0, len(seeds), PART_SEEDS)]
    with ProcessPoolExecutor(jobs) as pool:
        for part in pool.map(partial(_part, plants=plants), parts):
            cpu_s += part.cpu_s
            counts.update(part.counts)
            bad += part.problems
            for seed, problems in part.problems.items():
                print(f"seed {seed}: " + "\n    ".join(problem[:2000] for problem in problems), flush=True)
    print("\n".join(_summary(len(seeds), bad, counts)))
    wall_s = time.perf_counter() - began
    print(f"cost       {wall_s:.0f} s in {jobs} processes, {cpu_s / max(len(seeds), 1):.3f} s of CPU per run")
    return int(bool(bad))


def _summary(num_seeds: int, bad: Sequence[int], counts: Counter[str]) -> Iterator[str]:
    """What happened in all runs together."""
    faults = {kind.__name__: counts[kind.__name__] for kind in KINDS}
    yield f"seeds      {num_seeds}"
    yield "happened   " + ", ".join(f"{what} {number}" for what, number in counts.items() if what not in faults)
    yield f"faults     {sum(faults.values())}: " + ", ".join(f"{kind} {number}" for kind, number in faults.items())
    yield f"problems   in {len(bad)} runs{': seeds ' if bad else ''}{', '.join(map(str, bad[:20]))}"


if __name__ == "__main__":
    raise SystemExit(main())
