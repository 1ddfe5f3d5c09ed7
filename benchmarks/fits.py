"""Points of a curve, and how it bends: what a power law, a straight line and a flat one make of it. Pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from statistics import correlation, linear_regression, median


@dataclass(frozen=True)
class Point:
    """What was measured at one length, in milliseconds, and the least that the machine allows."""

    at: int  # tokens
    values: tuple[float, ...]
    floor: float

    @property
    def median(self) -> float:
        """Of the values."""
        return median(self.values)

    @property
    def spread(self) -> float:
        """From the least to the greatest, as a share of the median."""
        return (max(self.values) - min(self.values)) / self.median


Curve = tuple[Point, ...]  # in order of length


@dataclass(frozen=True)
class Line:
    """start + slope * tokens."""

    start: float
    slope: float
    r2: float  # share of the variance that it explains

    def at(self, tokens: int) -> float:
        """Its height."""
        return self.start + self.slope * tokens


def line(at: Sequence[int], values: Sequence[float]) -> Line:
    """By least squares; of less than three points it says nothing."""
    fit = linear_regression(at, values)
    is_level = max(values) == min(values)  # then it explains all that there is
    return Line(fit.intercept, fit.slope, 1.0 if is_level else correlation(at, values) ** 2)


def line_of(curve: Curve) -> Line:
    """Through the medians."""
    return line([point.at for point in curve], [point.median for point in curve])


def exponent(at: Sequence[int], values: Sequence[float]) -> float:
    """The p of values ~ at^p, by least squares through the logarithms: 0 is flat, 1 proportional, 2 quadratic."""
    return linear_regression([log(each) for each in at], [log(each) for each in values]).slope


def ratio(values: Sequence[float]) -> float:
    """The greatest over the least: 1 is flat."""
    return max(values) / min(values)
