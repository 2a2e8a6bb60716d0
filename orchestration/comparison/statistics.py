"""Statistics over seeds, correlations and Pareto fronts. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

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
    """Pearson's r of a number of pairs. p_value: probability of ranks that agree or disagree as much by chance."""

    r: float
    pairs: int
    p_value: float


def correlated(one: Numbers, other: Numbers) -> Correlation | None:
    """Return the correlation of two sequences of equal length; None if either is constant.

    The p-value is that of a permutation test of ranks. By r, one small group that is far off in both numbers would look
    like a relation.

    >>> correlated([0.6, 0.8, 0.81], [9.0, 1.0, 0.9]).p_value > 0.1
    True
    """
    r = pearson(one, other)
    if r is None:
        return None
    ranks, others = (np.unique(each, return_inverse=True)[1] for each in (one, other))
    apart = ranks - ranks.mean()
    orders = np.random.default_rng(0).permuted(np.tile(others, (_ORDERS, 1)), axis=1)
    as_far = np.abs(orders @ apart) >= abs(others @ apart) - 1e-9
    return Correlation(r, len(one), float(1 + np.count_nonzero(as_far)) / (_ORDERS + 1))


_ORDERS: Final = 9999
"""Number of permutations."""


def pareto_front(costs: Sequence[tuple[float, ...]]) -> tuple[int, ...]:
    """Return the indices of the points that no other point dominates.

    A point dominates another one if it is at most as large in every coordinate and smaller in one.

    >>> pareto_front([(1.0, 2.0), (2.0, 1.0), (2.0, 2.0)])
    (0, 1)
    """

    def dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
        return all(a <= b for a, b in zip(one, other, strict=True)) and one != other

    return tuple(i for i, cost in enumerate(costs) if not any(dominates(other, cost) for other in costs))
