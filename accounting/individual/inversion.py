"""From the spectrum to epsilon, for many examples at once: group rows by contour, then solve delta(eps) = delta.

See `accounting.individual.pld` for the formula. All choices for a row depend on that row alone, so its result has the
same bits whichever rows are accounted with it.

Where the spectrum falls slowly, it is damped by one more Gaussian mechanism of precision v: K gains v z (z-1) / 2.
The damped delta_v is at least delta, because another mechanism only adds cost. Its excess is bounded as follows:
with N ~ N(-v/2, v) independent of the loss L and y = L - eps,

    E_N[(e^(L+N) - e^eps)_+] - (e^L - e^eps)_+ = e^eps int_0^v e^(y/2) phi(y / sqrt(t)) e^(-t/8) / (2 sqrt(t)) dt

by the vega of Black and Scholes, phi the standard normal density. exp(-y^2 / 2t) grows with t, so this is at most
e^eps v e^(y/2) phi_v(y) with the density phi_v of N(0, v), whose transform along Re z = a gives

    E_Q[e^eps v e^(y/2) phi_v(y)] = (1/2 pi) int v e^(v/8) exp(K(z) + v z (z-1) / 2 + eps (1 - z)) dw.

So delta(eps) is at least the damped integral with 1 / (z (z-1)) replaced by 1 / (z (z-1)) - v e^(v/8). The trapezoidal
rule adds the aliases of delta_v, bounded by `_aliasing`, and subtracts those of a density, which is safe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from accounting.individual.contour import Complex, Contour
from accounting.individual.contributions import Array, SampledSteps, StepWeights
from accounting.individual.rdp import FEW_ORDERS, RenyiCosts

_TILT_STEP, _PERIOD_STEP, _REACH_STEP = 1.25, 2.0, 2.0**0.5
"""Examples share a contour if their tilt - 1, period and largest sqrt(u) agree within these factors."""

_RETREAT = 0.7
"""Ratio of tilt - 1 to the best Renyi order - 1; higher orders then bound the aliasing."""

NEGLIGIBLE = 1e-6
"""Target size of aliasing and truncation, relative to delta."""

LOOSE = 1e-2
"""Relative gap between the bounds above which they are computed again by a slower method."""

FLOAT_ERROR = 1e-11
"""Bound on the relative rounding error of a term, without that of the moments."""

_DAMPING = 20.0
"""Terms beyond the contour are damped by at least exp(-20) = 2e-9."""

_NEWTON_STEPS = 40

_CLOSE = 1e-7
"""The search ends this close to where delta(eps) is delta, relative to the largest epsilon."""

LARGEST_EPSILON = 1e3
"""Above it the Renyi bound is returned: it is nearly tight there, and the contour would need too much memory."""


@dataclass(frozen=True)
class Bucket:
    """Rows with one tilt and period. In part p no row has weight on nodes from ``stops[p]`` on."""

    rows: NDArray[np.intp]
    tilt: float
    period: float
    stops: tuple[int, ...]


def buckets(costs: StepWeights, renyi: RenyiCosts, delta: float) -> Iterator[Bucket]:
    """Each row with 0 < Renyi epsilon <= `LARGEST_EPSILON` in one bucket, which depends on that row alone."""
    active = np.flatnonzero((renyi.epsilons > 0.0) & (renyi.epsilons <= LARGEST_EPSILON))
    tilts = 1.0 + _RETREAT * _rounded(renyi.orders[active] - 1.0, _TILT_STEP)
    periods = np.empty(len(active))
    for tilt in np.unique(tilts):
        at = tilts == tilt
        periods[at] = _periods(renyi.of(active[at]), delta, tilt)
    periods = _PERIOD_STEP**0.5 * _rounded(periods, _PERIOD_STEP)
    stops = [_stops(part)[active] for part in costs.sampled]
    keys, inverse = np.unique(np.column_stack([tilts, periods, *stops]), axis=0, return_inverse=True)
    for number, (tilt, period, *last) in enumerate(keys.tolist()):
        yield Bucket(active[inverse.ravel() == number], tilt, period, tuple(map(int, last)))


def _rounded(values: Array, factor: float) -> Array:
    """The powers of ``factor`` nearest to ``values``."""
    return np.asarray(factor ** np.round(np.log(values) / np.log(factor)))


def _periods(renyi: RenyiCosts, delta: float, tilt: float) -> Array:
    """Periods P [rows] so long that the weighted aliases delta(eps + m P) are negligible relative to delta(eps).

    To the left delta(eps - m P) <= 1; to the right delta(eps + m P) <= exp((b-1) (rdp_b - eps - m P)) for b > tilt.
    """
    wanted = -np.log(delta * NEGLIGIBLE)
    higher = FEW_ORDERS[1.1 * tilt < FEW_ORDERS]
    log_tails = (higher - 1.0) * (renyi.rdp[:, 1.1 * tilt < FEW_ORDERS] - 0.8 * renyi.epsilons[:, None])
    right = (log_tails + wanted) / (higher - tilt)
    return np.asarray(np.maximum(wanted / (tilt - 1.0), right.min(axis=1, initial=np.inf)))


def _stops(part: SampledSteps) -> NDArray[np.intp]:
    """Number of nodes, at least 2, beyond which a row has no weight, rounded up to one of few levels; shape [rows]."""
    weights, roots = part.weights, np.sqrt(part.precisions)
    reach = np.zeros(weights.shape[0], np.intp)
    reached = np.diff(weights.indptr) > 0
    if reached.any():
        reach[reached] = np.maximum.reduceat(weights.indices, weights.indptr[:-1][reached])
    levels = roots[-1] * _REACH_STEP ** -np.arange(40.0)[::-1]
    stops = np.append(np.searchsorted(roots, levels[:-1], side="right"), len(roots))
    return np.asarray(np.maximum(stops[np.searchsorted(stops, reach, side="right")], 2))


def without_nodes_from(stops: tuple[int, ...], costs: StepWeights) -> StepWeights:
    """The same costs without the nodes from ``stops`` on, which no row reaches."""
    sampled = []
    for part, stop in zip(costs.sampled, stops, strict=True):
        matrix = part.weights
        weights = sparse.csr_array((matrix.data, matrix.indices, matrix.indptr), (matrix.shape[0], stop))
        sampled.append(SampledSteps(part.sample_rate, part.precisions[:stop], weights))
    return StepWeights(tuple(sampled), costs.precision, costs.pure)


def _aliasing(contour: Contour, rdp: Array, epsilons: Array) -> Array:
    """Bound [rows] on what the trapezoidal rule adds to delta at or above ``epsilons``: see `_periods`."""
    period = 2.0 * np.pi / contour.spacing
    higher = FEW_ORDERS[1.001 * contour.tilt < FEW_ORDERS]
    log_tails = (higher - 1.0) * (rdp[:, 1.001 * contour.tilt < FEW_ORDERS] - epsilons[:, None])
    right = log_tails + _log_series((higher - contour.tilt) * period)
    left = _log_series(np.array((contour.tilt - 1.0) * period))
    return np.asarray(np.exp(left) + np.exp(right.min(axis=1, initial=np.inf)))


def unsampled_exponent(costs: StepWeights, contour: Contour, v: float) -> Complex:
    """K [rows, points] of Gaussians, pure releases and the damping v: all but the sampled steps."""
    z = contour.points
    exponent = np.asarray((costs.precision[:, None] + v) * (0.5 * z * (z - 1.0)))
    for epsilon in costs.pure:
        exponent = exponent + _log_pure_moment(epsilon, z)
    return exponent


def damping(contour: Contour) -> float:
    """The precision v of damping that makes all frequencies beyond the contour negligible."""
    return 2.0 * _DAMPING / contour.end**2


def upper_kernel(contour: Contour) -> Complex:
    """Factor of exp(K) at each point; half at the first one, as the contour's other half is the complex conjugate."""
    z = contour.points
    return np.asarray(np.where(np.arange(contour.size) == 0, 0.5, 1.0) / (z * (z - 1.0)))


def lower_kernel(contour: Contour, v: float) -> Complex:
    """The kernel of the lower bound if exp(K) is damped by precision v; see the module's description."""
    z = contour.points
    return np.asarray(upper_kernel(contour) * (1.0 - v * np.exp(0.125 * v) * z * (z - 1.0)))


def left_out(contour: Contour, size: int, v: float) -> float:
    """Bound for both kernels on the sum of |kernel|, damped by v, from term ``size`` on, over exp(K) at the real point.

    1/|z (z-1)| sums to at most (1 + 1/size) / (spacing end); the damping falls at least geometrically.
    """
    end = contour.spacing * size
    bump = v * np.exp(0.125 * v) + (np.exp(0.125 * v) / (end * contour.spacing))
    plain = (1.0 + 1.0 / size) / (contour.spacing * end)
    return float(np.exp(-0.5 * v * end**2) * (plain + (bump if v > 0.0 else 0.0)))


Terms = tuple[Complex, Array]
"""Terms [points, rows] of the trapezoidal rule without e^(eps (1-z)), and a bound [rows] on the error of their sum."""


Bounds = tuple[Array, Array]
"""Upper and lower epsilons [rows]."""


def certified_bounds(
    contour: Contour, v: float, above: Terms, below: Terms, renyi: RenyiCosts, delta: float, known: Bounds
) -> Bounds:
    """The larger of ``known`` bounds and those of these terms; infinity and 0 where nothing can be certified.

    ``above`` and ``below`` are the terms with `upper_kernel` and `lower_kernel`, damped by v. ``known`` are the bounds
    of the other direction, 0 where there are none yet. Where these are tight, and delta at the upper one is small
    enough in this direction too, they stay.
    """
    scale = np.log(contour.spacing / np.pi) - np.log(delta)
    curve = _Curve(contour, *above, np.full(len(renyi.epsilons), scale))
    upper, lower = (bound.copy() for bound in known)
    tight = np.flatnonzero((upper > 0.0) & (lower >= (1.0 - LOOSE) * upper))
    stay = np.zeros(len(upper), np.bool_)
    stay[tight] = curve.of(tight)(upper[tight])[0] <= 0.0
    rest = np.flatnonzero(~stay)
    if len(rest) == 0:
        return upper, lower
    own = renyi.of(rest)
    curve = curve.of(rest)
    found = curve.search(curve.estimate(own.epsilons), own.epsilons, _ABOVE)
    nearly = 0.9 * found
    added = _aliasing(contour, own.rdp + 0.5 * v * FEW_ORDERS, nearly) / delta
    terms, error = below
    curve = _Curve(contour, terms[:, rest], -error[rest], scale - np.log1p(added))
    upper[rest] = np.maximum(upper[rest], found)
    least = curve.search(found, own.epsilons, _BELOW)
    lower[rest] = np.maximum(lower[rest], np.where(least >= nearly, least, 0.0))
    return upper, lower


@dataclass(frozen=True)
class _Curve:
    """eps -> log(delta(eps) / delta), the sum of columns [points, rows] with an error [rows] added."""

    contour: Contour
    columns: Complex
    error: Array
    scale: Array

    def of(self, rows: NDArray[np.intp]) -> _Curve:
        """The curves of some rows."""
        return _Curve(self.contour, self.columns[:, rows], self.error[rows], self.scale[rows])

    def __call__(self, epsilons: Array) -> tuple[Array, Array]:
        """Values and slopes, both [rows], by Horner's rule in exp(-i spacing eps)."""
        turn = np.exp(-1j * self.contour.spacing * epsilons)  # not in place below: bits would depend on the row
        total, derivative = np.zeros_like(turn), np.zeros_like(turn)
        for column in self.columns[::-1]:
            derivative = derivative * turn + total
            total = total * turn + column
        value = total.real + self.error
        slope = (derivative * turn).imag * self.contour.spacing / value + 1.0 - self.contour.tilt
        return self.scale + np.log(value) + (1.0 - self.contour.tilt) * epsilons, slope

    def estimate(self, stop: Array) -> Array:
        """About where the curve falls below zero on [0, stop], shape [rows], as if losses under the tilt were normal.

        Their mean and variance are read off the first two terms. What is no number or far away is ``stop``.
        """
        peak, turned = 2.0 * self.columns[0].real, self.columns[1]
        ratio, spacing, slope = turned / peak, self.contour.spacing, self.contour.tilt - 1.0
        mean = np.angle(ratio) % (2.0 * np.pi) / spacing
        variance = -2.0 * np.log(np.abs(ratio)) / spacing**2
        height = self.scale + np.log(peak / spacing) + 0.5 * np.log(0.5 * np.pi / variance)
        found = mean - variance * slope + np.sqrt((variance * slope) ** 2 - 2.0 * variance * (slope * mean - height))
        return np.where((found >= 0.3 * stop) & (found <= stop), found, stop)

    def search(self, start: Array, stop: Array, side: _Side) -> Array:
        """Epsilons [rows] in [0, stop] at which the curve was found to lie on ``side``, close to where it is zero.

        ``side.nowhere`` where none was found. Newton's method inside a shrinking bracket, each step of which aims a
        little beyond zero, so that the last of them lands on the wanted side.
        """
        left, right = np.zeros_like(stop), np.full_like(stop, np.inf)
        certified, epsilons = np.full_like(stop, side.nowhere), np.minimum(start, stop)
        at, curve = np.arange(len(stop)), self
        for _ in range(_NEWTON_STEPS):
            here, end = epsilons[at], stop[at]
            value, slope = curve(here)
            above, wanted = value > 0.0, side.wanted(value)
            certified[at] = np.where(wanted, here, certified[at])
            left[at], right[at] = np.where(above, here, left[at]), np.where(above, right[at], here)
            low, high, step = left[at], right[at], value / slope
            newton = here - step + side.sign * 0.5 * _CLOSE * end
            inside = (newton >= low) & (newton <= high)
            middle = np.where(np.isinf(high), end, 0.5 * (low + high))
            epsilons[at] = np.minimum(np.where(inside, newton, middle), end)
            settled = wanted & (np.abs(step) <= _CLOSE * end)
            settled |= (above & (here >= end)) | (high - low <= 1e-10 * end)
            if settled.all():
                break
            if settled.any():
                at = at[~settled]
                curve = self.of(at)
        return certified


@dataclass(frozen=True)
class _Side:
    """Epsilons above (sign 1) or below (sign -1) the one where a curve is zero; the worst of them is ``nowhere``."""

    sign: float
    nowhere: float

    def wanted(self, values: Array) -> NDArray[np.bool_]:
        """Whether epsilons at which the curve has these values lie on this side; never for NaN."""
        return np.asarray(self.sign * values <= 0.0)


_ABOVE, _BELOW = _Side(1.0, np.inf), _Side(-1.0, 0.0)


def _log_series(rate: Array) -> Array:
    """log of the sum over m >= 1 of exp(-rate m)."""
    return np.asarray(-rate - np.log(-np.expm1(-rate)))


def _log_pure_moment(epsilon: float, z: Complex) -> Complex:
    """log E_Q[(P/Q)^z] of randomised response, which dominates every (epsilon, 0)-DP release; the same at 1 - z."""
    share = 1.0 / (1.0 + np.exp(-epsilon))
    log_moment = np.log(share * np.exp((z - 1.0) * epsilon) + (1.0 - share) * np.exp(-(z - 1.0) * epsilon))
    return np.asarray(log_moment.real + 1j * log_moment.imag)
