"""Individual accounting by exact composition of privacy losses, for many examples at once.

For the dominating pair (P, Q) of a whole run, with K(z) = sum over steps of log E_Q[(P/Q)^z] and any line Re z = a > 1,

    delta(eps) = E_Q[(P/Q - e^eps)_+] = (1/2 pi) int exp(K(z) + eps (1 - z)) / (z (z - 1)) dw,   z = a + i w,

and for the pair (Q, P) the same with K(1 - z). With a near the best Renyi order this is the saddle point: the integrand
is a short bump, and everything is relative to the Renyi bound on delta. No privacy loss is discretised.

Why the result is certified:
- The trapezoidal rule with step w_1 equals, by Poisson summation, sum over m of e^((a-1) m P) delta(eps + m P) with
  P = 2 pi / w_1. All terms are non-negative, so aliasing only ever adds; the lower companion subtracts a Renyi bound
  on the other terms.
- K is linear in the step weights except for a bounded error per node (`contour.MomentTable`).
- Frequencies left out are bounded by a proven decay of every factor (`contour.DecayBound`) and 1/w^2.
- After few steps K decays slowly. Then independent normal noise is added to the loss: the integrand (e^L - e^eps)_+ is
  convex in L, so by Jensen's inequality delta only grows, and K gains a factor that decays as fast as need be.
- Floating point is bounded by `_FLOAT_ERROR` per term, and by one rounding per step in K.
All of this is added to delta. The final epsilon is checked, not interpolated; where Renyi's bound is better, as it may
be after very few steps, that is returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from accounting.contour import EXPONENTS, Complex, Contour, DecayBound, decay_bound, moment_table
from accounting.contributions import Array, Costs, SampledSteps
from accounting.individual_rdp import rdp_upper
from accounting.renyi import ORDERS, best_orders, epsilon_improved

_TILT_STEP, _PERIOD_STEP = 1.25, 2.0
"""Examples whose tilt, less one, and period agree within these factors share a contour."""

_RETREAT = 0.7
"""The tilt, less one, over the best Renyi order, less one: orders in between bound the aliasing."""

_NEGLIGIBLE = 1e-6
"""Aliasing and truncation are made about this small, relative to delta."""

_SIZES = (16, 32, 64, 128, 256)
_CUTS = (3, 4, 5, 6, 7, 8)
_FLOAT_ERROR = 1e-11
_STEP_ERROR = 1e-14
_NEWTON_STEPS = 40

LARGEST_EPSILON = 1e3
"""Above it Renyi's bound is kept: hardly looser there, while the grid of the contour would outgrow any memory."""


def pld_epsilons(costs: Costs, delta: float) -> tuple[Array, Array]:
    """Upper and lower epsilon [rows] at ``delta``, the worse of removing and adding the example."""
    rdp = rdp_upper(costs)
    bound = epsilon_improved(rdp, delta)
    below = np.zeros_like(bound)
    above = {direction: np.where(bound > 0.0, np.inf, 0.0) for direction in EXPONENTS}
    for rows, tilt, period in _buckets(rdp, bound, delta):
        for direction in EXPONENTS:
            bucket = _Bucket(_select(costs, rows), rdp[rows], bound[rows], delta, tilt, period, direction)
            for members, upper, lower in bucket.solve():
                at = rows[members]
                above[direction][at] = upper
                below[at] = np.maximum(below[at], lower)
    upper = np.minimum(np.maximum.reduce(list(above.values())), bound)
    return upper, np.minimum(below, upper)


def _buckets(rdp: Array, bound: Array, delta: float) -> Iterator[tuple[NDArray[np.intp], float, float]]:
    """Rows that share a contour, its tilt and its period. Rows that cost nothing, or too much, are in none."""
    active = np.flatnonzero((bound > 0.0) & (bound <= LARGEST_EPSILON))
    best = best_orders(rdp[active], delta)
    tilts = 1.0 + _RETREAT * _rounded(best - 1.0, _TILT_STEP)
    for tilt in np.unique(tilts):
        rows = active[tilts == tilt]
        periods = _PERIOD_STEP**0.5 * _rounded(_periods(rdp[rows], bound[rows], delta, tilt), _PERIOD_STEP)
        for period in np.unique(periods):
            yield rows[periods == period], float(tilt), float(period)


def _rounded(values: Array, factor: float) -> Array:
    """The nearest power of ``factor``."""
    return np.asarray(factor ** np.round(np.log(values) / np.log(factor)))


def _periods(rdp: Array, bound: Array, delta: float, tilt: float) -> Array:
    """P so long that delta(eps + m P), weighted, is negligible beside delta(eps); shape [rows].

    To the left delta(eps - m P) <= 1; to the right delta(eps + m P) <= exp((b-1) (rdp_b - eps - m P)) for b > tilt.
    """
    wanted = -np.log(delta * _NEGLIGIBLE)
    higher = ORDERS[1.1 * tilt < ORDERS]
    log_tails = (higher - 1.0) * (rdp[:, 1.1 * tilt < ORDERS] - 0.8 * bound[:, None])
    right = (log_tails + wanted) / (higher - tilt)
    return np.asarray(np.maximum(wanted / (tilt - 1.0), right.min(axis=1, initial=np.inf)))


def _select(costs: Costs, rows: NDArray[np.intp]) -> Costs:
    """The given rows, without the nodes that none of them reaches."""
    sampled = []
    for part in costs.sampled:
        weights = part.weights[rows]
        reached = np.flatnonzero(weights.any(axis=0))
        stop = max(2, int(reached[-1]) + 1) if len(reached) else 2
        sampled.append(SampledSteps(part.sample_rate, part.precisions[:stop], weights[:, :stop]))
    return Costs(tuple(sampled), costs.precision[rows], costs.pure, costs.unprotected[rows])


def _log_decay(costs: Costs, bounds: Sequence[DecayBound], frequency: float) -> Array:
    """Proven fall [rows] of log |exp(K)| from the real point to every frequency from the given one on."""
    decay = 0.5 * costs.precision * frequency**2
    for part, bound in zip(costs.sampled, bounds, strict=True):
        decay = decay + part.weights @ bound.node_decay(frequency)
    return np.asarray(decay)


@dataclass(frozen=True)
class _Bucket:
    """Rows that share a contour, in one direction. rdp [rows, orders] and bound [rows] are their Renyi results."""

    costs: Costs
    rdp: Array
    bound: Array
    delta: float
    tilt: float
    period: float
    direction: str

    def solve(self) -> Iterator[tuple[NDArray[np.intp], Array, Array]]:
        """Rows, and their certified upper and lower epsilons: infinity and 0 where nothing can be certified."""
        for rows, contour, smoothing in self._contours():
            costs = _select(self.costs, rows)
            members = replace(self, costs=costs, rdp=self.rdp[rows], bound=self.bound[rows])
            yield rows, *members._solve(contour, smoothing)

    def _decay_bounds(self) -> list[DecayBound]:
        real = float(EXPONENTS[self.direction](np.array([self.tilt + 0j]))[0].real)
        return [decay_bound(part.sample_rate, part.precisions, real) for part in self.costs.sampled]

    def _contours(self) -> Iterator[tuple[NDArray[np.intp], Contour, float]]:
        """Rows that need equally many points, their contour and the variance of smoothing.

        Where the longest contour is too short, as after few steps, the loss is smoothed until it suffices; rows for
        which that would cost more than Renyi's bound are left out.
        """
        bounds = self._decay_bounds()
        rows = np.arange(len(self.bound))
        for size in _SIZES:
            contour = Contour(self.tilt, 2.0 * np.pi / self.period, size)
            enough = _log_decay(self.costs, bounds, contour.end)[rows] >= -np.log(_NEGLIGIBLE)
            if enough.any():
                yield rows[enough], contour, 0.0
            rows = rows[~enough]
            if len(rows) == 0:
                return
        smoothing = -2.0 * np.log(_NEGLIGIBLE) / contour.end**2
        if smoothing * self.tilt**2 < 1.0:
            yield rows, contour, smoothing

    def _solve(self, contour: Contour, smoothing: float) -> tuple[Array, Array]:
        terms, error = self._terms(contour, smoothing)
        scale = np.log(contour.spacing / np.pi) - np.log(self.delta)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            above = _Curve(contour, terms, scale, error)
            upper = above.root(self.bound) * (1.0 + 1e-9) + 1e-12
            upper = np.where(above(upper)[0] <= 0.0, upper, np.inf)
            nearly = 0.9 * upper
            aliasing = self._aliasing(contour, nearly) / self.delta
            below = _Curve(contour, terms, scale - np.log1p(aliasing), -error)
            lower = below.root(upper) * (1.0 - 1e-9) - 1e-12
            certain = (below(lower)[0] >= 0.0) & (lower >= nearly)
        return upper, np.where(certain & (smoothing == 0.0), np.maximum(lower, 0.0), 0.0)

    def _aliasing(self, contour: Contour, epsilons: Array) -> Array:
        """Bound [rows] on what the trapezoidal rule adds to delta at or above ``epsilons``: see `_periods`."""
        period = 2.0 * np.pi / contour.spacing
        higher = ORDERS[1.001 * self.tilt < ORDERS]
        log_tails = (higher - 1.0) * (self.rdp[:, 1.001 * self.tilt < ORDERS] - epsilons[:, None])
        right = log_tails + _log_series((higher - self.tilt) * period)
        left = _log_series(np.array((self.tilt - 1.0) * period))
        return np.asarray(np.exp(left) + np.exp(right.min(axis=1, initial=np.inf)))

    def _terms(self, contour: Contour, smoothing: float) -> tuple[Complex, Array]:
        """Terms [points, rows] of the trapezoidal rule without e^(eps (1-z)), and a bound [rows] on their error."""
        z = contour.points
        exponent = self.costs.precision[:, None] * (0.5 * z * (z - 1.0)) + 0.5 * smoothing * z**2
        for epsilon in self.costs.pure:
            exponent = exponent + _log_pure_moment(epsilon, z)
        slack = np.full(exponent.shape, _FLOAT_ERROR)
        for part in self.costs.sampled:
            table = moment_table(part.sample_rate, part.precisions, contour, self.direction)
            columns = np.hstack([table.log_moments.real, table.log_moments.imag, table.errors])
            real, imaginary, errors = np.split(part.weights @ columns, 3, axis=1)
            exponent = exponent + (real + 1j * imaginary)
            slack += errors + _STEP_ERROR * part.weights.sum(axis=1, keepdims=True)
        halves = np.where(np.arange(contour.size) == 0, 0.5, 1.0)
        with np.errstate(invalid="ignore", over="ignore"):
            terms = halves * np.exp(exponent) / (z * (z - 1.0))
            errors = np.cumsum(np.abs(terms) * np.expm1(np.minimum(slack, 700.0)), axis=1)
        return self._cut(contour, smoothing, np.ascontiguousarray(terms.T), errors.T, exponent[:, 0].real)

    def _cut(
        self, contour: Contour, smoothing: float, terms: Complex, errors: Array, log_peak: Array
    ) -> tuple[Complex, Array]:
        """End each row where the error of the terms kept (errors [points, rows], summed) and of those dropped is least.

        Far out the terms are negligible, but the error of K may not be. The sum over k >= size of 1/w_k^2 is at most
        (1 + 1/size) / (spacing w_size).
        """
        bounds = self._decay_bounds()
        sizes = np.array([contour.size * eighths // 8 for eighths in _CUTS])
        totals = np.empty((len(sizes), len(log_peak)))
        for total, size in zip(totals, sizes, strict=True):
            end = contour.spacing * float(size)
            decay = _log_decay(self.costs, bounds, end) + 0.5 * smoothing * end**2
            total[:] = errors[size - 1] + np.exp(log_peak - decay) * (1.0 + 1.0 / size) / (contour.spacing * end)
        best = np.argmin(np.where(np.isnan(totals), np.inf, totals), axis=0)
        kept = np.arange(contour.size)[:, None] < sizes[best]
        return np.where(kept, terms, 0.0), np.take_along_axis(totals, best[None, :], axis=0)[0]


@dataclass(frozen=True)
class _Curve:
    """eps -> log(delta(eps) / delta), the sum of columns [points, rows] with an error [rows] added."""

    contour: Contour
    columns: Complex
    scale: float | Array
    error: Array

    def __call__(self, epsilons: Array) -> tuple[Array, Array]:
        """Values and slopes, both [rows], by Horner's rule in exp(-i spacing eps)."""
        turn = np.exp(-1j * self.contour.spacing * epsilons)
        total, derivative = np.zeros_like(turn), np.zeros_like(turn)
        for column in self.columns[::-1]:
            derivative = derivative * turn + total
            total = total * turn + column
        value = total.real + self.error
        slope = (derivative * turn).imag * self.contour.spacing / value + 1.0 - self.contour.tilt
        return self.scale + np.log(value) + (1.0 - self.contour.tilt) * epsilons, slope

    def root(self, stop: Array) -> Array:
        """Where the curve falls below zero on [0, stop]: Newton's method, kept inside a shrinking bracket.

        0 where it is below zero already at 0; ``stop`` where it is still above zero there.
        """
        left, right = np.zeros_like(stop), stop.copy()
        epsilons, settled = stop.copy(), np.zeros(len(stop), np.bool_)
        for _ in range(_NEWTON_STEPS):
            value, slope = self(epsilons)
            left = np.where(value > 0.0, epsilons, left)
            right = np.where(value > 0.0, right, epsilons)
            moved = epsilons - value / slope
            moved = np.where((moved >= left) & (moved <= right), moved, 0.5 * (left + right))
            moved = np.where(settled, epsilons, moved)
            settled |= np.abs(moved - epsilons) <= 1e-10 * stop
            epsilons = moved
            if settled.all():
                break
        return epsilons


def _log_series(rate: Array) -> Array:
    """log of the sum over m >= 1 of exp(-rate m)."""
    return np.asarray(-rate - np.log(-np.expm1(-rate)))


def _log_pure_moment(epsilon: float, z: Complex) -> Complex:
    """log E_Q[(P/Q)^z] of randomised response, which dominates every (epsilon, 0)-DP release; symmetric in z, 1 - z."""
    share = 1.0 / (1.0 + np.exp(-epsilon))
    log_moment = np.log(share * np.exp((z - 1.0) * epsilon) + (1.0 - share) * np.exp(-(z - 1.0) * epsilon))
    return np.asarray(log_moment.real + 1j * log_moment.imag)
