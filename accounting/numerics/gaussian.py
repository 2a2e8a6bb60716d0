"""The Gaussian mechanism in closed form: delta as a function of epsilon and its inverse (Balle and Wang, 2018)."""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from dpsweep.accounting.numerics.roots import root

LEVEL_SCALE = math.sqrt(6.0)
"""Expectations of convex functions of a round's likelihood ratio are convex in erf(x / LEVEL_SCALE) of its shift x
(docs/accounting-proofs.md, "Many noise levels")."""
_SLACK = 1e-9  # relative error allowed for the closed form in double precision; measured below 1e-11
_LEAST = 1e-8  # smallest mean shift evaluated; below it the two terms of the closed form cancel
_FARTHEST = 38.0  # quantile beyond which the normal tail underflows (2e-308)
_TINY = 1e-322  # absolute error allowed for a delta near underflow
_ROOT = 1e-13  # relative error allowed for a root, far above that of the root finder


def gaussian_log_delta(mean: float, epsilon: float) -> float:
    """Return log delta(epsilon) of N(mean, 1) against N(0, 1): Phi(m/2 - eps/m) - exp(eps) Phi(-m/2 - eps/m), Theorem
    8.

    Both terms have the normal density at the first argument as a factor; the rest is a difference of Mills ratios.
    """
    near, far = epsilon / mean - mean / 2, epsilon / mean + mean / 2
    if near >= 0.0:
        log_density = -(near**2) / 2 - math.log(2) + math.log(special.erfcx(near / math.sqrt(2)))
        return log_density + math.log1p(-special.erfcx(far / math.sqrt(2)) / special.erfcx(near / math.sqrt(2)))
    log_first = float(special.log_ndtr(-near))
    log_second = -(near**2) / 2 - math.log(2) + math.log(special.erfcx(far / math.sqrt(2)))  # epsilon may be huge
    return log_first + math.log(-math.expm1(log_second - log_first))


def gaussian_delta(mean: float, epsilon: float) -> tuple[float, float]:
    """Return (upper, lower) delta at ``epsilon`` of N(mean, 1) against N(0, 1).

    A mean below `_LEAST` is rounded up to it; the lower bound is then 0.
    """
    if mean == 0.0:
        return 0.0, 0.0
    shift = max(mean, _LEAST)
    near = epsilon / shift - shift / 2
    if near > _FARTHEST:
        return float(np.finfo(np.float64).tiny), 0.0
    slack = _slack(shift, abs(near))
    delta = math.exp(gaussian_log_delta(shift, epsilon))
    lower = delta * (1 - slack) - _TINY if mean == shift else 0.0
    return min(1.0, delta * (1 + slack) + _TINY), max(lower, 0.0)


def gaussian_epsilon(mean: float, delta: float) -> tuple[float, float]:
    """Return (upper, lower) epsilon, at least 0, at which N(mean, 1) against N(0, 1) has ``delta``.

    A mean below `_LEAST` is rounded up to it. For a mean so large that the closed form loses all digits, the normal
    tail gives the upper bound. The lower bound is 0 in both cases.
    """
    if mean == 0.0:
        return 0.0, 0.0
    shift, log_delta = max(mean, _LEAST), float(np.log(delta))
    quantile = math.sqrt(-2 * log_delta)
    highest = shift * (shift / 2 + quantile + 1) * (1 + _ROOT)  # Pr[N > z] <= exp(-z^2 / 2)
    slack = _slack(shift, quantile + 1)
    if slack >= 0.5:
        return highest, 0.0

    def reached(wanted: float) -> float:
        if gaussian_log_delta(shift, 0.0) <= wanted:
            return 0.0
        return root(lambda e: gaussian_log_delta(shift, e) - wanted, 0.0, highest, absolute=1e-300, relative=_ROOT / 8)

    upper = reached(log_delta + math.log1p(-slack)) * (1 + _ROOT)
    lower = reached(log_delta + math.log1p(slack)) * (1 - _ROOT) if mean == shift else 0.0
    return upper, lower


def _slack(mean: float, quantile: float) -> float:
    """Return the bound on the relative error of the closed form.

    At a small mean shift its terms nearly cancel; at a large one the rounding of epsilon / mean matters.
    """
    return _SLACK + 4e-15 * (1.0 + quantile) * (1.0 / mean + mean + quantile)
