"""Rounds add up to a table: one line per cell, the worst of all its hits; as Markdown and as JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.table.cells import STATES, Cell
from tests.chaos.table.hits import Hit
from tests.chaos.table.record import Verdict
from tests.chaos.table.rounds import Outcome

DETECTION_LIMIT_S = 1.0

_HEAD = (
    "state",
    "victim",
    "hits",
    "resumed",
    "failed",
    "lost / doubled / changed",
    "pages leaked",
    "detected within",
    "next token within",
)


@dataclass
class Line:
    """One cell."""

    cell: Cell
    hits: list[Hit] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)  # rounds with hits

    @property
    def num_hits(self) -> int:
        """Requests that the fault found in the state."""
        return len(self.hits)

    @property
    def num_resumed(self) -> int:
        """Of them."""
        return sum(hit.resumes > 0 for hit in self.hits)

    @property
    def leaked_pages(self) -> int:
        """Over all rounds, where they could be counted."""
        return sum(outcome.leaked_pages or 0 for outcome in self.outcomes) + sum(
            len(outcome.findings) for outcome in self.outcomes
        )

    @property
    def is_void(self) -> bool:
        """Whether nothing was shown: no hit, or nobody had to resume who should have."""
        return not self.hits or (self.cell.must_resume and self.num_resumed == 0)

    @property
    def is_clean(self) -> bool:
        """Whether all is as it should be, as far as it was shown."""
        return all(hit.verdict.is_clean for hit in self.hits) and not self.leaked_pages

    @property
    def detection_s(self) -> float | None:
        """The longest."""
        return _longest(outcome.detection_s for outcome in self.outcomes)

    @property
    def pause_s(self) -> float | None:
        """The longest from a fault to the next token of a request that it hit."""
        return _longest(hit.pause_s for hit in self.hits)


def _longest(seconds: Iterable[float | None]) -> float | None:
    return max((each for each in seconds if each is not None), default=None)


class Table:
    """All cells of interest."""

    def __init__(self, cells: Sequence[Cell], wanted: int) -> None:
        self.lines = {cell: Line(cell) for cell in cells}
        self.wanted = wanted
        self.outcomes: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        """Take in a round; hits in cells that were not asked for count as well, where there is a line."""
        self.outcomes.append(outcome)
        for cell in {hit.cell for hit in outcome.hits} & self.lines.keys():
            self.lines[cell].hits += [hit for hit in outcome.hits if hit.cell == cell]
            self.lines[cell].outcomes.append(outcome)

    def needy(self, cells: Iterable[Cell]) -> list[Cell]:
        """Those that lack hits, the poorest first."""
        lines = [self.lines[cell] for cell in cells if cell in self.lines]
        lacking = [line for line in lines if line.num_hits < self.wanted]
        return [line.cell for line in sorted(lacking, key=lambda line: line.num_hits)]

    @property
    def is_clean(self) -> bool:
        """Whether no request failed or differed, and no page leaked, in any round and any state."""
        verdicts = (verdict for outcome in self.outcomes for verdict in outcome.verdicts)
        return all(verdict.is_clean for verdict in verdicts) and all(line.is_clean for line in self.lines.values())

    def markdown(self) -> str:
        """The table, and the sums over all requests of all rounds."""
        rows = [_HEAD, tuple("---" for _ in _HEAD), *(_row(line) for line in _in_order(self.lines.values()))]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\n{self.summary()}\n"

    def summary(self) -> str:
        """Sums over all requests, those included that were in no clear state."""
        verdicts = [verdict for outcome in self.outcomes for verdict in outcome.verdicts]
        resumes = sum(outcome.resumes for outcome in self.outcomes)
        failed, tokens = sum(verdict.failed for verdict in verdicts), _tokens(verdicts)
        audited = sum(outcome.leaked_pages is not None for outcome in self.outcomes)
        leaked = sum(outcome.leaked_pages or 0 for outcome in self.outcomes)
        detections = [(outcome.detection_s, outcome.still_s) for outcome in self.outcomes if outcome.detection_s]
        slow = [detection for detection in detections if detection[0] >= DETECTION_LIMIT_S]
        still = sum(still_s > 0 for _, still_s in slow)
        age_ms = 1000 * max((outcome.look_age_s for outcome in self.outcomes), default=0.0)
        return (
            f"{len(self.outcomes)} faults with {len(verdicts)} requests under way, {resumes} resumes: "
            f"{failed} requests failed, tokens lost / doubled / changed: {tokens}, "
            f"pages leaked: {leaked} ({audited} audits). "
            f"{len(detections)} faults were to be detected, {len(slow)} took {DETECTION_LIMIT_S:g} s or longer, "
            f"while a CPU stood still in {still} of these. The ledgers were at most {age_ms:.0f} ms old at a fault."
        )

    def plain(self) -> dict[str, Any]:
        """For --json."""
        return {
            "summary": self.summary(),
            "clean": self.is_clean,
            "cells": [dict(zip(_HEAD, _row(line), strict=True)) for line in _in_order(self.lines.values())],
            "errors": [error for outcome in self.outcomes for error in (*outcome.errors, *outcome.findings)],
        }


def _in_order(lines: Iterable[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: STATES.index(line.cell.state))


def _row(line: Line) -> tuple[str, ...]:
    verdicts = [hit.verdict for hit in line.hits]
    return (
        line.cell.state,
        line.cell.victim.name,
        f"{line.num_hits} (void)" if line.is_void else str(line.num_hits),
        str(line.num_resumed),
        str(sum(verdict.failed for verdict in verdicts)),
        _tokens(verdicts),
        str(line.leaked_pages),
        _seconds(line.detection_s),
        _seconds(line.pause_s),
    )


def _tokens(verdicts: Sequence[Verdict]) -> str:
    sums = (
        sum(verdict.lost for verdict in verdicts),
        sum(verdict.doubled for verdict in verdicts),
        sum(verdict.changed for verdict in verdicts),
    )
    return " / ".join(map(str, sums))


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"
