"""From sums over nodes to certified epsilons, one example at a time, compiled by numba.

What is computed, and why it is certified, is described in `accounting.individual.pld` and `inversion`; how it is
compiled, in `accounting.individual.kernels`.
"""

from __future__ import annotations

import numpy as np
from numba import float64, int64
from numpy.typing import NDArray

from accounting.individual.kernels import FOUND, FOUND_TABLE, GIVEN, PLACES, TABLE, Array, helper, kernel

LOOSE = 1e-2
"""Relative gap between the bounds above which they are computed again by a slower method."""

_NEWTON_STEPS = 40

_CLOSE = 1e-7
"""The search ends this close to where delta(eps) is delta, relative to the largest epsilon."""

_ABOVE, _BELOW = 1.0, -1.0
"""Side of the epsilon where a curve is zero, on which a bound lies."""


@kernel(TABLE, TABLE, TABLE, FOUND_TABLE, FOUND, FOUND)
def spectrum(sums: Array, factors: Array, cuts: Array, terms: Array, kept: Array, errors: Array) -> None:
    """Terms of the trapezoidal rule, and how many of them are kept with which error.

    sums [rows, 2 points + pieces + cuts]: real and imaginary parts of K, a bound on the error of K in each piece of the
    contour, and the decay of |exp(K)| from each cut on. factors [3, points]: real and imaginary parts of what exp(K) is
    multiplied with, and its modulus. cuts [2, cuts]: after how many points a row may end, and the bound of `left_out`.
    Written: terms [rows, 2 points], real and imaginary parts; kept and errors [rows].

    Each row ends where the errors of kept and dropped terms together are least: at high frequencies the terms are
    negligible, but the error of K may not be.
    """
    points, choices = factors.shape[1], cuts.shape[1]
    pieces = sums.shape[1] - 2 * points - choices
    length = points // pieces
    moduli = np.empty(points)
    for row in range(len(sums)):
        real, turn = sums[row, :points], sums[row, points : 2 * points]
        slack, decay = sums[row, 2 * points : 2 * points + pieces], sums[row, 2 * points + pieces :]
        for k in range(points):
            size = np.exp(real[k])
            x, y = size * np.cos(turn[k]), size * np.sin(turn[k])
            terms[row, k] = factors[0, k] * x - factors[1, k] * y
            terms[row, points + k] = factors[0, k] * y + factors[1, k] * x
            moduli[k] = factors[2, k] * size
        least, spent, piece, best = np.inf, 0.0, 0, 0
        for choice in range(choices):
            while piece * length < cuts[0, choice]:
                total = 0.0
                for k in range(piece * length, (piece + 1) * length):
                    total += moduli[k]
                spent += total * np.expm1(min(slack[piece], 700.0))
                piece += 1
            error = spent + np.exp(real[0] - decay[choice]) * cuts[1, choice]
            if error < least:
                least, best = error, choice
        kept[row], errors[row] = cuts[0, best], least


@helper
def _curve(
    terms: Array, kept: int, error: float, scale: float, tilt: float, spacing: float, epsilon: float
) -> tuple[float, float]:
    """log(delta(epsilon) / delta) and its slope: the ``kept`` terms with an error added, by Horner's rule."""
    points = len(terms) // 2
    c, s = np.cos(spacing * epsilon), -np.sin(spacing * epsilon)
    x = y = dx = dy = 0.0
    for k in range(kept - 1, -1, -1):
        dx, dy = dx * c - dy * s + x, dx * s + dy * c + y
        x, y = x * c - y * s + terms[k], x * s + y * c + terms[points + k]
    value = x + error
    slope = (dx * s + dy * c) * spacing / value + 1.0 - tilt
    return scale + np.log(value) + (1.0 - tilt) * epsilon, slope


@helper
def _estimate(terms: Array, scale: float, tilt: float, spacing: float, stop: float) -> float:
    """About where the curve falls below zero on [0, stop], as if losses under the tilt were normal.

    Their mean and variance are read off the first two terms. What is no number or far away is ``stop``.
    """
    points, peak, fall = len(terms) // 2, 2.0 * terms[0], tilt - 1.0
    x, y = terms[1] / peak, terms[points + 1] / peak
    mean = np.arctan2(y, x) % (2.0 * np.pi) / spacing
    variance = -np.log(x * x + y * y) / spacing**2
    height = scale + np.log(peak / spacing) + 0.5 * np.log(0.5 * np.pi / variance)
    found = mean - variance * fall + np.sqrt((variance * fall) ** 2 - 2.0 * variance * (fall * mean - height))
    return found if found >= 0.3 * stop and found <= stop else stop


@helper
def _search(
    terms: Array,
    kept: int,
    error: float,
    scale: float,
    tilt: float,
    spacing: float,
    start: float,
    stop: float,
    side: float,
) -> float:
    """An epsilon in [0, stop] at which the curve was found to lie on this ``side`` of zero, close to it.

    Infinity or 0 where none was found, never one at which the curve is no number. Newton's method inside a shrinking
    bracket, each step of which aims a little beyond zero, so that the last of them lands on the wanted side.
    """
    left, right, epsilon = 0.0, np.inf, min(start, stop)
    certified = np.inf if side == _ABOVE else 0.0
    for _ in range(_NEWTON_STEPS):
        value, slope = _curve(terms, kept, error, scale, tilt, spacing, epsilon)
        wanted, here, step = side * value <= 0.0, epsilon, value / slope
        if wanted:
            certified = epsilon
        if value > 0.0:
            left = epsilon
        else:
            right = epsilon
        newton = epsilon - step + side * 0.5 * _CLOSE * stop
        if not (newton >= left and newton <= right):
            newton = stop if right == np.inf else 0.5 * (left + right)
        epsilon = min(newton, stop)
        if (wanted and abs(step) <= _CLOSE * stop) or (value > 0.0 and here >= stop) or right - left <= 1e-10 * stop:
            break
    return certified


@helper
def _aliasing(tails: Array, left: float, rdp: Array, epsilon: float) -> float:
    """Bound on what the trapezoidal rule adds to delta at or above ``epsilon``: see `inversion._periods`."""
    right = np.inf
    for k in range(len(rdp)):
        right = min(right, tails[0, k] * (rdp[k] - epsilon) + tails[1, k])
    return float(left + np.exp(right))


@kernel(TABLE, TABLE, TABLE, TABLE, GIVEN, float64, TABLE, TABLE, int64, PLACES, GIVEN, FOUND_TABLE)
def certified_bounds(
    above: Array,
    above_ends: Array,
    below: Array,
    below_ends: Array,
    contour: Array,
    delta: float,
    tails: Array,
    rdp: Array,
    first: int,
    rows: NDArray[np.int64],
    stop: Array,
    bounds: Array,
) -> None:
    """Raise the ``bounds`` [2, all rows] of ``rows``, upper and lower, to those of these terms where they are larger.

    above, below [rows, 2 points]: terms for either bound; above_ends, below_ends [2, rows]: how many are kept, and the
    bound on the error of their sum. contour: tilt, spacing, and the aliases from the left. tails [2, orders] and
    rdp [all rows, orders from ``first`` on] bound those from the right, see `_aliasing`. stop [all rows]: Renyi
    epsilons.

    ``bounds`` are those of the other direction, 0 where there are none yet. Where these are tight, and delta at the
    upper one is small enough in this direction too, they stay. Infinity and 0 stand where nothing can be certified.
    """
    tilt, spacing, left = contour[0], contour[1], contour[2]
    scale = np.log(spacing / np.pi) - np.log(delta)
    for i in range(len(rows)):
        row, kept, error = rows[i], int(above_ends[0, i]), above_ends[1, i]
        upper, lower, own = bounds[0, row], bounds[1, row], above[i]
        tight = upper > 0.0 and lower >= (1.0 - LOOSE) * upper
        if tight and _curve(own, kept, error, scale, tilt, spacing, upper)[0] <= 0.0:
            continue
        start = _estimate(own, scale, tilt, spacing, stop[row])
        found = _search(own, kept, error, scale, tilt, spacing, start, stop[row], _ABOVE)
        nearly = 0.9 * found
        falls = scale - np.log1p(_aliasing(tails, left, rdp[row, first:], nearly) / delta)
        kept, error = int(below_ends[0, i]), below_ends[1, i]
        least = _search(below[i], kept, -error, falls, tilt, spacing, found, stop[row], _BELOW)
        bounds[0, row] = max(upper, found)
        if least >= nearly:
            bounds[1, row] = max(lower, least)
