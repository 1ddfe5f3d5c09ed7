"""The textbook's statements about the two stages, and what was measured of each: a verdict by a stated rule.

A result's life: `benchmarks.stages` measures it -> JSON -> statements, tables (here) and plots (`benchmarks.plots`) in
one section of a document. Times are milliseconds; every curve is in order of length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.fits import Curve, Line, Point, exponent, line, line_of, ratio

FLAT = 1.2  # from one end of the fitted line to the other, of what is called flat
STRAIGHT = 0.99  # R^2 of what is called a straight line
SAME_POWER = 0.15  # difference of exponents that are called the same

HOLDS = "holds"
BUT_FOR_KV = "holds but for the KV that a step reads"
FAILS = "does not hold here"


@dataclass(frozen=True)
class Result:
    """One run."""

    where: str  # machine and versions
    date: str
    model: str  # and dtype
    is_exact: bool  # then with and without the cache the logits were the same bits
    rounds: int  # over all lengths; prompts and completions of more than so many tokens are in every other one
    long_prompt: int
    long_output: int
    num_checked: int  # answers whose counts of steps and computed tokens were as they must be
    prompt_ttft: Curve  # against prompt tokens
    prompt_tpot: Curve
    output_total: Curve  # against completion tokens
    output_ttft: Curve
    cached_step: Curve  # against tokens in context
    recomputed_step: Curve
    prompt_completion: int  # completion tokens behind each of the prompts
    output_prompt: int  # prompt tokens before each of the completions
    prompt_second: Curve = ()  # from first to second token: the last KV travels meanwhile; older results lack it


@dataclass(frozen=True)
class Statement:
    """What a textbook says, and what came out."""

    says: str
    found: str
    verdict: str


def statements(result: Result) -> tuple[Statement, ...]:
    """All six."""
    return (
        grows("TTFT grows with the prompt, as its FLOPs do", result.prompt_ttft),
        flat("TPOT does not depend on the prompt's length", result.prompt_tpot),
        straight("Total time is TTFT plus a constant per further token", result.output_total),
        flat("TTFT does not depend on the number of output tokens", result.output_ttft),
        flat("With a KV cache a step does not depend on the context", result.cached_step),
        grows("Without one, a step costs a prefill of the whole context", result.recomputed_step),
    )


def grows(says: str, curve: Curve) -> Statement:
    """Holds where the measured exponent is that of the floors."""
    at = [point.at for point in curve]
    measured, expected = exponent(at, _medians(curve)), exponent(at, _floors(curve))
    found = f"{_range(curve)}: as n^{measured:.2f}; the floors as n^{expected:.2f}"
    return Statement(says, found, HOLDS if abs(measured - expected) <= SAME_POWER else FAILS)


def flat(says: str, curve: Curve) -> Statement:
    """Holds where a line through the medians hardly rises, or as much as that of the floors, which count the KV read.

    The line, because a noisy machine sets single medians apart; how far is said beside it.
    """
    at = [point.at for point in curve]
    fit, floor = line_of(curve), line(at, _floors(curve))
    rise, expected = _rise(fit, at), _rise(floor, at)
    found = (
        f"{_range(curve)}: fitted rise x {rise:.2f} ({1000 * fit.slope:+.1f} us per token), of the floors"
        f" x {expected:.2f} ({1000 * floor.slope:+.1f}); greatest over least median {ratio(_medians(curve)):.2f}"
    )
    if _is_flat(rise):
        return Statement(says, found, HOLDS)
    return Statement(says, found, BUT_FOR_KV if _is_flat(rise / expected) else FAILS)


def _rise(fit: Line, at: Sequence[int]) -> float:
    """From the shortest to the longest."""
    return fit.at(at[-1]) / fit.at(at[0])


def _is_flat(rise: float) -> bool:
    return 1 / FLAT <= rise <= FLAT


def straight(says: str, curve: Curve) -> Statement:
    """Holds where a straight line explains the medians."""
    fit = line_of(curve)
    found = f"{_range(curve)}: {fit.start:,.0f} ms + {fit.slope:.1f} ms per token, R^2 {fit.r2:.4f}"
    return Statement(says, found, HOLDS if fit.r2 >= STRAIGHT and fit.slope > 0 else FAILS)


def section(result: Result, plots: Sequence[str]) -> str:
    """Markdown; `plots` are the paths of the three, from where the document stands."""
    exact = ", exact" if result.is_exact else ""
    parts = [
        f"{result.date}: {result.where}; {result.model}{exact}; one prefill and one decode worker, one thread each.",
        _table(("the textbook", "measured", "verdict"), [(e.says, e.found, e.verdict) for e in statements(result)]),
        _image("TTFT and TPOT against prompt length", plots[0]),
        _curves("prompt tokens", _of_prompt(result)),
        _image("total time and TTFT against output length", plots[1]),
        _curves("output tokens", {"total": result.output_total, "TTFT": result.output_ttft}),
        _image("step time against context, with and without KV cache", plots[2]),
        _curves("context tokens", {"with cache": result.cached_step, "without": result.recomputed_step}),
        _remarks(result),
    ]
    return "\n\n".join(parts)


def _of_prompt(result: Result) -> dict[str, Curve]:
    second = {"first to second token": result.prompt_second} if result.prompt_second else {}
    return {"TTFT": result.prompt_ttft, "TPOT": result.prompt_tpot, **second}


def _remarks(result: Result) -> str:
    curves = (result.prompt_ttft, result.prompt_tpot, result.output_total, result.output_ttft)
    worst = max(point.spread for curve in curves for point in curve)
    last, cached = result.recomputed_step[-1], result.cached_step[-1]
    same = ", and its logits are the same bits" if result.is_exact else ""
    return "\n".join(
        [
            f"* Medians [least..greatest] of {result.rounds} rounds; prompts of more than {result.long_prompt:,} and"
            f" completions of more than {result.long_output:,} tokens are in every other round. The widest range of a"
            f" request's times: {100 * worst:.0f} % of their median.",
            f"* At {last.at:,} tokens the cache makes a step {last.median / cached.median:.0f} times as fast{same};"
            f" medians of {len(cached.values)} steps with and {len(last.values)} without.",
            f"* In each of {result.num_checked} answers: decode steps = completion tokens - 1; prompt tokens computed ="
            " prompt tokens, none of them cached.",
        ]
    )


def _curves(head: str, curves: dict[str, Curve]) -> str:
    """A row for every length."""
    names = [column for name in curves for column in (f"{name}, ms", "floor")]
    columns: list[Callable[[Point], str]] = [_value, lambda point: _ms(point.floor)]
    rows = [
        (f"{points[0].at:,}", *(column(point) for point in points for column in columns))
        for points in zip(*curves.values(), strict=True)
    ]
    return _table((head, *names), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def _image(text: str, path: str) -> str:
    return f"![{text}]({path})"


def _value(point: Point) -> str:
    return f"{_ms(point.median)} [{_ms(min(point.values))}..{_ms(max(point.values))}]"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _range(curve: Curve) -> str:
    return f"{curve[0].at:,} to {curve[-1].at:,} tokens"


def _medians(curve: Curve) -> list[float]:
    return [point.median for point in curve]


def _floors(curve: Curve) -> list[float]:
    return [point.floor for point in curve]
