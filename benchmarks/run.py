"""`make bench`: what a cluster of one prefill and one decode worker does on this machine, beside the machine's floors
(`pdserve doctor`).

    python -m benchmarks.run [--model smollm2] [--out FILE.json]

Prints one table; medians, with minimum and maximum. Nothing here is a test: noisy machines give noisy figures.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from benchmarks.load import closed_loop, request
from pdserve.v1 import generation_pb2 as pb
from pdserve.v1 import generation_pb2_grpc

SHORT = (128, 64)  # tokens of prompt and completion where TPOT is measured
READY_LIMIT_S = 120.0


@contextmanager
def cluster(flags: Sequence[str]) -> Iterator[tuple[str, float]]:
    """`pdserve up`; the router's address and the seconds until it was ready."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        began = time.perf_counter()
        command = [sys.executable, "-m", "cluster.cli", "up", "--ready-file", str(ready), *flags]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not ready.exists():
                if process.poll() is not None or time.perf_counter() - began > READY_LIMIT_S:
                    raise SystemExit("pdserve up did not get ready")
                time.sleep(0.05)  # a file has nobody to wake us
            yield json.loads(ready.read_text())["grpc"], time.perf_counter() - began
        finally:
            process.terminate()
            process.wait(60)


def latency(address: str, num_prompt: int, num_output: int, repeats: int) -> dict[str, Any]:
    """One request at a time."""
    messages = [request(num_prompt, num_output, 1000 * num_prompt + index) for index in range(repeats)]
    answers, _ = asyncio.run(closed_loop(address, messages, 1))
    return {
        "ttft_ms": spread([1000 * each.ttft_s for each in answers]),
        "tpot_ms": spread([1000 * each.tpot_s for each in answers]),
        "second_token_ms": spread([1000 * each.exposed_s for each in answers]),
    }


def throughput(address: str, concurrency: int, num_requests: int, round_: int = 0) -> dict[str, float]:
    """Output tokens per second at a fixed concurrency: 256 in, 128 out.

    whole: from the first start to the last end, which for as many requests as run at once is one wave; steady: in the
    middle half of that time. Every round has prompts of its own, as workers remember what they have computed.
    """
    first_seed = 10**6 * concurrency + 10**3 * (num_requests + round_)
    messages = [request(256, 128, first_seed + index) for index in range(num_requests)]
    answers, wall_s = asyncio.run(closed_loop(address, messages, concurrency))
    times = sorted(time_s for each in answers for time_s in each.times_s)
    end_s = times[-1] - wall_s / 4
    steady = sum(end_s - wall_s / 2 <= time_s < end_s for time_s in times) / (wall_s / 2)
    return {"whole": len(times) / wall_s, "steady": steady}


def rates(address: str, concurrency: int, repeats: int = 3) -> dict[str, list[float]]:
    """One wave; a closed loop of four; and the middle of that loop."""
    waves = [throughput(address, concurrency, concurrency, round_) for round_ in range(repeats)]
    loops = [throughput(address, concurrency, 4 * concurrency, round_) for round_ in range(repeats)]
    return {
        "one wave": [each["whole"] for each in waves],
        "four waves": [each["whole"] for each in loops],
        "steady": [each["steady"] for each in loops],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def model_of(address: str) -> pb.Model:
    """The model served."""
    with grpc.insecure_channel(address) as channel:
        model: pb.Model = generation_pb2_grpc.GenerationServiceStub(channel).GetModel(pb.GetModelRequest()).model
        return model


def machine() -> str:
    """Processor and cores, for whoever reads the table elsewhere."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores"


def measure(model: str, dtype: str) -> dict[str, Any]:
    """Everything, with the floors measured just before."""
    floors = doctor(model, dtype)
    with cluster(["--model", model, "--dtype", dtype]) as (address, ready_s):
        served = model_of(address)
        return {
            "machine": machine(),
            "python": platform.python_version(),
            "dtype": served.dtype,
            "exact": served.exact,
            "floors": floors,
            "decode_floor_ms": floors["decode"][0]["floor_ms"],
            "prefill_floor_ms": {each["tokens"]: each["floor_ms"] for each in floors["prefill"]},
            "ready_s": ready_s,
            "short": latency(address, *SHORT, repeats=5),
            "ttft": {n: latency(address, n, 2, repeats=3) for n in (512, 2000)},
            "tokens_per_s": {c: rates(address, c) for c in (1, 8, 16)},
        }


def doctor(model: str, dtype: str) -> dict[str, Any]:
    """What `pdserve doctor` measures on this machine, for the lengths of the short requests."""
    lengths = ["--prompt-tokens", str(SHORT[0]), "--completion-tokens", str(SHORT[1])]
    command = [sys.executable, "-m", "cluster.cli", "doctor", model, "--dtype", dtype, "--json", *lengths]
    found: dict[str, Any] = json.loads(subprocess.check_output(command))
    return found


def table(result: dict[str, Any]) -> str:
    """The figures for a person."""
    rates_at = {(c, kind): each for c, kinds in result["tokens_per_s"].items() for kind, each in kinds.items()}
    short = result["short"]
    rows = [
        ("ready", f"{result['ready_s']:.1f} s", ""),
        ("TPOT, batch 1, 128-token prompt", _ms(short["tpot_ms"]), f"{result['decode_floor_ms']:.1f} ms"),
        *(
            (f"TTFT, {n} tokens", _ms(each["ttft_ms"]), f"{result['prefill_floor_ms'][n]:.0f} ms")
            for n, each in result["ttft"].items()
        ),
        *(
            (f"output tokens/s at {c}, {kind}", _rate(values), f"{median(values) / median(rates_at[1, kind]):.1f} x")
            for (c, kind), values in rates_at.items()
        ),
    ]
    head = f"{result['machine']}; {result['dtype']}, exact: {result['exact']}; 1 prefill + 1 decode, one thread each"
    lines = [f"| {name} | {value} | {floor} |" for name, value, floor in rows]
    return "\n".join([head, "", "| what | median [min..max] | beside: floor, or ratio to 1 |", "|---|---|---|", *lines])


def _ms(values: dict[str, float]) -> str:
    return f"{values['median']:.1f} [{values['min']:.1f}..{values['max']:.1f}] ms"


def _rate(values: Sequence[float]) -> str:
    return f"{median(values):.1f} [{min(values):.1f}..{max(values):.1f}]"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.model, arguments.dtype)
    print(table(result))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
