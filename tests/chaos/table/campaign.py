"""Rounds, one after the other, until every cell has its hits or the time is up.

One cluster stands through all faults that it survives whole. Draining workers leave for good (those that are killed
while they drain come back): a cluster is used for such rounds until one worker of each role is left. It ends with Ray's
GCS gone, which takes no spare worker: `up` then leaves.
"""

import itertools
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.chaos.table.cells import GCS_GONE, HEALING_DRAINS, ROLES, STATES, VICTIMS, Cell, Victim, leaving
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

Kind = tuple[Victim, bool]  # of a round: what befalls whom, and whether workers drain
STANDING: tuple[Kind, ...] = (
    *((victim, False) for victim in VICTIMS if victim is not GCS_GONE),
    *((victim, True) for victim in HEALING_DRAINS),
)


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
    slot_bytes: int  # so many that a reader's prompt takes several payloads, each of a group of layers
    minutes: float


def toy_plan(folder: Path, minutes: float, num_sets: int = 5) -> Plan:
    """A random model of 512 tokens; a chunk takes it a fifth of a second, so that prefill can be hit."""
    write_toy_model(
        folder / "toy", max_position_embeddings=4096, num_hidden_layers=6, hidden_size=256, intermediate_size=640
    )
    write_toy_tokenizer(folder / "toy")
    return Plan(
        model=str(folder / "toy"),
        flags=("--dtype", "float32"),
        shape=Shape(),
        num_sets=num_sets,
        slow_bytes_per_s=4e5,
        num_pages=400,
        chunk_tokens=768,
        slot_bytes=27 * 2**12,  # three of six layers of up to nine pages
        minutes=minutes,
    )


def smollm2_plan(minutes: float) -> Plan:
    """The demo model in its default dtype."""
    return Plan(
        model="smollm2",
        flags=(),
        shape=SLOWER,
        num_sets=4,
        slow_bytes_per_s=3e6,
        num_pages=110,
        chunk_tokens=256,
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
        async with self._stage() as stage:
            self._sets = await make_sets(stage.eye.address, self._plan.shape, self._plan.num_sets)
            say(f"{len(self._sets)} sets of {len(self._sets[0])} requests answered without a fault")
            others_s = (1 - STANDING_SHARE) * 60 * self._plan.minutes if programme(self._table) else 0.0
            await self._stand(stage, self._ends_at - others_s)
        while self._has_time() and (kinds := programme(self._table)):
            await self._use_up(kinds)
        if self._has_time() and self._is_needed(STANDING):
            async with self._stage() as stage:
                await self._stand(stage, self._ends_at)

    async def _stand(self, stage: Stage, until: float) -> None:
        """Rounds that leave the cluster whole, one victim after the other so that each can recover."""
        while time.monotonic() < until and self._is_needed(STANDING):
            await self._play_all(stage, STANDING)

    async def _use_up(self, kinds: Sequence[Kind]) -> None:
        """Rounds on a cluster of their own."""
        async with self._stage(check_exit=(GCS_GONE not in (victim for victim, _ in kinds))) as stage:
            await self._play_all(stage, kinds)

    def _is_needed(self, kinds: Sequence[Kind]) -> bool:
        return any(self._aim(*kind) for kind in kinds)

    def _aim(self, victim: Victim, drains: bool) -> Aim | None:
        """What the next fault of this kind is for; None when there are hits enough."""
        cells = [cell for cell in self._table.lines if cell.victim is victim and (cell.state == "draining") is drains]
        needy = self._table.needy(cells)
        return Aim(victim, [cell.state for cell in needy]) if needy else None

    async def _play_all(self, stage: Stage, kinds: Sequence[Kind]) -> None:
        """One round of each kind that is still needed, while there is time."""
        for victim, drains in kinds:
            if self._has_time() and (aim := self._aim(victim, drains)):
                await self._play(stage, aim)
                if drains:
                    stage = replace(stage, num_workers=stage.num_workers - len(leaving(victim)))

    async def _play(self, stage: Stage, aim: Aim) -> None:
        number = next(self._numbers)
        began = time.monotonic()
        outcome = await play(stage, aim, self._sets[number % len(self._sets)], f"round{number}")
        self._table.add(outcome)
        say(
            f"round {number}, {aim.victim.name}, for {aim.states[0]}: {told(outcome)}; {time.monotonic() - began:.1f} s"
        )

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


def programme(table: Table) -> list[Kind]:
    """What to play on the next cluster: the neediest faults that workers can drain for, then Ray's GCS gone."""
    spare, kinds = set(ROLES), list[Kind]()
    for cell in table.needy([Cell("draining", victim) for victim in VICTIMS if leaving(victim)]):
        if (gone := leaving(cell.victim)) <= spare:
            kinds.append((cell.victim, True))
            spare -= gone
    kinds.sort(key=lambda kind: (kind[0] is GCS_GONE, kind[0].role == "prefill"))  # it ends the cluster
    if (GCS_GONE, True) not in kinds and table.needy(
        [Cell(state, GCS_GONE) for state in STATES if state != "draining"]
    ):
        kinds.append((GCS_GONE, False))
    return kinds


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
