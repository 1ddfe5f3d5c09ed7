"""Seeded runs of the whole protocol in virtual time: nothing stuck, wrong or left over; and proof of eyesight."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.simulation.planted import PLANTS
from tests.chaos.simulation.run import run_seed, run_seeds

ROOT = Path(__file__).resolve().parents[3]
ENOUGH = 500  # seeds within which a planted bug must be found


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_no_request_is_stuck_and_no_invariant_broken(first: int) -> None:
    bad = {report.seed: report.problems for report in run_seeds(range(first, first + 10)) if report.problems}
    assert bad == {}, "see `python -m tests.chaos.simulation.run --trace SEED`"


def test_faults_hit_something() -> None:
    reports = list(run_seeds(range(150, 180)))
    total = sum((report.counts for report in reports), Counter[str]())
    assert all(total[what] for what in ("resumes", "preempted", "cached_tokens", "payloads", "KillWorker", "Stop")), (
        total
    )


def test_a_seed_reproduces_its_run() -> None:
    for seed in range(180, 186):
        assert run_seed(seed).trace == run_seed(seed).trace, f"seed {seed}"


def test_a_run_does_not_depend_on_the_hash_seed() -> None:
    commands = [[sys.executable, "-m", "tests.chaos.simulation.run", "--trace", "3"]] * 2
    texts = [
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": str(n)}, capture_output=True, check=True)
        for n, command in enumerate(commands)
    ]
    assert texts[0].stdout == texts[1].stdout
    assert texts[0].stdout


@pytest.mark.parametrize("plant", sorted(PLANTS))
def test_a_planted_bug_is_found(plant: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = next((report for report in run_seeds(range(ENOUGH), [plant]) if report.problems), None)
    assert found is not None
    with capsys.disabled():
        print(f"\n{plant}: found at seed {found.seed}: {found.problems[0].splitlines()[0][:100]}")
