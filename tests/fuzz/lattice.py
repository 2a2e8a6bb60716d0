"""Epsilon of composed rounds by convolution of their privacy losses on a lattice: an upper bound, and how near it is.

Every cell of the lattice keeps its mass under both measures, spread onto its two nodes, which dominates the true law.
The laws are tilted to where delta is decided, convolved by FFT, and tilted back. The error of the spread falls with the
spacing: the difference to a lattice of twice the spacing, doubled, is the stated error below. Where it is not small, or
the spread moves the law out of the window, the spacing is too coarse for that rule, and nothing is said below. To it
come Chernoff bounds of what the window leaves out, the rounding of the transforms, and the tails that are cut off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp, ndtr, ndtri_exp

from tests.fuzz.rounds import Mixture, Rounds

Array = NDArray[np.float64]
Direction = Literal["remove", "add"]

_POINTS = (1 << 14, 1 << 15, 1 << 17)
"""Sizes of windows, tried until the bounds are near each other."""
_NEAR = 1e-3
_CONVERGED = 0.02
"""Relative difference to twice the spacing up to which the error of the spread is taken to fall with the spacing."""
_MOST_CELLS = 1 << 18
_MOST_TILTED = 1e5
"""Largest product of a tilt and the largest loss, unless the tilt is at most 1e5: beyond it moments are lost in
rounding."""
_TAIL = 1e-7
"""Share of delta that the tails of all rounds together may have."""
_OUTSIDE = 1e-11
"""Tilted mass outside the window."""
_ROUNDING = 4e-15
"""Of a tilted mass, per round and transform."""
LARGEST_SHIFT = 100.0
"""Above it the quadrature that chooses the tilt is too coarse."""


@dataclass(frozen=True)
class Bracket:
    """The exact epsilon lies between ``low`` and ``high``."""

    low: float
    high: float


@dataclass(frozen=True)
class _Law:
    """Masses at (first + i) h, and the mass of an infinite loss."""

    first: int
    masses: Array
    infinite: float


@dataclass(frozen=True)
class _Window:
    """Where delta is decided: the tilt, the mean of the tilted law, and how far it reaches to either side.

    ``aim`` is Chernoff's bound on epsilon, near which deltas are computed.
    """

    tilt: float
    aim: float
    centre: float
    below: float
    above: float


def bracket(rounds: Rounds, delta: float) -> Bracket | None:
    """Both bounds on epsilon, the worse of both directions; None where shifts are too large for this lattice."""
    laws = [*rounds.mixtures]
    if rounds.gaussian > 0.0:
        laws.append((Mixture((rounds.gaussian,), (1.0,)), 1))
    if any(mixture.shifts[-1] > LARGEST_SHIFT for mixture, _ in laws):
        return None
    if not laws and not rounds.pure:
        return Bracket(0.0, 0.0)
    cut = _TAIL * delta / max(sum(count for _, count in laws), 1)
    both = [_one_way(laws, rounds.pure, delta, cut, way) for way in ("remove", "add")]
    return Bracket(max(each.low for each in both), max(each.high for each in both))


def _one_way(
    laws: Sequence[tuple[Mixture, int]], pure: Sequence[float], delta: float, cut: float, way: Direction
) -> Bracket:
    """Of one direction, by the first window that is fine enough; bounds of several windows hold together."""
    samples = [(_samples(mixture, cut, way), count) for mixture, count in laws]
    samples += [(_response_samples(each), 1) for each in pure]
    window = _window(samples, delta)
    widest = max(float(losses[-1] - losses[0]) for (losses, _), _ in samples)
    # beyond the largest losses lies no more than the tails that are cut off
    low, high = 0.0, math.fsum(count * float(losses[-1]) for (losses, _), count in samples) * (1.0 + 1e-9)
    for points in _POINTS:
        spacing = max((window.below + window.above) / points, widest / _MOST_CELLS, 1e-300)
        fine, coarse = (
            _Composed(
                [
                    *((_spread(mixture, h, cut, way), count) for mixture, count in laws),
                    *((_response(each, h), 1) for each in pure),
                ],
                h,
                window,
                points,
            )
            for h in (spacing, 2.0 * spacing)
        )
        found = _with_error(fine, coarse, delta)
        low, high = max(low, found.low), min(high, found.high)
        if high - low <= _NEAR * high:
            break
    return Bracket(low, high)


def _with_error(fine: _Composed, coarse: _Composed, delta: float) -> Bracket:
    middle, twice = fine.epsilon(delta), coarse.epsilon(delta)
    if middle is None or twice is None:
        return Bracket(0.0, math.inf)
    error = fine.error(middle) + fine.infinite
    low, high = fine.epsilon(delta + error), fine.epsilon(delta - error) if delta > error else None
    if low is None:
        return Bracket(0.0, math.inf)
    if low <= fine.bottom or abs(twice - middle) > _CONVERGED * middle or fine.leaves_window:
        low = 0.0
    widened = 2.0 * abs(twice - middle) + 1e-9 * middle
    return Bracket(max(low - widened, 0.0), math.inf if high is None else high * (1.0 + 1e-9))


class _Composed:
    """The tilted law of the sum of all losses on a window of the lattice."""

    def __init__(self, laws: Sequence[tuple[_Law, int]], spacing: float, window: _Window, size: int) -> None:
        self._window = window
        self.infinite = sum(count * law.infinite for law, count in laws)
        self._rounds = sum(count for _, count in laws)
        spectrum = np.ones(size // 2 + 1, np.complex128)
        log_scale = self._mean = self._variance = 0.0
        for law, count in laws:
            places = law.first + np.arange(len(law.masses))
            with np.errstate(divide="ignore"):
                logs = np.log(law.masses) + window.tilt * spacing * places
            total = float(logsumexp(logs))
            weights, losses = np.exp(logs - total), spacing * places
            mean = float(weights @ losses)
            self._mean += count * mean
            self._variance += count * float(weights @ (losses - mean) ** 2)
            folded = np.bincount(places % size, weights=weights, minlength=size)
            spectrum *= np.fft.rfft(folded) ** count
            log_scale += count * total
        start = math.floor((window.centre - window.below) / spacing)
        places = start + np.arange(size)
        self._offsets = spacing * places - window.aim
        tilted = np.maximum(np.fft.irfft(spectrum, size)[places % size], 0.0)
        self._log_scale = log_scale - window.tilt * window.aim
        kept = (self._offsets * max(window.tilt, 1.0) > -600.0) & (np.abs(self._offsets) < 600.0)
        self._offsets, tilted = self._offsets[kept], tilted[kept]
        masses = tilted * np.exp(-window.tilt * self._offsets)
        self._sums = np.cumsum(masses[::-1])[::-1]
        self._duals = np.cumsum((masses * np.exp(-self._offsets))[::-1])[::-1]

    @property
    def bottom(self) -> float:
        """The lowest epsilon in the window."""
        return max(float(self._offsets[0]) + self._window.aim, 0.0)

    @property
    def leaves_window(self) -> bool:
        """Whether the spread moved the tilted law, so that the transform folds it onto itself."""
        window = self._window
        inside = window.centre - 0.5 * window.below < self._mean < window.centre + 0.5 * window.above
        return not inside or math.sqrt(self._variance) > 0.5 * (window.below + window.above)

    def error(self, epsilon: float) -> float:
        """Of delta at an epsilon: what lies outside the window, and rounding, tilted back from the aim."""
        back = self._window.tilt * max(self._window.aim - epsilon, 0.0)
        reached = math.exp(min(self._log_scale + back, 700.0))
        return reached * (2.0 * _OUTSIDE + _ROUNDING * (self._rounds + 20))

    def epsilon(self, delta: float) -> float | None:
        """The epsilon >= 0 at which the lattice law has this delta, or `bottom` if it is below; None if it is above."""
        with np.errstate(over="ignore"):
            target = delta * math.exp(-self._log_scale) if self._log_scale > -700.0 else math.inf
        deltas = self._sums - np.exp(self._offsets) * self._duals
        place = int(np.searchsorted(-deltas, -target))  # the first node whose delta is at most the target
        if place == len(deltas):
            return None
        if place == 0:
            return self.bottom
        left = self._sums[place] - target
        if left <= 0.0:
            return max(float(self._offsets[place] + self._window.aim), 0.0)
        return max(self._window.aim + math.log(left / self._duals[place]), 0.0)


def _reach(mixture: Mixture, cut: float) -> tuple[float, float]:
    far = -float(ndtri_exp(math.log(cut)))
    return -far, mixture.shifts[-1] + far


def _log_ratio(mixture: Mixture, x: Array) -> tuple[Array, Array]:
    """log P/Q at x, and its derivative: both increase with x."""
    shifts, weights = np.asarray(mixture.shifts)[:, None], np.asarray(mixture.weights)[:, None]
    terms = shifts * x - 0.5 * shifts**2 + np.log(weights)
    peaks = terms.max(axis=0)
    scaled = np.exp(terms - peaks)
    total = scaled.sum(axis=0)
    return peaks + np.log(total), np.asarray((shifts * scaled).sum(axis=0) / total)


def _outputs(mixture: Mixture, losses: Array, cut: float) -> Array:
    """The output x at which log P/Q has each loss, by Newton's method from above, which is monotone as it is convex."""
    grid = np.linspace(*_reach(mixture, cut), 1 << 14)
    values = _log_ratio(mixture, grid)[0]
    above = np.clip(np.searchsorted(values, losses), 1, len(grid) - 1)
    x = grid[above]
    for _ in range(5):
        value, slope = _log_ratio(mixture, x)
        x = np.maximum(x - np.maximum(value - losses, 0.0) / np.maximum(slope, 1e-300), grid[above - 1])
    return np.asarray(x)


def _spread(mixture: Mixture, spacing: float, cut: float, way: Direction) -> _Law:
    low, high = _reach(mixture, cut)
    ends = _log_ratio(mixture, np.array([low, high]))[0]
    first, last = math.floor(float(ends[0]) / spacing), max(math.ceil(float(ends[1]) / spacing), 1)
    losses = np.asarray(spacing * np.arange(first, last + 1), np.float64)
    edges = _outputs(mixture, losses[1:-1], cut)
    edges = np.concatenate(([low], edges, [high]))
    p = np.zeros(len(losses) - 1)
    for shift, weight in zip(mixture.shifts, mixture.weights, strict=True):
        p += weight * _between(edges - shift)
    q = _between(edges)
    shifts = np.asarray(mixture.shifts)
    if way == "remove":
        law = _onto_nodes(p, q, losses[:-1], spacing)
        law[0] += float(np.dot(mixture.weights, ndtr(low - shifts)))
        return _Law(first, law, float(np.dot(mixture.weights, ndtr(shifts - high))))
    law = _onto_nodes(q[::-1], p[::-1], -losses[:0:-1], spacing)
    law[0] += float(ndtr(-high))
    return _Law(-last, law, float(ndtr(low)))


def _between(edges: Array) -> Array:
    """Standard normal mass between neighbouring edges, without cancellation in either tail."""
    below, above = ndtr(edges), ndtr(-edges)
    return np.asarray(np.maximum(np.where(edges[1:] > 0.0, above[:-1] - above[1:], below[1:] - below[:-1]), 0.0))


def _onto_nodes(p: Array, q: Array, losses: Array, spacing: float) -> Array:
    """Masses at the nodes of cells that start at ``losses`` and have masses p and q = E_p[exp(-loss)]."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        share = -np.expm1(np.log(q / p) + losses) / -math.expm1(-spacing)
    share = np.clip(np.nan_to_num(share, nan=1.0, posinf=1.0, neginf=0.0), 0.0, 1.0)
    nodes = np.zeros(len(p) + 1)
    nodes[:-1] += p * (1.0 - share)
    nodes[1:] += p * share
    return nodes


def _response(epsilon: float, spacing: float) -> _Law:
    """Randomised response, whose losses are + and - epsilon."""
    place = math.floor(epsilon / spacing)
    truth = 1.0 / (1.0 + math.exp(-epsilon))
    masses = np.zeros(2 * place + 3)  # from -(place + 1) to place + 1
    masses[-2:] = _onto_nodes(np.array([truth]), np.array([1.0 - truth]), np.array([spacing * place]), spacing)
    lie = _onto_nodes(np.array([1.0 - truth]), np.array([truth]), np.array([-spacing * (place + 1)]), spacing)
    masses[:2] += lie
    return _Law(-(place + 1), masses, 0.0)


def _samples(mixture: Mixture, cut: float, way: Direction) -> tuple[Array, Array]:
    """Losses, ascending, and their log-masses by a coarse quadrature: to choose the window, not to bound."""
    x = np.linspace(*_reach(mixture, cut), 4001)
    losses = _log_ratio(mixture, x)[0]
    logs = -0.5 * x**2 + math.log((x[1] - x[0]) / math.sqrt(2.0 * math.pi))
    return (losses, logs + losses) if way == "remove" else (-losses[::-1], logs[::-1])


def _response_samples(epsilon: float) -> tuple[Array, Array]:
    return np.array([-epsilon, epsilon]), -np.logaddexp(0.0, np.array([epsilon, -epsilon]))


def _window(samples: Sequence[tuple[tuple[Array, Array], int]], delta: float) -> _Window:
    """The tilt with the best Chernoff bound on delta, and the reach beyond which little of the tilted law lies."""

    def moments(tilts: Array) -> Array:
        return np.asarray(
            sum(count * logsumexp(logs + tilts[:, None] * losses, axis=1) for (losses, logs), count in samples)
        )

    largest = sum(count * float(losses[-1]) for (losses, _), count in samples)
    tilts = np.geomspace(1e-3, max(_MOST_TILTED / max(largest, 1e-300), 1e5), 190)
    bounds = (moments(tilts) - math.log(delta)) / tilts
    tilt, aim = float(tilts[np.argmin(bounds)]), float(np.min(bounds))
    mean, variance = 0.0, 0.0
    for (losses, logs), count in samples:
        weights = np.exp(logs + tilt * losses - logsumexp(logs + tilt * losses))
        each = float(weights @ losses)
        mean += count * each
        variance += count * float(weights @ (losses - each) ** 2)
    steps = np.geomspace(0.03, 30.0, 50) / max(math.sqrt(variance), 1e-6 * largest, 1e-300)
    here, allowed = float(moments(np.array([tilt]))[0]), -math.log(_OUTSIDE)
    above = float(np.min((moments(tilt + steps) - here + allowed) / steps)) - mean
    below = float(np.min((moments(tilt - steps) - here + allowed) / steps)) + mean
    return _Window(tilt, aim, mean, below, above)
