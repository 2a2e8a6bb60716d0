"""Individual accounting by exact composition after few steps, where the spectrum falls slowly.

The formula is that of `accounting.individual.pld`. Two changes make it accurate after few steps:

- Each step's effective precision u is rounded to a node, up for the upper bound and down for the lower one. A larger
  u dominates (the smaller one is its post-processing), also under composition, so nothing is interpolated.
- The spectrum is damped (`accounting.individual.inversion`) until the terms beyond the contour are negligible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from accounting.individual.contour import EXPONENTS, NODE_ERROR, Complex, Contour, node_log_moments
from accounting.individual.contributions import (
    Array,
    RecordedContributions,
    SampledSteps,
    StepWeights,
    round_down,
    round_up,
    select,
)
from accounting.individual.inversion import (
    FLOAT_ERROR,
    LOOSE,
    Bounds,
    Bucket,
    Terms,
    buckets,
    certified_bounds,
    damping,
    left_out,
    lower_kernel,
    unsampled_exponent,
    upper_kernel,
)
from accounting.individual.rdp import RenyiCosts

_SIZES = (512, 2048)
"""Points of a contour; the second number is for rows whose bounds are still loose with the first."""

_ROWS = 1 << 20
"""Points times rows held at once."""


def rounded_epsilons(contributions: RecordedContributions, renyi: RenyiCosts, delta: float) -> tuple[Array, Array]:
    """Upper and lower epsilon [rows] at ``delta``; infinity and 0 where nothing can be certified.

    renyi: of the same rows. Covers both directions of add/remove.
    """
    up, down = contributions.costs(round_up), contributions.costs(round_down)
    upper, lower = np.full_like(renyi.epsilons, np.inf), np.zeros_like(renyi.epsilons)
    for bucket in buckets(up, renyi, delta):
        rows = bucket.rows
        for size in _SIZES:
            above, below = np.zeros(len(rows)), np.zeros(len(rows))
            for direction in EXPONENTS:
                inversion = _inversion(up, down, replace(bucket, rows=rows), size, direction)
                for part in np.array_split(np.arange(len(rows)), -(-len(rows) * size // _ROWS)):
                    at = rows[part]
                    known = above[part], below[part]
                    above[part], below[part] = inversion.worse(
                        known, select(up, at), select(down, at), renyi.of(at), delta
                    )
            upper[rows], lower[rows] = np.minimum(upper[rows], above), np.maximum(lower[rows], below)
            rows = rows[~(upper[rows] - lower[rows] <= LOOSE * upper[rows])]
            if len(rows) == 0:
                break
    return upper, lower


def _inversion(up: StepWeights, down: StepWeights, bucket: Bucket, size: int, direction: str) -> _Inversion:
    """The contour of a bucket, and log A at the nodes that its rows reach."""
    contour = Contour(bucket.tilt, 2.0 * np.pi / bucket.period, size)
    parts = zip(up.sampled, down.sampled, bucket.stops, strict=True)
    tables = tuple(_table(one, other, bucket.rows, stop, contour, direction) for one, other, stop in parts)
    return _Inversion(contour, damping(contour), tables)


def _table(
    up: SampledSteps, down: SampledSteps, rows: NDArray[np.intp], stop: int, contour: Contour, direction: str
) -> Array:
    """Real and imaginary parts [nodes, 2 points] of log A at the nodes where the rows have weight, 0 elsewhere."""
    reached = np.union1d(up.weights[rows].indices, down.weights[rows].indices)
    table = np.zeros((len(up.precisions), 2 * contour.size))
    widest = float(np.sqrt(up.precisions[stop - 1]))
    found = node_log_moments(up.sample_rate, up.precisions[reached], widest, contour, direction)
    table[reached] = np.hstack([found.real, found.imag])
    return table


@dataclass(frozen=True)
class _Inversion:
    """A contour in one direction, its damping v, and the `_table` of each part of the costs."""

    contour: Contour
    damping: float
    tables: Sequence[Array]

    def worse(self, known: Bounds, up: StepWeights, down: StepWeights, renyi: RenyiCosts, delta: float) -> Bounds:
        """The larger of ``known`` bounds, of the other direction, and those of costs rounded up and down."""
        contour, v = self.contour, self.damping
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            above = self._terms(up, upper_kernel(contour))
            below = self._terms(down, lower_kernel(contour, v))
            return certified_bounds(contour, v, above, below, renyi, delta, known)

    def _terms(self, costs: StepWeights, kernel: Complex) -> Terms:
        """The terms of exp(K) times ``kernel``.

        The rounding error of a term is at most exp(K(a)) times (1 + NODE_ERROR)^steps - 1.
        """
        contour, v = self.contour, self.damping
        exponent, steps = unsampled_exponent(costs, contour, v), np.zeros(len(costs.precision))
        for part, table in zip(costs.sampled, self.tables, strict=True):
            real, imaginary = np.split(part.weights @ table, 2, axis=1)
            exponent = exponent + (real + 1j * imaginary)
            steps += part.weights.sum(axis=1)
        terms = kernel * np.exp(exponent)
        damped = np.sum(np.abs(kernel) * np.exp(-0.5 * v * contour.frequencies**2))
        error = np.expm1(FLOAT_ERROR + NODE_ERROR * steps) * damped + left_out(contour, contour.size, v)
        return np.ascontiguousarray(terms.T), np.exp(exponent[:, 0].real) * error
