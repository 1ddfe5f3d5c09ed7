"""What the engine and the hand-over do on a machine with one CUDA device, each number beside its floor.

    python -m benchmarks.gpu [--out FOLDER] [--parts machine,decode] [--limit-s 450] [--dry]

The parts run one after the other, each in a process of its own with a time limit of its own: what one breaks or leaves
behind, the next does not see, and the rows that it had found stay in the table. Prints the table and writes gpu.json.
`--dry` runs the same code in tiny shapes on a CPU: a test of the script, its numbers mean nothing.
"""

import argparse
import json
import multiprocessing
import os
import platform
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.on_gpu.report import Context, Rates, Row, table
from tests.triton_interpreter import interpret

# In the order of their importance. The first one's rates are the floors of the others.
PARTS = {
    "machine": ("machine", "rates", 40),
    "kernels": ("kernels", "rows", 70),
    "models": ("models", "rows", 100),
    "decode": ("speed", "decode", 100),
    "prefill": ("speed", "prefill", 60),
    "invariance": ("invariance", "rows", 60),
    "pages": ("handover", "pages", 30),
    "gloo": ("handover", "gloo", 40),
    "nccl-self": ("handover_nccl", "self_rows", 30),
    "nccl-pair": ("handover_nccl", "pair_rows", 30),
}
LIMIT_S = 450.0
PACKAGES = ("torch", "triton", "numpy", "transformers", "safetensors")
Found = Row | Rates


def run_part(name: str, context: Context, results: "Connection[Found | str, None]") -> None:
    """The root of a part's process: sends rows and rates as they are found, last what went wrong or nothing."""
    os.setpgid(0, 0)  # so that what it starts ends with it
    module, function, _ = PARTS[name]
    problem = ""
    try:
        for found in getattr(import_module(f"benchmarks.on_gpu.{module}"), function)(context):
            results.send(found)
    except Exception as error:  # the root of a process: the other parts go on
        traceback.print_exc()
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
    results.send(problem)
    results.close()


def found_by(name: str, context: Context, limit_s: float) -> Iterator[Found]:
    """What a part finds, and a row that says so if it fails or is not through in time."""
    fork = multiprocessing.get_context("fork")  # imports are shared; nobody here has touched the device
    results, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=run_part, args=(name, context, theirs))
    process.start()
    assert process.pid is not None
    theirs.close()
    yield from _received(name, results, time.monotonic() + limit_s)
    process.join(1)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _received(name: str, results: "Connection[None, Found | str]", deadline: float) -> Iterator[Found]:
    failed = Row(name, "failed", None, "")
    try:
        while results.poll(max(0.0, deadline - time.monotonic())):
            if isinstance(found := results.recv(), str):
                if found:
                    yield replace(failed, note=found)
                return
            yield found
        yield replace(failed, note="over its time limit")
    except EOFError:
        yield replace(failed, note="its process died")


def measure(names: Sequence[str], context: Context, limit_s: float) -> tuple[Context, list[Row]]:
    """All parts, as far as the time goes."""
    rows: list[Row] = []
    began = time.monotonic()
    for name in names:
        left_s = limit_s - (time.monotonic() - began)
        if left_s < 5:
            rows.append(Row(name, "left out", None, "", note=f"no time left of {limit_s:g} s"))
            continue
        part_began = time.monotonic()
        for found in found_by(name, context, min(left_s, PARTS[name][2])):
            if isinstance(found, Rates):
                context = replace(context, rates=found)
            else:
                rows.append(found)
        print(f"{name}: {time.monotonic() - part_began:.1f} s", flush=True)
    return context, rows


def versions() -> dict[str, str]:
    """Of what computes."""
    known = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            known[package] = version(package)
        except PackageNotFoundError:
            known[package] = "absent"
    return known


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--dry", action="store_true")
    parsed = parser.parse_args(arguments)
    if unknown := set(parsed.parts) - PARTS.keys():
        parser.error(f"no such parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if parsed.dry and find_spec("triton") is not None:
        interpret()
    if parsed.dry:
        torch.set_num_threads(1)
    began = time.monotonic()
    context, rows = measure(parsed.parts, Context(parsed.dry), parsed.limit_s)
    result = {
        "machine": context.rates.device,
        "versions": versions(),
        "seconds": round(time.monotonic() - began, 1),
        "dry": parsed.dry,
        "rates": asdict(context.rates),
        "rows": [asdict(row) for row in rows],
    }
    parsed.out.mkdir(parents=True, exist_ok=True)
    (parsed.out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(context, rows))


if __name__ == "__main__":
    main()
