"""The Gaussian mechanism in closed form: delta as a function of epsilon and its inverse (Balle and Wang, 2018)."""

from __future__ import annotations

import math

import numpy as np
from scipy import optimize, special

_SLACK = 1e-9  # relative error allowed for the closed form in double precision; measured below 1e-11


def gaussian_log_delta(mean: float, epsilon: float) -> float:
    """log delta(epsilon) of N(mean, 1) against N(0, 1): Phi(m/2 - eps/m) - exp(eps) Phi(-m/2 - eps/m), Theorem 8.

    Both terms share the density at the first argument, so their difference is one of Mills ratios.
    """
    near, far = epsilon / mean - mean / 2, epsilon / mean + mean / 2
    if near >= 0.0:
        log_density = -(near**2) / 2 - math.log(2) + math.log(special.erfcx(near / math.sqrt(2)))
        return log_density + math.log1p(-special.erfcx(far / math.sqrt(2)) / special.erfcx(near / math.sqrt(2)))
    log_first = float(special.log_ndtr(-near))
    return log_first + math.log(-math.expm1(epsilon + float(special.log_ndtr(-far)) - log_first))


def gaussian_delta(mean: float, epsilon: float) -> tuple[float, float]:
    """(upper, lower) delta of the Gaussian mechanism with that mean shift."""
    if mean == 0.0:
        return 0.0, 0.0
    delta = math.exp(gaussian_log_delta(mean, epsilon))
    return min(1.0, delta * (1 + _SLACK)), delta * (1 - _SLACK)


def gaussian_epsilon(mean: float, delta: float) -> tuple[float, float]:
    """(upper, lower) epsilon at which the Gaussian mechanism with that mean shift has ``delta``; at least 0."""
    if mean == 0.0:
        return 0.0, 0.0

    def root(log_delta: float) -> float:
        if gaussian_log_delta(mean, 0.0) <= log_delta:
            return 0.0
        high = mean * (mean / 2 + math.sqrt(-2 * log_delta)) + 1e-300  # Pr[N > z] <= exp(-z^2 / 2)
        return float(
            optimize.brentq(lambda e: gaussian_log_delta(mean, e) - log_delta, 0.0, high, xtol=1e-300, rtol=1e-14)
        )

    log_delta = float(np.log(delta))
    return root(log_delta + math.log1p(-_SLACK)), root(log_delta + math.log1p(_SLACK))
