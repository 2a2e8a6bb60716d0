"""Statistics over seeds, correlations and Pareto fronts. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

Numbers = Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation (0 for a single value), range and count of one number over seeds."""

    mean: float
    deviation: float
    low: float
    high: float
    count: int


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return the spread of the finite values; None if there are none.

    >>> spread([1.0, 3.0, None, math.inf])
    Spread(mean=2.0, deviation=1.4142135623730951, low=1.0, high=3.0, count=2)
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    if low == high:
        return Spread(low, 0.0, low, high, len(finite))
    mean = statistics.fmean(finite)
    deviation = math.hypot(*(value - mean for value in finite)) / math.sqrt(len(finite) - 1)
    return Spread(mean, deviation, low, high, len(finite))


def pearson(one: Numbers, other: Numbers) -> float | None:
    """Return Pearson's r of two sequences of equal length; None if either is constant."""
    if min(np.ptp(one), np.ptp(other)) == 0.0:
        return None
    return float(np.corrcoef(one, other)[0, 1])


@dataclass(frozen=True)
class Correlation:
    """Pearson's r of a number of pairs, more than two."""

    r: float
    pairs: int

    @property
    def p_value(self) -> float:
        """Probability of an r as large in absolute value if there is no correlation, by Student's t.

        >>> round(Correlation(-0.25, pairs=10).p_value, 2), round(Correlation(-0.9, pairs=10).p_value, 4)
        (0.49, 0.0004)
        """
        freedom = self.pairs - 2
        t = abs(self.r) * math.sqrt(freedom / max(1.0 - self.r**2, 1e-300))
        return float(2.0 * special.stdtr(freedom, -t))


def pareto_front(costs: Sequence[tuple[float, ...]]) -> tuple[int, ...]:
    """Return the indices of the points that no other point dominates.

    A point dominates another one if it is at most as large in every coordinate and smaller in one.

    >>> pareto_front([(1.0, 2.0), (2.0, 1.0), (2.0, 2.0)])
    (0, 1)
    """

    def dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
        return all(a <= b for a, b in zip(one, other, strict=True)) and one != other

    return tuple(i for i, cost in enumerate(costs) if not any(dominates(other, cost) for other in costs))
