"""Individual accounting by exact composition of privacy losses, for many examples at once.

For the dominating pair (P, Q) of a whole run, with K(z) = sum over steps of log E_Q[(P/Q)^z] and any line Re z = a > 1,

    delta(eps) = E_Q[(P/Q - e^eps)_+] = (1/2 pi) int exp(K(z) + eps (1 - z)) / (z (z - 1)) dw,   z = a + i w,

and for the pair (Q, P) the same with K(1 - z). Near the best Renyi order a is the saddle point: the integrand is
a short bump, and all errors are relative to the Renyi bound on delta. No privacy loss is discretised.

Why the result is certified:
- The trapezoidal rule with step w_1 equals, by Poisson summation, sum over m of e^((a-1) m P) delta(eps + m P) with
  P = 2 pi / w_1. All terms are non-negative, so aliasing only adds; the lower bound subtracts a Renyi bound on the
  other terms.
- K is linear in the step weights except for a bounded error per node (`contour.MomentTable`).
- Frequencies left out are bounded by a proven decay of every factor (`contour.DecayBound`) and 1/w^2.
- Floating point is bounded by `FLOAT_ERROR` per term, and by one rounding per step in K.
All of this is added to delta. delta is evaluated again at the epsilon returned; where the Renyi bound is lower, that is
returned. Where hardly any batch is expected to draw an example, exp(K) decays slowly, so the spectrum is damped
(`accounting.individual.inversion`), and at high frequencies K is not linear enough in the step weights. After few steps
examples whose bounds stay noticeably loose are therefore accounted again, each as a group of one (`accounting.pld`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from accounting.individual.contour import (
    EXPONENTS,
    Complex,
    Contour,
    DecayBound,
    decay_bound,
    moment_table,
)
from accounting.individual.contributions import (
    Array,
    RecordedContributions,
    StepWeights,
    merged,
    near_reached,
    select,
    spread_linearly,
)
from accounting.individual.inversion import (
    FLOAT_ERROR,
    LARGEST_EPSILON,
    LOOSE,
    NEGLIGIBLE,
    Bounds,
    Terms,
    buckets,
    certified_bounds,
    damping,
    left_out,
    lower_kernel,
    unsampled_exponent,
    upper_kernel,
    without_nodes_from,
)
from accounting.individual.kept import kept
from accounting.individual.rdp import RenyiCosts, renyi_costs
from accounting.pld import MIN_DELTA, CertifiedEpsilon, epsilon_of_rounds, rounds_of_examples

_SIZES = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256)
"""Points of a contour, tried in this order; the longest is damped where even it ends too early."""

_LONGEST = 512
"""Points of a contour that is tried without damping there; at its high frequencies K may be too far from linear."""

_CUTS = (3, 4, 5, 6, 7, 8)
"""Eighths of a contour at which a row may end."""

_PIECES = 16
"""Pieces of a contour, in each of which one bound on the error of K holds for all points."""

_STEP_ERROR = 1e-14
"""Bound on the rounding error that each step adds to K."""

_FEW_STEPS = 1000
"""Up to this many steps, examples with loose bounds are accounted again, at 20 to 200 ms each."""

_NOTICEABLE = 0.01
"""Smaller gaps between the bounds stay. A fiftieth of the examples of a large data set may have one, at epsilons of
0.002 to 0.02, and to close them takes a hundred times as long as all else."""

_ROUND_UP = 1.0 + 1e-9

_TOLERANCES = (0.5 * LOOSE, 0.05 * LOOSE)
"""Targets for their relative gap then, tried in this order; for small epsilons the gap may be larger."""


def pld_epsilons(contributions: RecordedContributions, delta: float) -> tuple[Array, Array]:
    """Upper and lower epsilon [rows] at ``delta``, the worse of removing and adding the example."""
    costs = merged(contributions.costs(spread_linearly))
    renyi = renyi_costs(costs, delta)
    upper, lower = _interpolated_epsilons(costs, renyi, delta)
    upper = np.minimum(upper, _of_one_gaussian(costs, delta))
    if contributions.trace.steps <= _FEW_STEPS and delta >= MIN_DELTA:
        loose = (upper - lower > np.maximum(LOOSE * upper, _NOTICEABLE)) & (renyi.epsilons <= LARGEST_EPSILON)
        for row in np.flatnonzero(loose).tolist():
            alone = _alone(contributions.of(slice(row, row + 1)), delta)
            upper[row], lower[row] = min(upper[row], alone.upper), max(lower[row], alone.lower)
    return upper, np.minimum(lower, upper)


def _of_one_gaussian(costs: StepWeights, delta: float) -> Array:
    """Upper epsilon [rows] of one Gaussian with the precision of all steps: sampling is post-processing of it.

    With mean shift m the loss is N(m^2 / 2, m^2), and Pr[N(0, 1) > z] <= exp(-z^2 / 2). Pure releases add to epsilon.
    """
    precision = costs.precision + sum(part.weights @ part.precisions for part in costs.sampled)
    mean = np.sqrt(precision)
    return np.asarray(
        mean * (0.5 * mean + np.sqrt(-2.0 * np.log(delta))) * _ROUND_UP + math.fsum(costs.pure) * _ROUND_UP
    )


def _alone(contributions: RecordedContributions, delta: float) -> CertifiedEpsilon:
    """Of one row, as a group of one: bounds on a lattice of privacy losses."""
    rounds = rounds_of_examples(contributions.trace, contributions.steps, contributions.values)
    for tolerance in _TOLERANCES:
        found = epsilon_of_rounds(rounds, delta, tolerance)
        if found.upper - found.lower <= LOOSE * found.upper:
            break
    return found


def _interpolated_epsilons(costs: StepWeights, renyi: RenyiCosts, delta: float) -> tuple[Array, Array]:
    """Upper and lower epsilon [rows] with K interpolated between nodes."""
    bound = renyi.epsilons
    above, below = np.where(bound > 0.0, np.inf, 0.0), np.zeros_like(bound)
    for bucket in buckets(costs, renyi, delta):
        rows = bucket.rows
        own = near_reached(without_nodes_from(bucket.stops, select(costs, rows)))
        upper, lower = np.zeros(len(rows)), np.zeros(len(rows))
        for direction in EXPONENTS:
            group = _Group(own, renyi.of(rows), delta, bucket.tilt, bucket.period, direction)
            before, upper, lower = (upper, lower), np.full(len(rows), np.inf), np.zeros(len(rows))
            for members, contour, v in group.contours():
                known = before[0][members], before[1][members]
                one, other = group.of(members).worse(known, contour, v)
                upper[members] = np.minimum(upper[members], one)
                lower[members] = np.maximum(lower[members], other)
        above[rows], below[rows] = upper, lower
    return np.minimum(above, bound), below


def _log_decay(costs: StepWeights, exponent: float, frequency: float) -> Array:
    """Proven decay [rows] of log |exp(K)|, relative to the real point, at every frequency from the given one on."""
    decay = 0.5 * costs.precision * frequency**2
    for part in costs.sampled:
        decay = decay + part.weights @ _node_decay(part.sample_rate, part.precisions.tobytes(), exponent, frequency)
    return np.asarray(decay)


@kept(256 * 2**20)
def _moment_columns(sample_rate: float, nodes: bytes, contour: Contour, direction: str) -> Array:
    """`moment_table` as [nodes, 2 points + pieces]: real and imaginary parts, and the largest error of each piece."""
    table = moment_table(sample_rate, np.frombuffer(nodes), contour, direction)
    errors = table.errors.reshape(len(table.errors), _PIECES, -1).max(axis=2)
    return np.hstack([table.log_moments.real, table.log_moments.imag, errors])


@kept(16 * 2**20)
def _node_decay(sample_rate: float, nodes: bytes, exponent: float, frequency: float) -> Array:
    """`DecayBound.node_decay` [nodes]."""
    return _decay_bound(sample_rate, nodes, exponent).node_decay(frequency)


@functools.lru_cache(maxsize=64)
def _decay_bound(sample_rate: float, nodes: bytes, exponent: float) -> DecayBound:
    """`decay_bound`, 0.5 MB each for 256 nodes."""
    return decay_bound(sample_rate, np.frombuffer(nodes), exponent)


@dataclass(frozen=True)
class _Group:
    """Rows that share a contour, in one direction."""

    costs: StepWeights
    renyi: RenyiCosts
    delta: float
    tilt: float
    period: float
    direction: str

    def of(self, rows: NDArray[np.intp]) -> _Group:
        """Some of the rows."""
        return replace(self, costs=select(self.costs, rows), renyi=self.renyi.of(rows))

    @property
    def _exponent_at_the_tilt(self) -> float:
        return float(EXPONENTS[self.direction](np.array([self.tilt + 0j]))[0].real)

    def contours(self) -> Iterator[tuple[NDArray[np.intp], Contour, float]]:
        """Rows that need the same number of points, their contour and its damping; some rows have two contours."""
        rows = np.arange(len(self.renyi.epsilons))
        for size in _SIZES:
            contour = Contour(self.tilt, 2.0 * np.pi / self.period, size)
            enough = self._reach(contour)[rows]
            if enough.any():
                yield rows[enough], contour, 0.0
            rows = rows[~enough]
            if len(rows) == 0:
                return
        yield rows, contour, damping(contour)
        longest = replace(contour, size=_LONGEST)
        enough = self._reach(longest)[rows]
        if enough.any():
            yield rows[enough], longest, 0.0

    def _reach(self, contour: Contour) -> NDArray[np.bool_]:
        """Whether exp(K) is negligible beyond the contour; shape [rows]."""
        decay = _log_decay(self.costs, self._exponent_at_the_tilt, contour.end)
        return np.asarray(decay >= -np.log(NEGLIGIBLE))

    def worse(self, known: Bounds, contour: Contour, v: float) -> Bounds:
        """Certified bounds of the worse of this direction and of another one, given those of the other one."""
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            exponent, slack = self._exponent(contour, v)
            above = self._terms(contour, v, exponent, slack, upper_kernel(contour))
            below = self._terms(contour, v, exponent, slack, lower_kernel(contour, v)) if v > 0.0 else above
            return certified_bounds(contour, v, above, below, self.renyi, self.delta, known)

    def _exponent(self, contour: Contour, v: float) -> tuple[Complex, Array]:
        """K [rows, points], damped by v, and a bound on its error in each of `_PIECES` of the contour."""
        exponent, size = unsampled_exponent(self.costs, contour, v), contour.size
        slack = np.full((len(exponent), _PIECES), FLOAT_ERROR)
        for part in self.costs.sampled:
            columns = _moment_columns(part.sample_rate, part.precisions.tobytes(), contour, self.direction)
            found = part.weights @ columns
            exponent.real += found[:, :size]
            exponent.imag += found[:, size : 2 * size]
            slack += found[:, 2 * size :] + _STEP_ERROR * part.weights.sum(axis=1)[:, None]
        return exponent, slack

    def _terms(self, contour: Contour, v: float, exponent: Complex, slack: Array, kernel: Complex) -> Terms:
        """The terms of exp(K) times ``kernel``.

        Each row ends where the errors of kept and dropped terms together are least: at high frequencies the terms
        are negligible, but the error of K may not be.
        """
        terms = kernel * np.exp(exponent)
        pieces = np.abs(terms).reshape(len(terms), _PIECES, -1).sum(axis=2)
        errors = np.cumsum(pieces * np.expm1(np.minimum(slack, 700.0)), axis=1)
        peak = exponent[:, 0].real
        sizes = np.array([contour.size * eighths // 8 for eighths in _CUTS])
        totals = np.empty((len(sizes), len(peak)))
        for total, size in zip(totals, sizes.tolist(), strict=True):
            decay = _log_decay(self.costs, self._exponent_at_the_tilt, contour.spacing * size)
            total[:] = errors[:, size * _PIECES // contour.size - 1] + np.exp(peak - decay) * left_out(contour, size, v)
        best = np.argmin(np.where(np.isnan(totals), np.inf, totals), axis=0)
        kept = np.arange(contour.size)[:, None] < sizes[best]
        error = np.take_along_axis(totals, best[None, :], axis=0)[0]
        return np.where(kept, np.ascontiguousarray(terms.T), 0.0), error
