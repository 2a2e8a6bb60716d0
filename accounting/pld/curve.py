"""Certified delta as a function of epsilon, read off a composed law, and the epsilon at a given delta."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpsweep.accounting.pld.loss import Bound
from dpsweep.accounting.pld.saddlepoint import log_peak
from dpsweep.accounting.pld.sensitivity import Array

_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Root:
    """A bound on epsilon, and the curve's loss nearest to where delta is reached (the next centre to try)."""

    epsilon: float
    nearest: float


@dataclass(frozen=True)
class Curve:
    """Certified delta as a function of epsilon, for one direction and bound, in units of exp(log_scale).

    ``at[j]`` and ``beyond[j]`` sum the composed law, untilted, over the losses from ``losses[j]`` on, times
    1 - exp(losses[j] - loss) and times exp(losses[j] - loss): delta at losses[j], and what it grows by below, because
    delta(eps) / scale = at + (1 - exp(eps - losses[j])) beyond at the first loss above eps. No term cancels another.
    Mass at ``infinity`` is added from above. From below it is what may be counted too much, and subtracted.
    """

    bound: Bound
    losses: Array
    at: Array
    beyond: Array
    centre: float
    tilt: float
    log_scale: float
    infinity: float
    additive: Array  # error in units of the scale, at epsilon = losses[j]; falls with j
    relative: float

    def delta_at(self, epsilon: float) -> float:
        """Return a bound on delta at ``epsilon``; the trivial one beyond the curve's losses."""
        return float(self.deltas_at(np.array([epsilon]))[0])

    def deltas_at(self, epsilons: Array) -> Array:
        """Return the bounds on delta at each of ``epsilons`` [points]."""
        index = np.minimum(np.searchsorted(self.losses, epsilons, side="right"), len(self.losses) - 1)
        value = self.at[index] - np.expm1(epsilons - self.losses[index]) * self.beyond[index]
        certified = self._certified(value, self.additive[np.maximum(index - 1, 0)])
        known = (epsilons >= self.losses[0]) & (epsilons <= self.losses[-1]) & ~np.isnan(certified)
        return np.where(known, np.clip(certified, 0.0, 1.0), 1.0 if self.bound == "upper" else 0.0)

    def epsilon_at(self, delta: float) -> Root:
        """Return the epsilon, at least 0, where the bound on delta equals ``delta``, rounded to the bound's side."""
        deltas = self._certified(self.at, self.additive)
        above = (deltas > delta) & (deltas < np.inf)
        exceeds = ~(deltas <= delta) if self.bound == "upper" else above  # NaN never helps a bound
        index = int(np.max(np.nonzero(exceeds)[0], initial=-1)) + 1
        if index == len(deltas):
            return Root(math.inf if self.bound == "upper" else max(0.0, float(self.losses[-1])), float(self.losses[-1]))
        if index == 0:
            return Root(max(0.0, float(self.losses[0])) if self.bound == "upper" else 0.0, float(self.losses[0]))
        missing = self._uncertified(delta, float(self.additive[index - 1])) - self.at[index]
        low, high = float(self.losses[index - 1]), float(self.losses[index])
        worst = high if self.bound == "upper" else low
        below = missing / self.beyond[index]
        epsilon = min(max(high + math.log1p(-below), low), high) if below < 1.0 else worst
        return Root(max(0.0, epsilon), epsilon)

    def _certified(self, value: Array | float, additive: Array | float) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):  # infinity and NaN certify nothing
            if self.bound == "upper":
                return np.asarray(np.exp(self.log_scale) * (value + additive) * (1 + self.relative) + self.infinity)
            found = np.exp(self.log_scale) * (value - additive) * max(0.0, 1 - self.relative)
            return np.asarray(found - np.expm1(self.infinity))

    def _uncertified(self, delta: float, additive: float) -> float:
        if self.bound == "upper":
            return float((delta - self.infinity) / np.exp(self.log_scale) / (1 + self.relative) - additive)
        missing = delta + math.expm1(min(self.infinity, 1.0))
        return float(missing / np.exp(self.log_scale) / max(1 - self.relative, _EPS) + additive)


@dataclass(frozen=True)
class Composed:
    """Certified curves of one direction, and a Chernoff bound on the other direction's delta."""

    upper: Curve
    lower: Curve
    opposite_tilt: float | None
    log_opposite: float
    opposite_infinity: float

    def opposite_delta(self, epsilon: float) -> float:
        """Return an upper bound on the other direction's delta: E[(1 - exp(eps - L))+] <= E[exp(t (L - eps))]
        peak(t).
        """
        if self.opposite_tilt is None:
            return 1.0
        exponent = self.log_opposite - self.opposite_tilt * epsilon + log_peak(self.opposite_tilt)
        return float(np.exp(min(exponent, 0.0))) + self.opposite_infinity
