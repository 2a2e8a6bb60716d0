"""From sums over nodes to certified epsilons, one example at a time, compiled by numba.

`dpsweep.accounting.individual.exact_composition` and `inversion` describe what is computed and why it is certified;
`dpsweep.accounting.individual.kernels` describes how it is compiled.
"""

from __future__ import annotations

import numpy as np
from numba import float64
from numpy.typing import NDArray

from dpsweep.accounting.individual.kernels import FOUND_TABLE, GIVEN, PLACES, TABLE, Array
from dpsweep.accounting.machine_code import helper, kernel

LOOSE = 1e-2
"""Relative gap between the bounds above which they are computed again by a slower method."""

_STEPS = 40
"""Largest number of steps of the search for an epsilon."""

_CLOSE, _CLOSE_BELOW = 1e-6, 2e-5
"""Tolerances of the search for the epsilon where delta(eps) is delta, relative to the upper end of the search: for
upper bounds, and for lower bounds, whose other errors are larger."""

_PER_LOG_2, _LOG_2 = 1.4426950408889634, (0.693145751953125, 1.4286068203094172e-06)
_PER_QUARTER = 0.6366197723675814
_QUARTER = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21)
"""1 / log 2, log 2, 2 / pi, pi / 2, for argument reduction: whole multiples of all parts but the last are exact."""

_EXPONENT_BITS = 2.0**52 + 1023.0
"""Adding this to a whole number n puts n + 1023 into the last bits; shifted left by 52, these are the double 2^n."""

_ABOVE, _BELOW = 1.0, -1.0
"""Side of a curve's zero on which a bound lies: above for upper bounds on epsilon, below for lower ones."""

_LANES, _ADDENDS = 16, 16
"""Number of partial sums of a moment, and of terms each takes before it is added to the total. Rounding stays below
1e-14."""


@kernel(TABLE, TABLE, TABLE, FOUND_TABLE, FOUND_TABLE)
def write_moments(tilted: Array, cosines: Array, sines: Array, real: Array, imaginary: Array) -> None:
    """Write the sums over g of tilted[n, g] (cosines[n, g] + i sines[n, g])^k for k = 0 .. points - 1.

    tilted, cosines, sines [nodes, grid]; real, imaginary [nodes, points].
    """
    nodes, grid = tilted.shape
    turns = -(-grid // _LANES)
    x, y = np.zeros((turns, _LANES)), np.zeros((turns, _LANES))
    c, s = np.zeros((turns, _LANES)), np.zeros((turns, _LANES))
    some_x, some_y, sum_x, sum_y = np.zeros(_LANES), np.zeros(_LANES), np.zeros(_LANES), np.zeros(_LANES)
    for node in range(nodes):
        y[:] = 0.0
        for g in range(grid):
            turn, lane = g // _LANES, g % _LANES
            x[turn, lane], c[turn, lane], s[turn, lane] = tilted[node, g], cosines[node, g], sines[node, g]
        for k in range(real.shape[1]):
            sum_x[:], sum_y[:], some_x[:], some_y[:] = 0.0, 0.0, 0.0, 0.0
            for turn in range(turns):
                own_x, own_y, own_c, own_s = x[turn], y[turn], c[turn], s[turn]
                for lane in range(_LANES):
                    a, b = own_x[lane], own_y[lane]
                    some_x[lane] += a
                    some_y[lane] += b
                    own_x[lane] = a * own_c[lane] - b * own_s[lane]
                    own_y[lane] = a * own_s[lane] + b * own_c[lane]
                if turn % _ADDENDS == _ADDENDS - 1 or turn == turns - 1:
                    for lane in range(_LANES):
                        sum_x[lane] += some_x[lane]
                        sum_y[lane] += some_y[lane]
                        some_x[lane], some_y[lane] = 0.0, 0.0
            real[node, k], imaginary[node, k] = 0.0, 0.0
            for lane in range(_LANES):
                real[node, k] += sum_x[lane]
                imaginary[node, k] += sum_y[lane]


@helper
def _exponentials(x: Array, found: Array) -> None:
    """Write exp(x) within 4e-16 of itself: 0 below -708 and infinity above 709. A loop that vectorises, unlike np.exp.

    In x = n log 2 + r, |r| is at most 0.35. Taylor's series of exp(r) ends with r^13. 2^n has n + 1023 in the bits of
    its exponent.
    """
    bits = found.view(np.int64)
    for k in range(len(x)):
        found[k] = np.floor(x[k] * _PER_LOG_2 + 0.5) + _EXPONENT_BITS
    for k in range(len(x)):
        bits[k] = bits[k] << 52
    for k in range(len(x)):
        n = np.floor(x[k] * _PER_LOG_2 + 0.5)
        r = (x[k] - n * _LOG_2[0]) - n * _LOG_2[1]
        series = ((r * (1.0 / 6227020800.0) + 1.0 / 479001600.0) * r + 1.0 / 39916800.0) * r + 1.0 / 3628800.0
        series = (((series * r + 1.0 / 362880.0) * r + 1.0 / 40320.0) * r + 1.0 / 5040.0) * r + 1.0 / 720.0
        series = (((series * r + 1.0 / 120.0) * r + 1.0 / 24.0) * r + 1.0 / 6.0) * r + 0.5
        value = ((series * r + 1.0) * r + 1.0) * found[k]
        found[k] = 0.0 if x[k] < -708.0 else (np.inf if x[k] > 709.0 else value)


@helper
def _turns(x: Array, cosines: Array, sines: Array) -> None:
    """Write cos(x) and sin(x) within 3e-16, NaN beyond 1e6. A loop that vectorises, unlike np.cos.

    x = n pi/2 + r with |r| <= 0.79; Taylor's series of sin(r) and cos(r) end with r^15 and r^16.
    """
    for k in range(len(x)):
        n = np.floor(x[k] * _PER_QUARTER + 0.5)
        r = ((x[k] - n * _QUARTER[0]) - n * _QUARTER[1]) - n * _QUARTER[2]
        z = r * r
        odd = ((z * (-1.0 / 1307674368000.0) + 1.0 / 6227020800.0) * z - 1.0 / 39916800.0) * z + 1.0 / 362880.0
        odd = ((odd * z - 1.0 / 5040.0) * z + 1.0 / 120.0) * z - 1.0 / 6.0
        even = ((z * (1.0 / 20922789888000.0) - 1.0 / 87178291200.0) * z + 1.0 / 479001600.0) * z - 1.0 / 3628800.0
        even = ((even * z + 1.0 / 40320.0) * z - 1.0 / 720.0) * z + 1.0 / 24.0
        sine, cosine = r + r * z * odd, 1.0 - 0.5 * z + z * z * even
        quadrant = n - 4.0 * np.floor(0.25 * n)
        across = quadrant == 1.0 or quadrant == 3.0
        x_of, y_of = (sine, cosine) if across else (cosine, sine)
        known = 1.0 if abs(x[k]) <= 1e6 else np.nan
        cosines[k] = known * (-x_of if quadrant == 1.0 or quadrant == 2.0 else x_of)
        sines[k] = known * (-y_of if quadrant >= 2.0 else y_of)


@helper
def _terms(
    sums: Array, factors: Array, cuts: Array, moduli: Array, cosines: Array, sines: Array, terms: Array
) -> tuple[int, float]:
    """Write the ``terms`` [2 points] of the trapezoidal rule for one row; return how many are kept and their error.

    sums [2 points + pieces + cuts], factors [3, points] and cuts [2, cuts] as in `certified_bounds`. moduli, cosines
    and sines [points] are overwritten. The terms are cut off where the errors of kept and dropped terms together are
    least: at high frequencies the terms are negligible, but the error of K may not be. Up to x = 1, exp(x) - 1 is at
    most x + x^2 / 2 + x^3 / 2. The terms of its series from the third on sum to at most (e - 5/2) x^3.
    """
    points, choices = factors.shape[1], cuts.shape[1]
    pieces = len(sums) - 2 * points - choices
    length = points // pieces
    slack, decay = sums[2 * points : 2 * points + pieces], sums[2 * points + pieces :]
    _exponentials(sums[:points], moduli)
    _turns(sums[points : 2 * points], cosines, sines)
    for k in range(points):
        x, y = moduli[k] * cosines[k], moduli[k] * sines[k]
        terms[k] = factors[0, k] * x - factors[1, k] * y
        terms[points + k] = factors[0, k] * y + factors[1, k] * x
        moduli[k] *= factors[2, k]
    spent, piece, spent_until = 0.0, 0, cosines[:choices]
    for choice in range(choices):
        while piece * length < cuts[0, choice]:
            total, x = 0.0, slack[piece]
            for k in range(piece * length, (piece + 1) * length):
                total += moduli[k]
            spent += total * (x * (1.0 + 0.5 * x * (1.0 + x)) if x <= 1.0 else np.expm1(min(x, 700.0)))
            piece += 1
        spent_until[choice] = spent
    least, best, choice, dropped = np.inf, choices - 1, choices - 1, 0.0
    while choice >= 0 and dropped < least:  # what is dropped grows towards the first cut
        dropped = np.exp(sums[0] - decay[choice]) * cuts[1, choice]
        if spent_until[choice] + dropped < least:
            least, best = spent_until[choice] + dropped, choice
        choice -= 1
    return int(cuts[0, best]), least


@helper
def _curve(
    terms: Array, kept: int, error: float, scale: float, tilt: float, spacing: float, epsilon: float
) -> tuple[float, float]:
    """Return log(delta(epsilon) / delta) and its slope: the ``kept`` terms with an error added, by Horner's rule.

    The sum is E(t^2) + t O(t^2) with t = exp(-i spacing epsilon), where E has the even and O the odd terms. These are
    two chains of half the length, which a processor evaluates in parallel. Its derivative times t is 2 t^2 (E' + t O')
    + t O.
    """
    points = len(terms) // 2
    c, s = np.cos(spacing * epsilon), -np.sin(spacing * epsilon)
    c2, s2 = c * c - s * s, 2.0 * c * s
    ex = ey = ox = oy = slope_ex = slope_ey = slope_ox = slope_oy = 0.0
    if kept % 2 == 1:
        ex, ey = terms[kept - 1], terms[points + kept - 1]
    for k in range(2 * (kept // 2) - 2, -1, -2):
        slope_ex, slope_ey = slope_ex * c2 - slope_ey * s2 + ex, slope_ex * s2 + slope_ey * c2 + ey
        slope_ox, slope_oy = slope_ox * c2 - slope_oy * s2 + ox, slope_ox * s2 + slope_oy * c2 + oy
        ex, ey = ex * c2 - ey * s2 + terms[k], ex * s2 + ey * c2 + terms[points + k]
        ox, oy = ox * c2 - oy * s2 + terms[k + 1], ox * s2 + oy * c2 + terms[points + k + 1]
    x, y = slope_ex + slope_ox * c - slope_oy * s, slope_ey + slope_ox * s + slope_oy * c
    value = ex + ox * c - oy * s + error
    slope = (2.0 * (x * s2 + y * c2) + ox * s + oy * c) * spacing / value + 1.0 - tilt
    return scale + np.log(value) + (1.0 - tilt) * epsilon, slope


@helper
def _height(terms: Array, kept: int, error: float, scale: float, tilt: float, spacing: float, epsilon: float) -> float:
    """Return the value of `_curve` without its slope, for half the work."""
    points = len(terms) // 2
    c, s = np.cos(spacing * epsilon), -np.sin(spacing * epsilon)
    c2, s2 = c * c - s * s, 2.0 * c * s
    ex = ey = ox = oy = 0.0
    if kept % 2 == 1:
        ex, ey = terms[kept - 1], terms[points + kept - 1]
    for k in range(2 * (kept // 2) - 2, -1, -2):
        ex, ey = ex * c2 - ey * s2 + terms[k], ex * s2 + ey * c2 + terms[points + k]
        ox, oy = ox * c2 - oy * s2 + terms[k + 1], ox * s2 + oy * c2 + terms[points + k + 1]
    return float(scale + np.log(ex + ox * c - oy * s + error) + (1.0 - tilt) * epsilon)


@helper
def _estimate(terms: Array, scale: float, tilt: float, spacing: float, stop: float) -> float:
    """Estimate where the curve falls below zero on [0, stop], as if losses under the tilt were normal.

    Their mean and variance follow from the first two terms. An estimate that is NaN or outside [0.3 stop, stop] is
    replaced by ``stop``.
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
    place: tuple[float, float, float],
    stop: float,
    side: float,
) -> tuple[float, float, float]:
    """Search [0, stop] for an epsilon close to the curve's zero, on the given ``side`` of it.

    Returns that epsilon (infinity or 0 if none was found, never one where the curve is NaN), and the curve's value and
    inverse slope at the last epsilon tried. place: the first epsilon, with about its value and inverse slope. Then
    epsilon as a function of the curve's value is interpolated by a parabola through the last three points, at first
    through two points and the slope, inside a shrinking bracket. Each step aims a little beyond zero, so that the last
    one lands on the wanted side.
    """
    at, value, rate = place
    older = value
    close = (_CLOSE if side == _ABOVE else _CLOSE_BELOW) * stop
    certified = np.inf if side == _ABOVE else 0.0
    left, right = (at, np.inf) if value > 0.0 else (0.0, at)
    crossing = at - value * rate
    for _ in range(_STEPS):
        here = crossing + side * 0.5 * close
        if not (here >= left and here <= right):
            here = stop if right == np.inf else 0.5 * (left + right)
        here = min(here, stop)
        height = _height(terms, kept, error, scale, tilt, spacing, here)
        wanted = side * height <= 0.0
        if wanted:
            certified = here
        if height > 0.0:
            left = here
        else:
            right = here
        secant = (at - here) / (value - height)
        crossing = here - secant * height + (rate - secant) / (older - height) * value * height
        at, value, rate, older = here, height, secant, value
        if (
            (wanted and abs(crossing - here) <= close)
            or (height > 0.0 and here >= stop)
            or right - left <= 1e-10 * stop
        ):
            break
    return certified, value, rate


@helper
def _aliasing(tails: Array, left: float, rdp: Array, epsilon: float) -> float:
    """Return the bound on the aliases that the trapezoidal rule adds to delta from ``epsilon`` on; see
    `inversion._periods`.
    """
    right = np.inf
    for k in range(len(rdp)):
        right = min(right, tails[0, k] * (rdp[k] - epsilon) + tails[1, k])
    return float(left + np.exp(right))


@kernel(TABLE, TABLE, TABLE, TABLE, GIVEN, float64, TABLE, TABLE, PLACES, GIVEN, FOUND_TABLE)
def certified_bounds(
    sums: Array,
    above: Array,
    below: Array,
    cuts: Array,
    contour: Array,
    delta: float,
    tails: Array,
    rdp: Array,
    rows: NDArray[np.int64],
    stop: Array,
    bounds: Array,
) -> None:
    """Raise ``bounds`` [2, all rows] of ``rows``, upper and lower, to the bounds from ``sums`` where these are larger.

    sums [rows, 2 points + pieces + cuts]: real and imaginary parts of K, a bound on the error of K in each piece of the
    contour, and the decay of |exp(K)| from each cut on.
    above, below [3, points]: real part, imaginary part and modulus of the kernel that multiplies exp(K), for the upper
    and the lower bound.
    cuts [2, cuts]: number of points up to each cut, and the bound of `inversion.truncation_bound` there.
    contour: tilt, spacing, bound on aliases from the left, and damping; without damping, above equals below.
    tails [2, orders] and rdp [rows, orders] bound the aliases from the right, see `_aliasing`. stop [all rows]: Renyi
    epsilons, the upper ends of the searches.

    On entry ``bounds`` has the bounds of the other direction, or 0. If they are tight, and delta at the upper one is
    small enough in this direction too, they stay. Infinity (upper) or 0 (lower) means that nothing could be certified.
    """
    tilt, spacing, left, points = contour[0], contour[1], contour[2], above.shape[1]
    scale = np.log(spacing / np.pi) - np.log(delta)
    own, moduli, cosines, sines = np.empty(2 * points), np.empty(points), np.empty(points), np.empty(points)
    for i in range(len(rows)):
        row = rows[i]
        upper, lower, most = bounds[0, row], bounds[1, row], stop[row]
        kept, error = _terms(sums[i], above, cuts, moduli, cosines, sines, own)
        tight = upper > 0.0 and lower >= (1.0 - LOOSE) * upper
        if tight and _height(own, kept, error, scale, tilt, spacing, upper) <= 0.0:
            continue
        start = _estimate(own, scale, tilt, spacing, most)
        value, slope = _curve(own, kept, error, scale, tilt, spacing, start)
        found, value, rate = _search(own, kept, error, scale, tilt, spacing, (start, value, 1.0 / slope), most, _ABOVE)
        bounds[0, row] = max(upper, found)
        if found == np.inf:
            continue
        nearly = 0.9 * found
        aliases = np.log1p(_aliasing(tails, left, rdp[i], nearly) / delta)
        value += np.log1p(-2.0 * error * np.exp(scale + (1.0 - tilt) * found - value)) - aliases
        if contour[3] > 0.0:
            kept, error = _terms(sums[i], below, cuts, moduli, cosines, sines, own)
        least = _search(own, kept, -error, scale - aliases, tilt, spacing, (found, value, rate), most, _BELOW)[0]
        if least >= nearly:
            bounds[1, row] = max(lower, least)
