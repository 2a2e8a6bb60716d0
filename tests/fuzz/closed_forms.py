"""Exact epsilons and upper bounds in 50 digits by mpmath: one Gaussian, one sampled round, Renyi at whole orders."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import mpmath

DIGITS = 50
ORDERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
_HALVINGS = 60


def gaussian(mu: float, delta: float) -> float:
    """Epsilon of N(mu, 1) against N(0, 1): delta = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)."""
    if mu == 0.0:
        return 0.0

    def curve(epsilon: Any) -> Any:
        return mpmath.ncdf(m / 2 - epsilon / m) - mpmath.exp(epsilon) * mpmath.ncdf(-m / 2 - epsilon / m)

    with mpmath.workdps(DIGITS):
        m = mpmath.mpf(mu)
        return _solved(curve, delta, mu * mu / 2.0 + mu * math.sqrt(-2.0 * math.log(delta)))


def one_round(rate: float, shift: float, delta: float) -> float:
    """Epsilon of (1 - q) N(0, 1) + q N(a, 1) against N(0, 1), the worse of both directions."""

    def output(ratio: Any) -> Any:
        return mpmath.log((ratio - 1 + q) / q) / a + a / 2

    def present(x: Any) -> Any:
        return q * mpmath.ncdf(a - x) + (1 - q) * mpmath.ncdf(-x)

    def removed(epsilon: Any) -> Any:
        x = output(mpmath.exp(epsilon))
        return present(x) - mpmath.exp(epsilon) * mpmath.ncdf(-x)

    def added(epsilon: Any) -> Any:
        if mpmath.exp(-epsilon) <= 1 - q:
            return mpmath.mpf(0)
        x = output(mpmath.exp(-epsilon))
        return mpmath.ncdf(x) - mpmath.exp(epsilon) * (q * mpmath.ncdf(x - a) + (1 - q) * mpmath.ncdf(x))

    with mpmath.workdps(DIGITS):
        q, a = mpmath.mpf(rate), mpmath.mpf(shift)
        highest = shift * shift / 2.0 + shift * math.sqrt(-2.0 * math.log(delta))
        return max(_solved(curve, delta, highest) for curve in (removed, added))


def _solved(curve: Callable[[Any], Any], delta: float, highest: float) -> float:
    """Where the decreasing curve meets delta; 0 where it starts below."""
    if curve(mpmath.mpf(0)) <= delta:
        return 0.0
    low, high = mpmath.mpf(0), mpmath.mpf(highest) * (1 + mpmath.mpf(10) ** -12)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if curve(middle) > delta else (low, middle)
    return float(high)


@lru_cache(maxsize=256)
def renyi(rate: float, shift: float) -> tuple[Any, ...]:
    """Renyi divergence of one sampled round at `ORDERS` (Mironov, Talwar and Zhang 2019, Section 3.3)."""
    with mpmath.workdps(DIGITS):
        q, square = mpmath.mpf(rate), mpmath.mpf(shift) ** 2
        return tuple(
            mpmath.log(
                mpmath.fsum(
                    mpmath.binomial(order, j) * (1 - q) ** (order - j) * q**j * mpmath.exp((j * j - j) * square / 2)
                    for j in range(order + 1)
                )
            )
            / (order - 1)
            for order in ORDERS
        )


def renyi_bound(rounds: Sequence[tuple[float, float, int]], pure: Sequence[float], delta: float) -> float:
    """Epsilon of (rate, shift, count) rounds by whole orders, plus the epsilons of pure releases: an upper bound."""
    with mpmath.workdps(DIGITS):
        totals = [mpmath.mpf(0) for _ in ORDERS]
        for rate, shift, count in rounds:
            totals = [total + count * cost for total, cost in zip(totals, renyi(rate, shift), strict=True)]
        epsilons = [
            total + mpmath.log1p(-mpmath.mpf(1) / order) - mpmath.log(delta * mpmath.mpf(order)) / (order - 1)
            for total, order in zip(totals, ORDERS, strict=True)
        ]
        return max(float(min(epsilons)), 0.0) + math.fsum(pure)


def total_variation(rounds: Sequence[tuple[float, float, int]]) -> float:
    """At least the total variation distance of all (rate, shift, count) rounds."""
    with mpmath.workdps(DIGITS):
        each = (count * rate * (2 * mpmath.ncdf(mpmath.mpf(shift) / 2) - 1) for rate, shift, count in rounds)
        return float(mpmath.fsum(each))
