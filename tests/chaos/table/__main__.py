"""`python -m tests.chaos.table`: play rounds until every cell has its hits, and print the failure table."""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from tests.chaos.table.campaign import Campaign, smollm2_plan, toy_plan
from tests.chaos.table.cells import select
from tests.chaos.table.document import update
from tests.chaos.table.table import Table

SHARES = {"toy": 0.88, "smollm2": 1.0}  # of the time that is left, at most
# The second, smaller table: what the real model's dtype could change
SMALLER = ("[!d]*/* killed", "[!d]*/* stopped", "[!d]*/link cut", "decoding/* killed", "decoding/* stopped")


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.table", description=__doc__)
    parser.add_argument("--hits", type=int, default=20, help="of every cell, at least; with smollm2 a fifth of them")
    parser.add_argument("--cells", nargs="*", help="decoding/*, '*/decode killed', ...; default all, of smollm2 fewer")
    parser.add_argument("--model", choices=["toy", "smollm2"], help="default: both, one after the other")
    parser.add_argument("--minutes", type=float, default=24.5, help="stop after so long, with what there is")
    parser.add_argument("--run-dir", help="keep the clusters' logs there")
    parser.add_argument("--json", type=Path, help="also write it there")
    parser.add_argument("--update", type=Path, help="also put it in its place in this document")
    return parser.parse_args()


def main() -> int:
    """0 when nothing failed, got lost, doubled, changed or leaked, and every cell has its hits."""
    arguments = parsed()
    logging.basicConfig(level=logging.ERROR)  # a client that resumes says so, each time
    is_good, tables, ends_at = True, {}, time.monotonic() + 60 * arguments.minutes
    for model, share in SHARES.items() if arguments.model is None else [(arguments.model, 1.0)]:
        is_toy = model == "toy"
        cells = select(arguments.cells or (["*"] if is_toy else SMALLER))
        table = tables[model] = Table(cells, arguments.hits if is_toy else -(-arguments.hits // 5))
        _fill(table, is_toy, (ends_at - time.monotonic()) / 60 * share, arguments.run_dir)
        if arguments.update:
            update(arguments.update, model, table.markdown())
        is_good = is_good and table.is_clean and not table.needy(table.lines)
    if arguments.json:
        arguments.json.write_text(json.dumps({model: table.plain() for model, table in tables.items()}, indent=1))
    return 0 if is_good else 1


def _fill(table: Table, is_toy: bool, minutes: float, run_dir: str | None) -> None:
    """Play, and print the table, also when it comes to a bad end."""
    with tempfile.TemporaryDirectory() as folder:
        plan = toy_plan(Path(folder), minutes) if is_toy else smollm2_plan(minutes)
        if run_dir:
            plan = replace(plan, flags=(*plan.flags, "--run-dir", run_dir))
        try:
            asyncio.run(Campaign(plan, table).run())
        finally:
            sys.stdout.write(table.markdown())
            sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
