"""`python -m tests.chaos.table`: play rounds until every cell has its hits, and print the failure table."""

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.chaos.table.campaign import Campaign, Plan
from tests.chaos.table.cells import select
from tests.chaos.table.load import Shape
from tests.chaos.table.table import Table
from tests.toy import write_toy_model
from tests.toy_tokenizer import write_toy_tokenizer


def toy_plan(folder: Path, minutes: float, num_sets: int = 6) -> Plan:
    """A random model of 512 tokens and six layers."""
    write_toy_model(folder / "toy", max_position_embeddings=4096, num_hidden_layers=6)
    write_toy_tokenizer(folder / "toy")
    flags = ("--dtype", "float32")
    return Plan(str(folder / "toy"), flags, Shape(), num_sets, slow_bytes_per_s=4e5, num_pages=480, minutes=minutes)


def smollm2_plan(minutes: float) -> Plan:
    """The demo model in its default dtype."""
    return Plan("smollm2", (), Shape().scaled(0.15), 2, slow_bytes_per_s=8e6, num_pages=480, minutes=minutes)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.table", description=__doc__)
    parser.add_argument("--hits", type=int, default=20, help="of every cell, at least")
    parser.add_argument("--cells", nargs="*", default=["*"], help="decoding/*, '*/decode killed', ...")
    parser.add_argument("--model", choices=["toy", "smollm2"], default="toy")
    parser.add_argument("--minutes", type=float, default=24, help="stop after so long, with what there is")
    parser.add_argument("--run-dir", help="keep the clusters' logs there")
    parser.add_argument("--json", type=Path, help="also write it there")
    parser.add_argument("--markdown", type=Path, help="also write it there")
    return parser.parse_args()


def main() -> int:
    """0 when nothing failed, got lost, doubled, changed or leaked, and every cell has its hits."""
    arguments = parsed()
    table = Table(select(arguments.cells), arguments.hits)
    with tempfile.TemporaryDirectory() as folder:
        toy = arguments.model == "toy"
        plan = toy_plan(Path(folder), arguments.minutes) if toy else smollm2_plan(arguments.minutes)
        if arguments.run_dir:
            plan = replace(plan, flags=(*plan.flags, "--run-dir", arguments.run_dir))
        try:
            asyncio.run(Campaign(plan, table).run())
        finally:
            sys.stdout.write(table.markdown())
            if arguments.markdown:
                arguments.markdown.write_text(table.markdown())
            if arguments.json:
                arguments.json.write_text(json.dumps(table.plain(), indent=1))
    return 0 if table.is_clean and not table.needy(table.lines) else 1


if __name__ == "__main__":
    sys.exit(main())
