"""Rounds, one after the other, until every cell has its hits or the time is up.

One cluster stands through all faults that it survives whole. The others get one each: Ray's GCS gone (`up` then
leaves), and draining workers (they leave for good), but for those that are killed while they drain: they come back.
"""

import itertools
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tests.chaos.table.cells import GCS_GONE, HEALING_DRAINS, VICTIMS, Victim
from tests.chaos.table.eye import watching
from tests.chaos.table.load import SLOWER, Job, Shape, make_sets
from tests.chaos.table.rounds import Aim, Outcome, Stage, play, whole
from tests.chaos.table.stillness import noting
from tests.chaos.table.table import Table
from tests.e2e.harness import running_cluster
from tests.toy import write_toy_model
from tests.toy_tokenizer import write_toy_tokenizer

NUM_WORKERS = 4
STANDING_SHARE = 0.6  # of the time, at most, for the cluster that stands through its faults


@dataclass(frozen=True)
class Plan:
    """What to run it on, and how long."""

    model: str
    flags: tuple[str, ...]
    shape: Shape
    num_sets: int  # of requests: so many that the caches do not hold them all
    slow_bytes_per_s: float
    num_pages: int
    chunk_tokens: int
    slot_bytes: int  # so many that a prompt takes several payloads
    minutes: float


def toy_plan(folder: Path, minutes: float, num_sets: int = 6) -> Plan:
    """A random model of 512 tokens; a chunk takes it a tenth of a second, so that prefill can be hit."""
    write_toy_model(
        folder / "toy", max_position_embeddings=4096, num_hidden_layers=6, hidden_size=256, intermediate_size=640
    )
    write_toy_tokenizer(folder / "toy")
    return Plan(
        model=str(folder / "toy"),
        flags=("--dtype", "float32"),
        shape=Shape(),
        num_sets=num_sets,
        slow_bytes_per_s=3e5,
        num_pages=480,
        chunk_tokens=384,
        slot_bytes=2**16,
        minutes=minutes,
    )


def smollm2_plan(minutes: float) -> Plan:
    """The demo model in its default dtype."""
    return Plan(
        model="smollm2",
        flags=(),
        shape=SLOWER,
        num_sets=3,
        slow_bytes_per_s=3e6,
        num_pages=200,
        chunk_tokens=128,
        slot_bytes=2**19,
        minutes=minutes,
    )


class Campaign:
    """Fills a table."""

    def __init__(self, plan: Plan, table: Table) -> None:
        self._plan = plan
        self._table = table
        self._ends_at = time.monotonic() + 60 * plan.minutes
        self._numbers = itertools.count()
        self._sets: list[list[Job]] = []

    def _has_time(self) -> bool:
        return time.monotonic() < self._ends_at

    async def run(self) -> None:
        """Everything."""
        standing = [victim for victim in VICTIMS if victim is not GCS_GONE]
        async with self._stage() as stage:
            self._sets = await make_sets(stage.eye.address, self._plan.shape, self._plan.num_sets)
            say(f"{len(self._sets)} sets of {len(self._sets[0])} requests answered without a fault")
            await self._stand(stage, standing)
        kinds = list(product(VICTIMS, (False, True)))
        while aims := [aim for victim, drains in kinds if (aim := self._aim(victim, drains=drains))]:
            for aim in aims:
                if not self._has_time():
                    return
                async with self._stage(check_exit=aim.victim is not GCS_GONE) as stage:
                    await self._play(stage, aim)

    async def _stand(self, stage: Stage, victims: Sequence[Victim]) -> None:
        """Rounds that leave the cluster whole, one victim after the other so that each can recover."""
        until = self._ends_at - (1 - STANDING_SHARE) * 60 * self._plan.minutes
        while time.monotonic() < until and (aims := [aim for victim in victims if (aim := self._aim(victim))]):
            for aim in aims:
                if self._has_time():
                    await self._play(stage, aim)
            for victim in HEALING_DRAINS:
                if self._has_time() and (aim := self._aim(victim, drains=True)):
                    await self._play(stage, aim)

    def _aim(self, victim: Victim, *, drains: bool = False) -> Aim | None:
        """What the next fault of this kind is for; None when there are hits enough."""
        cells = [cell for cell in self._table.lines if cell.victim is victim and (cell.state == "draining") is drains]
        needy = self._table.needy(cells)
        return Aim(victim, [cell.state for cell in needy]) if needy else None

    async def _play(self, stage: Stage, aim: Aim) -> Outcome:
        number = next(self._numbers)
        began = time.monotonic()
        outcome = await play(stage, aim, self._sets[number % len(self._sets)], f"round{number}")
        self._table.add(outcome)
        say(
            f"round {number}, {aim.victim.name}, for {aim.states[0]}: {told(outcome)}; {time.monotonic() - began:.1f} s"
        )
        return outcome

    @asynccontextmanager
    async def _stage(self, *, check_exit: bool = True) -> AsyncIterator[Stage]:
        plan = self._plan
        with tempfile.TemporaryDirectory(prefix="failure-table-") as name:
            folder = Path(name)
            config = folder / "cluster.yaml"
            numbers = {"chunk_tokens": plan.chunk_tokens, "slot_bytes": plan.slot_bytes, "num_pages": plan.num_pages}
            config.write_text(json.dumps(numbers))
            flags = ("--config", str(config), "--prefill", "2", "--decode", "2", "--chaos", "--verify-kv", *plan.flags)
            cluster_flags = ("--model", plan.model, *flags)
            with noting(folder) as stillness, running_cluster(folder, *cluster_flags, check_exit=check_exit) as cluster:
                async with watching(cluster.address) as eye:
                    await whole(eye, NUM_WORKERS)
                    yield Stage(cluster, eye, NUM_WORKERS, plan.slow_bytes_per_s, stillness)


def told(outcome: Outcome) -> str:
    """In one line."""
    states = [hit.cell.state for hit in outcome.hits]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "nothing"
    bad = [verdict for verdict in outcome.verdicts if not verdict.is_clean]
    noticed = "" if outcome.detection_s is None else f", noticed after {outcome.detection_s:.2f} s"
    noticed += f" (a CPU stood still for {outcome.still_s:.2f} s)" if outcome.still_s else ""
    pause = max((hit.pause_s or 0.0 for hit in outcome.hits), default=0.0)
    trouble = "".join(f"\n    {each}" for each in (*bad, *outcome.errors, *outcome.findings))
    return (
        f"hit {counts}{noticed}, next token {pause:.2f} s, {outcome.resumes} resumes, "
        f"leaked {outcome.leaked_pages}{trouble}"
    )


def say(line: str) -> None:
    """Progress, beside the table on standard output."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
