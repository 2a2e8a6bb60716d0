"""The mean of many independent likelihood ratios on an even grid: one power of a Fourier transform.

It takes a hundredth of the time of the sums of `dpsweep.accounting.pld.allocation`, where the largest ratios are not
too large for an even grid.

Values of one ratio beyond the grid are left out, which only lowers expectations of positive functions. For a bound from
above, the union bounds on their masses under P and under Q count as infinite loss, for removing and for adding.

Masses are tilted, w exp(b Y), and their t-th power is taken on a ring. With e = 4 eps log2(N), every frequency of size
f errs by at most t (e + 8 eps) f^(t-1). So every mass errs by at most the mean of these, plus e times the mean of f^t.
This error, and the tilted mass beyond the window (Chernoff), is added to every mass from above, and subtracted from
below.

From above, mass beyond the window counts as infinite loss, too. Under Q it has a Chernoff bound; under P it has one
because M <= exp(M - 1). Masses of cells are widened by their rounding. The tilt is that of the composition, so that
errors are relative to delta.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy import fft, special

from dpsweep.accounting.numerics.roots import beginning
from dpsweep.accounting.pld.loss import Bound
from dpsweep.accounting.pld.sensitivity import Array

Spectrum = npt.NDArray[np.complex128]

_STEP: Final = 0.03
"""Distance of the grid's points in shifts. The width of the bounds falls with its square."""
_MOST: Final = 1 << 18
"""Most points of a grid."""
_SHARES: Final = (1.0, 0.5, 0.25)
"""Tilts that are tried, as shares of the one asked for."""
_OUTSIDE: Final = 1e-17
"""Largest tilted mass beyond either end of the window; less where the tail is smaller."""
_MOST_LOST: Final = 10.0
"""Largest mass at an infinite loss, over the tail; where the window is too short for an order it may be all."""
_LARGEST: Final = 600.0
"""Largest exponent of a tilt."""
_PRECISE: Final = 1e-8
"""Largest error of a tilted law, relative to its mass."""
_LONGEST: Final = 1e6
"""Most steps over the shift: beyond, rounding of many small cells counts."""
_SMALL: Final = 1e-5
"""Powers of frequencies that are not computed one by one."""
_REACHES: Final = np.geomspace(0.7, 20.0, 6)
"""Tilts of Chernoff bounds, over the standard deviation."""
_POOLED: Final = 256
"""Most points by which a tilt of Chernoff bounds is chosen."""
_EPS: Final = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class EvenLaw:
    """Atoms of the mean under Q: ``values`` ascending, with ``masses``; both [atoms].

    lost_of_p, lost_of_q: masses under P and under Q that a bound from above has at an infinite loss.
    """

    values: Array
    masses: Array
    lost_of_p: float
    lost_of_q: float


def law_of_mean(shift: float, steps: int, tail: float, bound: Bound, tilt: float) -> EvenLaw | None:
    """Return the law of the mean of ``steps`` ratios of Gaussians at distance ``shift``, or None for a long grid.

    It is precise relative to its moment of order ``tilt`` under Q, and loses at most about ``tail`` to infinity.
    """
    if steps > _LONGEST * shift:
        return None
    reach = -float(special.ndtri(max(tail / steps, 1e-300)))
    one = _on_grid(shift, reach, bound)
    if one is None:
        return None
    for share in _SHARES:
        found = one.mean_of(steps, share * tilt / steps, tilt, bound, min(tail, _OUTSIDE))
        if found is not None and (found.lost_of_p if tilt > 0.0 else found.lost_of_q) <= _MOST_LOST * tail:
            return found
    return None


@dataclass(frozen=True, eq=False)
class _Ratio:
    """One ratio Y on the points ``first`` + k ``step``, with ``masses`` under Q, but for values beyond the grid.

    Beyond the grid lie probabilities beyond_q under Q and beyond_p under P, for a bound from above.
    """

    first: float
    step: float
    masses: Array
    beyond_q: float
    beyond_p: float

    @functools.cached_property
    def points(self) -> Array:
        return _even(self.first, self.step, len(self.masses))

    @functools.cached_property
    def logs(self) -> Array:
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.masses), dtype=np.float64)

    @functools.cached_property
    def pooled(self) -> tuple[Array, Array]:
        """Logs of the masses of neighbouring points and their mean points, for choices on which no bound rests."""
        starts = np.arange(0, len(self.masses), 1 + len(self.masses) // _POOLED)
        masses = np.add.reduceat(self.masses, starts)
        with np.errstate(divide="ignore", invalid="ignore"):
            means = np.add.reduceat(self.masses * self.points, starts) / masses
            return np.asarray(np.log(masses)), np.where(masses > 0.0, means, 0.0)

    def mean_of(self, steps: int, tilt: float, order: float, bound: Bound, outside: float) -> EvenLaw | None:
        """Return the law of the mean of ``steps`` such ratios by the transform of masses times exp(tilt Y).

        None is returned if it is too imprecise for the moment of this order. outside: tilted mass that may lie beyond
        either end of the window.
        """
        points, logs = self.points, self.logs
        (log_total,) = _log_moments(logs, points, np.array([tilt])).tolist()
        changes = tilt * points - log_total
        if not float(np.abs(changes).max()) < _LARGEST:
            return None
        tilted = self.masses * np.exp(changes)
        width = math.sqrt(steps * float(tilted @ (points - tilted @ points) ** 2))
        tilts = _REACHES / width

        high = self._end(steps, tilt, tilts, log_total, outside)
        low = max(self._end(steps, tilt, -tilts, log_total, outside), steps * self.first)
        lowest, highest = (math.floor((end - steps * self.first) / self.step) for end in (low, high + self.step))
        size = fft.next_fast_len(max(highest - lowest + 1, len(points)), real=True)
        if size > _MOST:
            return None
        found, error = power_on_a_ring(tilted, steps, size)
        sums = steps * self.first + (lowest + np.arange(size)) * self.step
        untilts = steps * log_total - tilt * sums
        if not float(np.abs(untilts).max()) < _LARGEST:
            return None
        error += 4.0 * outside
        rounding = 8 * _EPS * (steps * (2.0 + float(np.abs(changes).max())) + float(np.abs(untilts).max()) + 2.0)
        found = np.roll(found, -(lowest % size))
        found = (
            (np.maximum(found, 0.0) + error) * (1.0 + rounding)
            if bound == "upper"
            else np.maximum(found - error, 0.0) * (1.0 - rounding)
        )
        masses = found * np.exp(untilts)
        kept = masses > 0.0
        values = sums[kept] / steps
        with np.errstate(all="ignore"):  # a NaN counts as imprecise
            weights = np.exp(order * np.log(values))
            doubtful = float((weights * np.exp(untilts[kept])).sum() * error)
            if not doubtful <= _PRECISE * float((weights * masses[kept]).sum()):
                return None
        if bound == "lower":
            return EvenLaw(values, masses[kept], 0.0, 0.0)
        start, stop = (float(steps * self.first + end * self.step) for end in (lowest, highest))
        lost_of_p = self.beyond_p + (steps - 1) * self.beyond_q + self._beyond(steps, stop, tilt, tilts)
        lost_of_q = steps * self.beyond_q + self._beyond(steps, start, tilt, -tilts)
        return EvenLaw(values, masses[kept], lost_of_p, lost_of_q)

    def _end(self, steps: int, tilt: float, towards: Array, log_total: float, outside: float) -> float:
        """Return a sum with at most ``outside`` of the tilted mass beyond it, on the side of ``towards``.

        The pooled masses choose the tilt of the Chernoff bound among these.
        """

        def ends(logs: Array, points: Array, tried: Array) -> Array:
            moments = _log_moments(logs, points, tilt + tried) - log_total
            return np.asarray((steps * moments - math.log(outside)) / tried)

        nearest = np.argmin(ends(*self.pooled, towards) * np.sign(towards))
        return float(ends(self.logs, self.points, towards[[nearest]])[0])

    def _beyond(self, steps: int, end: float, tilt: float, tilts: Array) -> float:
        """Return a Chernoff bound on the mass of P above ``end``, or of Q below it where ``tilts`` are negative.

        Under P sums have the weight S / steps <= exp(S / steps - 1). The pooled masses choose the tilt.
        """
        own = 1.0 / steps if float(tilts[0]) > 0.0 else 0.0
        towards = tilts + max(tilt - own, 0.0) if own else tilts + min(tilt, 0.0)

        def bounds(logs: Array, points: Array, tried: Array) -> Array:
            return np.asarray(steps * (_log_moments(logs, points, own + tried) - own) - tried * end)

        least = np.argmin(bounds(*self.pooled, towards))
        return math.exp(min(0.0, float(bounds(self.logs, self.points, towards[[least]])[0])))


def _on_grid(shift: float, reach: float, bound: Bound) -> _Ratio | None:
    """Return the law of Y = exp(shift z - shift^2 / 2), z ~ N(0, 1), bounded in convex order within a grid."""
    step, end = _STEP * shift, shift * (reach + 0.5 * shift)
    if not end < math.log(1.0 + 0.5 * _MOST * step):
        return None
    first = math.exp(-end) if bound == "upper" else _first_barycentre(shift, step)
    size = math.ceil((math.exp(end) - first) / step) + 1
    points = _even(first, step, size)
    edges = points if bound == "upper" else np.concatenate((np.zeros(1), points + 0.5 * step))
    masses, sums, errors = cell_masses(shift, edges)
    placed = _spread(masses, sums, errors, points) if bound == "upper" else _pooled(masses, sums, errors, points)
    if placed is None:
        return None
    low, high = (math.log(float(points[place])) / shift + 0.5 * shift for place in (0, -1))
    beyond_q, beyond_p = (float(special.ndtr(low - s) + special.ndtr(s - high)) for s in (0.0, shift))
    return _Ratio(first, step, placed, beyond_q, beyond_p)


def _even(first: float, step: float, size: int) -> Array:
    return np.asarray(first + step * np.arange(size), dtype=np.float64)


def _first_barycentre(shift: float, step: float) -> float:
    """Return the mean of Y below an edge that is half a step above it."""

    def is_above(edge: float) -> bool:
        place = math.log(edge) / shift + 0.5 * shift
        mass, mean = float(special.ndtr(place)), float(special.ndtr(place - shift))
        return mass > 1e-280 and edge - mean / mass > 0.5 * step

    return beginning(is_above, 0.0, 1.0 + step)[1] - 0.5 * step


def cell_masses(shift: float, edges: Array) -> tuple[Array, Array, Array]:
    """Masses of Y under Q between edges, sums of Y there, and a bound on the rounding error of both."""
    with np.errstate(divide="ignore"):
        places = np.log(edges) / shift + 0.5 * shift
    masses, errors = normal_masses(places)
    sums, more = normal_masses(places - shift)
    return masses, sums, errors + more


def normal_masses(edges: Array) -> tuple[Array, Array]:
    """Mass of N(0, 1) between neighbouring edges, from the nearer tail, and a bound on its rounding error."""
    tails = special.ndtr(-np.abs(edges))
    upper = edges[:-1] > 0.0
    across = (edges[:-1] <= 0.0) & (edges[1:] > 0.0)
    masses = np.where(upper, tails[:-1] - tails[1:], tails[1:] - tails[:-1])
    masses = np.where(across, 1.0 - tails[1:] - tails[:-1], masses)
    with np.errstate(invalid="ignore"):
        errors = 2 * _EPS * np.where(tails > 0.0, tails * (2.0 + edges**2), 0.0)
    return np.maximum(masses, 0.0), errors[:-1] + errors[1:] + np.where(across, 2 * _EPS, 0.0)


def _spread(masses: Array, sums: Array, errors: Array, points: Array) -> Array:
    """Move the mass of each cell onto its two points, so that its mean stays; errors are added."""
    step = points[1] - points[0]
    raised = np.clip((sums - masses * points[:-1]) / step, 0.0, masses)
    wrong = errors * (2.0 + points[1:] / step)
    placed = np.zeros(len(points))
    placed[1:] += raised + wrong
    placed[:-1] += masses - raised + wrong
    return placed


def _pooled(masses: Array, sums: Array, errors: Array, points: Array) -> Array | None:
    """Merge each cell into its mean, and pool it with mass of a neighbour so that all lies on its point.

    The density rises and then falls, so means are above their points at first, and are pooled with mass from below;
    later with mass from above. The mean of the first cell is at or below its point. The last cell is dropped. Errors
    are subtracted. None if a neighbour has too little mass.
    """
    step = points[1] - points[0]
    excess = (sums - masses * points) / step
    excess[0] = min(excess[0], 0.0)
    excess[-1] = 0.0
    wrong = errors * (2.0 + points / step)
    up, down = np.maximum(excess, 0.0), np.maximum(-excess, 0.0)
    placed = masses + up + down - 2.0 * wrong
    placed[:-1] -= up[1:] + wrong[1:]
    placed[1:] -= down[:-1] + wrong[:-1]
    placed[-1] = 0.0
    return placed if float(placed.min()) >= 0.0 else None


def power_on_a_ring(masses: Array, steps: int, size: int) -> tuple[Array, float]:
    """Return the sum's law on a ring of ``size`` points, and a bound on the error of each mass; masses sum to 1.

    Each output of a transform errs by at most 4 eps log2(size) times the sum of its inputs. An error of a frequency
    counts ``steps`` times in its power.
    """
    each = 4 * _EPS * math.log2(size)
    spectrum = fft.rfft(masses, size)
    sizes = np.minimum(np.abs(spectrum) + each, 1.0)
    powers = np.full(len(sizes), _SMALL)
    large = sizes > _SMALL ** (1.0 / max(steps - 1, 1))
    powers[large] = sizes[large] ** (steps - 1)
    counts = np.full(len(sizes), 2.0 / size)
    counts[0] = 1.0 / size
    error = float(counts @ (powers * (steps * (each + 8 * _EPS) + each)))
    return fft.irfft(powered(spectrum, steps), size), error


def powered(spectrum: Spectrum, steps: int) -> Spectrum:
    """Return the spectrum of the composition of ``steps`` equal laws, by squaring. steps: at least 1."""
    power, square, left = None, spectrum, steps
    while left:
        if left & 1:
            power = square if power is None else power * square
        left >>= 1
        square = square * square if left else square
    assert power is not None
    return power


def _log_moments(logs: Array, points: Array, tilts: Array) -> Array:
    """Return log sum exp(logs + tilt * points) for each tilt."""
    exponents = logs + tilts[:, None] * points
    peaks = exponents.max(axis=1)
    return np.asarray(peaks + np.log(np.exp(exponents - peaks[:, None]).sum(axis=1)), dtype=np.float64)
