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
    """start + slope * tokens, by least squares."""

    start: float
    slope: float
    r2: float  # share of the variance that it explains


def line(points: Sequence[Point]) -> Line:
    """Through the medians; at least three of them, or it says nothing."""
    at, medians = [float(point.at) for point in points], [point.median for point in points]
    fit = linear_regression(at, medians)
    return Line(fit.intercept, fit.slope, correlation(at, medians) ** 2)


def exponent(at: Sequence[float], values: Sequence[float]) -> float:
    """The p of values ~ at^p, by least squares through the logarithms: 0 is flat, 1 proportional, 2 quadratic."""
    return linear_regression([log(each) for each in at], [log(each) for each in values]).slope


def ratio(values: Sequence[float]) -> float:
    """The greatest over the least: 1 is flat."""
    return max(values) / min(values)
