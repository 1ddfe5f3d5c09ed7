"""The three plots of `make bench-stages`, as SVG: equal results give equal bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.fits import Curve, line_of
from benchmarks.statements import Result

INK, PAPER, GRID = "#1f2328", "#ffffff", "#d8dee4"  # a background of its own, so that it is readable on a dark page
BLUE, ORANGE = "#0067a5", "#c2500a"  # told apart by the colour-blind too, and by their marks
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "pdserve",  # ids of elements are drawn otherwise
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
}


def plots(result: Result) -> dict[str, str]:
    """SVG text by file name, in the order of the statements."""
    return {
        "stages-prompt.svg": _prompt(result),
        "stages-output.svg": _output(result),
        "stages-cache.svg": _cache(result),
    }


def _prompt(result: Result) -> str:
    with _drawing(f"{result.prompt_completion} tokens out", "prompt tokens") as (axes, svg):
        _draw(axes, "TTFT", result.prompt_ttft, BLUE, "o")
        _draw(axes, "TPOT", result.prompt_tpot, ORANGE, "s")
        _logarithmic(axes, result.prompt_ttft)
    return svg.getvalue()


def _output(result: Result) -> str:
    with _drawing(f"{result.output_prompt} prompt tokens", "output tokens") as (axes, svg):
        _draw(axes, "total", result.output_total, BLUE, "o")
        _draw(axes, "TTFT", result.output_ttft, ORANGE, "s")
        fit = line_of(result.output_total)
        ends = [result.output_total[0].at, result.output_total[-1].at]
        name = f"{fit.start:,.0f} ms + {fit.slope:.1f} ms per token"
        axes.plot(ends, [fit.at(end) for end in ends], color=BLUE, linewidth=1, label=name)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    return svg.getvalue()


def _cache(result: Result) -> str:
    with _drawing("one step of one sequence", "tokens in context") as (axes, svg):
        _draw(axes, "without KV cache", result.recomputed_step, BLUE, "o")
        _draw(axes, "with KV cache", result.cached_step, ORANGE, "s")
        _logarithmic(axes, result.cached_step)
    return svg.getvalue()


@contextmanager
def _drawing(title: str, x_label: str) -> Iterator[tuple[Axes, StringIO]]:
    """Axes to draw on, and where the SVG is when the block has ended."""
    svg = StringIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7, 3.8), layout="constrained")
        axes = figure.subplots()
        yield axes, svg
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel(x_label)
        axes.set_ylabel("ms")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.legend(frameon=False)
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})


def _draw(axes: Axes, name: str, curve: Curve, color: str, mark: str) -> None:
    """Medians with bars from the least to the greatest, and the floor."""
    at, medians = [point.at for point in curve], [point.median for point in curve]
    below = [point.median - min(point.values) for point in curve]
    above = [max(point.values) - point.median for point in curve]
    axes.errorbar(at, medians, yerr=(below, above), color=color, fmt="none", capsize=3, elinewidth=1)
    axes.plot(at, medians, color=color, marker=mark, markersize=5, linestyle="none", label=name)
    axes.plot(at, [point.floor for point in curve], color=color, linestyle="--", linewidth=1, label=f"floor, {name}")


def _logarithmic(axes: Axes, curve: Curve) -> None:
    """Both ways: a straight line is a power law. Ticks at the lengths that were measured."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([point.at for point in curve])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
