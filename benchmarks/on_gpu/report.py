"""What the parts of `benchmarks.gpu` are given and what they give, and the table of it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch


@dataclass(frozen=True)
class Rates:
    """What the machine does at best, in units per second; 0 where nobody has measured it."""

    device: str = "?"
    copy_bytes: float = 0.0  # on the device, counting what is read and what is written
    to_host_bytes: float = 0.0  # into pinned memory
    from_host_bytes: float = 0.0
    flops: float = 0.0  # of a large matrix product in bf16


@dataclass(frozen=True)
class Context:
    """How a part runs."""

    is_dry: bool
    rates: Rates = field(default_factory=Rates)

    @property
    def device(self) -> torch.device:
        """Where."""
        return torch.device("cpu" if self.is_dry else "cuda")

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.is_dry:
            torch.cuda.synchronize()

    def best_s(self, work: Callable[[], object], repeats: int = 10) -> float:
        """The shortest wall time of `work`, after a warm-up."""
        return min(self.times_s(work, repeats))

    def median_s(self, work: Callable[[], object], repeats: int = 10) -> float:
        """The median."""
        return median(self.times_s(work, repeats))

    def times_s(self, work: Callable[[], object], repeats: int) -> list[float]:
        """Each with the device idle before and after."""
        times = []
        for _ in range((1 if self.is_dry else repeats) + 1):
            self.synchronize()
            began = time.perf_counter()
            work()
            self.synchronize()
            times.append(time.perf_counter() - began)
        return times[1:]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    part: str
    what: str
    measured: float | None
    unit: str
    floor: float | None = None  # in the same unit: what the machine allows at best
    note: str = ""

    @property
    def times_floor(self) -> str:
        """How far from it."""
        if not self.floor or self.measured is None:
            return ""
        more_is_better = self.unit.endswith("/s")
        ratio = self.measured / self.floor
        return f"{ratio:.0%} of it" if more_is_better else f"{ratio:.2f} x"


def ratio_s(amount: float, rate: float) -> float | None:
    """The time that an amount takes at a rate; None where nobody has measured the rate."""
    return amount / rate if rate else None


def ms(seconds: float | None) -> float | None:
    """In milliseconds."""
    return None if seconds is None else 1000 * seconds


def table(context: Context, rows: Sequence[Row]) -> str:
    """In Markdown."""
    rates = context.rates
    head = (
        f"{rates.device}{' (dry run: the numbers mean nothing)' if context.is_dry else ''}: "
        f"copy {rates.copy_bytes / 1e9:.0f} GB/s, to host {rates.to_host_bytes / 1e9:.1f} GB/s, "
        f"from host {rates.from_host_bytes / 1e9:.1f} GB/s, bf16 product {rates.flops / 1e12:.0f} TFLOP/s"
    )
    lines = ["| part | what | measured | floor | | note |", "|---|---|---|---|---|---|"]
    for row in rows:
        measured, floor = (_number(value, row.unit) for value in (row.measured, row.floor))
        note = row.note.replace("|", "/")
        lines.append(f"| {row.part} | {row.what} | {measured} | {floor} | {row.times_floor} | {note} |")
    return "\n".join([head, "", *lines])


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.4g} {unit}".strip()
