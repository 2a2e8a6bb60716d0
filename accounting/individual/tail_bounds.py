"""A quick bound on delta in one direction, for examples that cost clearly more in the other one.

For every real a > 1, with K as in `dpsweep.accounting.individual.exact_composition` and L the privacy loss,

    delta(eps) = E_P[(1 - e^(eps - L))_+] <= exp(K(a) - (a-1) eps) sup over u of e^(-(a-1) u) (1 - e^(-u)),

because E_P[e^((a-1) L)] = exp(K(a)). At the best a this is about five times delta(eps). Adding an example usually costs
less than a tenth of delta at the epsilon of removing it; its spectrum is then not needed.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from dpsweep.accounting.individual.blocks import block_moments
from dpsweep.accounting.individual.contour import Contour, exponent_of, moment_table
from dpsweep.accounting.individual.contributions import AllocationBlock, Array, StepsLaw, StepWeights
from dpsweep.accounting.individual.inversion import FLOAT_ERROR, STEP_ERROR, plain_exponent, tilts_from
from dpsweep.accounting.individual.spreading import stacked, weighted_sums
from dpsweep.accounting.individual.table_cache import kept
from dpsweep.accounting.pld import Direction

_STEPS = range(8)
"""The values of a tried, in tilt steps above the rows' contour: the loss of adding an example has lighter tails."""

_HIGHEST = 128.0
"""Largest tilt for which the bound is tried. Above it epsilons are so small that both directions cost nearly the same,
so nothing would be proven."""

_MARGIN = 1e-6
"""Margin required of bounds on log(delta), far above the rounding error of the exponent."""


def is_within(
    costs: StepWeights, rows: NDArray[np.intp], tilt: float, epsilons: Array, delta: float, direction: Direction
) -> NDArray[np.bool_]:
    """Return whether delta at the ``epsilons`` of these ``rows``, in this direction, is proven to be at most ``delta``.

    tilt: of their contour. No row's answer depends on another row.
    """
    if tilt > _HIGHEST:
        return np.zeros(len(rows), np.bool_)
    contours = _contours(tilt)
    tables = [
        np.transpose([_log_moments(p.law, p.precisions.tobytes(), each, direction) for each in contours])
        for p in costs.sampled
    ]
    table = stacked(tables, len(contours))
    plain, t, log_peaks = _plain(costs.pure, tilt)
    with np.errstate(over="ignore", invalid="ignore"):  # NaN proves nothing
        exponents = weighted_sums(costs, table, plain, rows)
        proven = exponents - epsilons[:, None] * t <= np.log(delta) - _MARGIN - log_peaks
    return np.asarray(functools.reduce(np.logical_or, proven.T))


def _contours(tilt: float) -> list[Contour]:
    """Return contours whose first, real points are the values of a tried."""
    return [Contour(each, 0.0, 2) for each in tilts_from(tilt, _STEPS)]


@functools.lru_cache(maxsize=512)
def _plain(pure: tuple[float, ...], tilt: float) -> tuple[Array, Array, Array]:
    """Return for each of `_contours` the plain columns for `weighted_sums`, a - 1, and the log of the supremum."""
    contours = _contours(tilt)
    with np.errstate(over="ignore", invalid="ignore"):
        plain = np.array([[part[0].real for part in plain_exponent(pure, each, 0.0)] for each in contours]).T
    plain[0] += FLOAT_ERROR
    t = np.array([each.tilt for each in contours]) - 1.0
    return np.ascontiguousarray(plain), t, -t * np.log1p(1.0 / t) - np.log1p(t)


@kept(16 * 2**20)
def _log_moments(law: StepsLaw, nodes: bytes, contour: Contour, direction: Direction) -> Array:
    """Return the upper bounds [nodes] on log A at the real point of a contour; they include the error of
    interpolation.
    """
    if isinstance(law, AllocationBlock):
        exponent = np.array([exponent_of(direction, contour.tilt)])
        return block_moments(law, nodes, exponent.tobytes())[:, 0] + STEP_ERROR
    table = moment_table(law, np.frombuffer(nodes), contour, direction)
    return np.asarray(table.log_moments[:, 0].real + table.errors[:, 0] + STEP_ERROR)
