"""What a machine allows to one worker: given by a data sheet, reported by running workers, or measured here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.load import EngineConfig
from engine.measure import REPEATS, measure
from pdserve.speed import Limits
from pdserve.v1.cluster_pb2 import WorkerStatus

READ = "read"  # of memory; a copy is shown beside it, but decode only reads


@dataclass(frozen=True)
class Rate:
    """One thing that the machine can do."""

    what: str
    per_s: float  # bytes or FLOPs
    unit: Literal["B/s", "FLOP/s"]
    source: str


@dataclass(frozen=True)
class Machine:
    """The limits, and what they were chosen from."""

    limits: Limits
    rates: tuple[Rate, ...]


def machine(read_gb_s: float | None, tflops: float | None, found: Callable[[], Sequence[Rate]]) -> Machine:
    """What is given wins; `found` is asked for the rest, if there is any. The best way to multiply is the limit."""
    given = []
    if read_gb_s is not None:
        given.append(Rate(READ, read_gb_s * 1e9, "B/s", "given"))
    if tflops is not None:
        given.append(Rate("matrix product", tflops * 1e12, "FLOP/s", "given"))
    known = {each.unit for each in given}
    rates = given if len(given) == 2 else [*given, *(each for each in found() if each.unit not in known)]
    read = next(each.per_s for each in rates if each.what == READ)
    return Machine(Limits(read, max(each.per_s for each in rates if each.unit == "FLOP/s")), tuple(rates))


def reported(workers: Sequence[WorkerStatus]) -> list[Rate]:
    """The most that any worker measured when it started; empty where none did."""
    limits = [each.limits for each in workers if each.HasField("limits")]
    source = f"the best of {len(limits)} workers, when they started"
    if not limits:
        return []
    return [
        Rate(READ, max(each.read_bytes_per_s for each in limits), "B/s", source),
        Rate("matrix product", max(each.flops_per_s for each in limits), "FLOP/s", source),
    ]


def measured(config: EngineConfig) -> list[Rate]:
    """On this machine, now."""
    found = measure(config)
    threads = "one thread" if config.threads == 1 else f"{config.threads} threads"
    source = f"best of {REPEATS}, {threads if config.device == 'cpu' else config.device}"
    products = [Rate(f"product, {name}", per_s, "FLOP/s", source) for name, per_s in found.flops_per_s.items()]
    copy = Rate("copy, read + written", found.copy_bytes_per_s, "B/s", source)
    return [Rate(READ, found.read_bytes_per_s, "B/s", source), copy, *products]
