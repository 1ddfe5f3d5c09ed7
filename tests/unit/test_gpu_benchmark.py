"""The GPU benchmark in a dry run: every part runs on a CPU, one that hangs or dies costs its own rows, and nothing is
imported that the GPU machine lacks."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.on_gpu.report import Context, Rates, Row, table

ROOT = Path(__file__).parents[2]
ABSENT = ("ray", "redis", "gguf", "tokenizers", "llguidance", "psutil", "typer", "yaml", "google.rpc", "grpc_status")


def test_all_parts_run_and_say_that_all_is_well(tmp_path: Path) -> None:
    command = [str(ROOT / "benchmarks" / "gpu.sh"), "--dry", "--out", str(tmp_path)]
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "gpu.json").read_text())
    rows = [Row(**row) for row in result["rows"]]
    assert not [row for row in rows if row.what in ("failed", "left out") or "WRONG" in row.note], done.stdout
    assert {row.part for row in rows} >= gpu.PARTS.keys() - {"machine"}
    assert all(rate == 0 or isinstance(rate, str) or rate > 0 for rate in result["rates"].values())
    assert "dry run" in done.stdout
    wrong = [row for row in rows if "are not those of transformers" in row.what]
    assert [row.measured for row in wrong] == [0]


def test_what_goes_wrong_in_a_part_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {name: ("fake", name, limit) for name, limit in {"good": 20, "bad": 20, "slow": 0.3, "dead": 20}.items()}
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(gpu, "import_module", lambda name: Fake)
    context, rows = gpu.measure(list(parts), Context(is_dry=True), limit_s=60)
    assert context.rates.device == "found"
    assert [(row.part, row.what, row.note) for row in rows] == [
        ("good", "a row", ""),
        ("bad", "a row", ""),
        ("bad", "failed", "ValueError: broken"),
        ("slow", "a row", ""),
        ("slow", "failed", "over its time limit"),
        ("dead", "failed", "its process died"),
    ]


def test_no_time_left() -> None:
    _, rows = gpu.measure(["machine"], Context(is_dry=True), limit_s=1)
    assert rows == [Row("machine", "left out", None, "", note="no time left of 1 s")]


class Fake:
    """A module of parts."""

    @staticmethod
    def good(context: Context) -> Iterator[Row | Rates]:
        yield Rates("found")
        yield Row("good", "a row", 1.0, "ms")

    @staticmethod
    def bad(context: Context) -> Iterator[Row]:
        yield Row("bad", "a row", 1.0, "ms")
        raise ValueError("broken\nin two lines")

    @staticmethod
    def slow(context: Context) -> Iterator[Row]:
        yield Row("slow", "a row", 1.0, "ms")
        time.sleep(60)

    @staticmethod
    def dead(context: Context) -> Iterator[Row]:
        sys.exit(7)
        yield


def test_the_table_says_how_far_from_the_floor() -> None:
    rows = [
        Row("decode", "step", 6.0, "ms", 4.0, "a|b"),
        Row("gloo", "bytes", 3.0, "GB/s", 4.0),
        Row("x", "y", None, ""),
    ]
    lines = table(Context(False, Rates("H200", 4.3e12)), rows).splitlines()
    assert lines[-3:] == [
        "| decode | step | 6 ms | 4 ms | 1.50 x | a/b |",
        "| gloo | bytes | 3 GB/s | 4 GB/s | 75% of it |  |",
        "| x | y |  |  |  |  |",
    ]


def test_it_needs_nothing_that_the_gpu_machine_lacks() -> None:
    modules = ["benchmarks.gpu", *(f"benchmarks.on_gpu.{path.stem}" for path in ROOT.glob("benchmarks/on_gpu/*.py"))]
    lines = ["import sys, importlib", f"sys.modules.update(dict.fromkeys({ABSENT!r}))"]
    lines += [f"importlib.import_module({name!r})" for name in modules if not name.endswith("models")]
    lines += [
        "import engine.load, engine.cuda.graphs, transport.torch_dist, decode_worker.worker, prefill_worker.worker"
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
