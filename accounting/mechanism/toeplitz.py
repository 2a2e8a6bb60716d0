"""Lower triangular Toeplitz matrices of correlated noise: inverses, sensitivities, errors, and the best banded one.

A matrix C of T rows is given by its first column c_0, ..., c_(T-1). The noise of step t is z_t = sum_s C^-1[t, s] w_s
with independent draws w_s. The release is a function of C g + w, where g has the clipped sums of the steps.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dpsweep.accounting.errors import Unreachable
from dpsweep.accounting.numerics.rounding import ROUND_UP

Array = npt.NDArray[np.float64]

_ITERATIONS: Final = 20_000
_LEAST_RATIO: Final = 1e-4
_NEAR: Final = 1e-3
"""Largest distance of the stationary point of all columns from the best of falling ones."""
_FLAT: Final = 1e-10
"""Largest gradient, per band and relative to the objective, of a strategy that counts as the best."""


def solve(column: Array, right: Array) -> Array:
    """Return x with C x = ``right`` for the matrix whose first column begins with ``column``; both start at row 0."""
    from scipy import signal  # late: importing it takes a third of a second

    return np.asarray(signal.lfilter([1.0], column, right), dtype=np.float64)


def inverse_column(column: Array, steps: int) -> Array:
    """Return the first column [steps] of C^-1."""
    return solve(column, np.eye(1, steps)[0])


def column_norm(column: Array) -> float:
    """Return an upper bound on the largest norm of a column of C: every column is the first one, moved and cut."""
    return math.sqrt(math.fsum(column**2)) * ROUND_UP


def repeated_norm(column: Array, steps: int, apart: int) -> float:
    """Return an upper bound on the norm of C x over all x that may differ from 0 in steps r, r + apart, ... only. The
    x_t are vectors of norm 1 at most, and r is any step below ``apart``: one example in a fixed order. The square of
    the norm is at most sum_(t, u) |<C e_t, C e_u>|, and so at most the squared norm of the sum of the columns of |C|.
    The sum for r is that for 0, moved down by r and cut, so that r = 0 has the largest norm. It is attained if no entry
    of C is negative.
    """
    size = min(len(column), steps)
    summed = np.zeros(-(-steps // apart) * apart)
    summed[:size] = np.abs(column[:size])
    summed = np.cumsum(summed.reshape(-1, apart), axis=0).ravel()[:steps]
    return math.sqrt(math.fsum(summed**2)) * ROUND_UP


def prefix_errors(column: Array, noising: Array, steps: int) -> tuple[float, float]:
    """Return mean and maximum over the steps of the squared error of the sum of all gradients so far.

    column, noising: the first columns of C and C^-1, or as many entries as differ from 0. Units: the noise that full
    batches of one step would need. Independent noise then has errors (T + 1) / 2 and T. This is the squared norm of a
    row of A C^-1, for the matrix A of prefix sums, times the largest squared norm of a column of C (Choquette-Choo et
    al., arXiv 2306.08153, Equation 3).
    """
    entries = np.zeros(steps)
    entries[: min(len(noising), steps)] = noising[:steps]
    errors = np.cumsum(np.cumsum(entries) ** 2) * float(np.sum(column[:steps] ** 2))
    return float(errors.mean()), float(errors[-1])


@functools.lru_cache(maxsize=64)
def best_banded(bands: int, steps: int) -> tuple[float, ...]:
    """Return the first ``bands`` entries, of norm 1, of the banded C with the least mean squared error of prefix sums.

    The objective of McKenna (arXiv 2405.15913): mean over the steps of the squared error, for one participation. With
    b = C^-1 1 it is ||c||^2 sum_j (1 - j/T) b_j^2. It is minimised over columns that fall: all their matrices have
    bounded inverses (Enestrom and Kakeya). The start is the square root of the prefix sums, which is optimal without
    bands (Fichtenberger et al., arXiv 2202.11205); the result is a stationary point among all columns, or refused.

    Raises: Unreachable if no stationary point is found.
    """
    from scipy import optimize  # late: importing it takes a third of a second

    bands = min(bands, steps)
    if bands == 1:
        return (1.0,)
    objective = _BandedError(steps, bands)
    start = square_root_column(bands)
    found = optimize.minimize(
        objective.by_ratios,
        start[1:] / start[:-1],
        jac=True,
        method="L-BFGS-B",
        bounds=[(_LEAST_RATIO, 1.0)] * (bands - 1),
        options={"maxiter": _ITERATIONS, "maxfun": 10 * _ITERATIONS, "ftol": 0.0, "gtol": 1e-13, "maxcor": 50},
    )
    rest = np.asarray(np.cumprod(found.x), dtype=np.float64)
    polished = optimize.root(objective.slopes, rest, tol=1e-13).x
    if np.abs(polished - rest).max() < _NEAR:
        rest = polished
    if not np.abs(objective.slopes(rest)).max() <= _FLAT:
        raise Unreachable(f"no best strategy of {bands} bands for {steps} steps was found; choose another number")
    column = np.concatenate(([1.0], rest))
    return tuple((column / np.linalg.norm(column)).tolist())


@dataclass(frozen=True)
class _BandedError:
    """Log of the mean squared error of C with first column (1, rest), and its derivatives by ``rest`` [bands - 1].

    The derivative of b by c_k is -C^-1 (b moved down by k), so that of the error is -2 sum_j u_j b_(j-k) with
    C^T u = the weighted b.
    """

    steps: int
    bands: int

    def __call__(self, rest: Array) -> tuple[float, Array]:
        column = np.concatenate(([1.0], rest))
        b = solve(column, np.ones(self.steps))
        weighted = (1.0 - np.arange(self.steps) / self.steps) * b
        square, error = float(column @ column), float(b @ weighted)
        u = solve(column, weighted[::-1])[::-1]
        slopes = np.array([float(u[k:] @ b[: self.steps - k]) for k in range(1, self.bands)])
        return math.log(square * error), 2.0 * rest / square - 2.0 * slopes / error

    def slopes(self, rest: Array) -> Array:
        """Return the derivatives alone."""
        return self(rest)[1]

    def by_ratios(self, ratios: Array) -> tuple[float, Array]:
        """Return the same, by the ratios of neighbouring entries."""
        rest = np.asarray(np.cumprod(ratios), dtype=np.float64)
        value, slopes = self(rest)
        return value, np.cumsum((slopes * rest)[::-1])[::-1] / ratios


def square_root_column(steps: int) -> Array:
    """Return the first column of the square root of the matrix of prefix sums: the series of (1 - x)^(-1/2)."""
    k = np.arange(1, steps)
    return np.concatenate(([1.0], np.cumprod((2.0 * k - 1.0) / (2.0 * k))))


def inverse_square_root_column(steps: int) -> Array:
    """Return the first column of the inverse of that square root: the series of (1 - x)^(1/2)."""
    k = np.arange(1, steps)
    return np.concatenate(([1.0], np.cumprod((2.0 * k - 3.0) / (2.0 * k))))
