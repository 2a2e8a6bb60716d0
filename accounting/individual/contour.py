"""Moments E_Q[(P/Q)^z] of the sampled Gaussian mechanism along a vertical line in the complex plane, with error bounds.

Notation: x is standard normal, u = s^2 the effective precision, M = exp(s x - u/2), G = 1 - q + q M the likelihood
ratio P/Q, p = q M / G in [0, 1]; A_z(u) = E[G^z]. See `dpsweep.accounting.individual.exact_composition` for the use of
the moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dpsweep.accounting.individual.contributions import StepLaw
from dpsweep.accounting.individual.spectrum_kernels import write_moments
from dpsweep.accounting.pld import Direction

Array = NDArray[np.float64]
Complex = NDArray[np.complex128]
Point = TypeVar("Point", float, Complex)

_LOG_PRECISION = 40.0
"""Truncation and discretisation errors of integrals over x are below exp(-40) = 4e-18 times A at the real point."""

UNKNOWN = 1e6
"""Error assigned to log A where it could not be computed; it makes every bound that uses it vacuous."""

_BLOCK_ENTRIES = 1 << 15
"""Largest number of entries (nodes times grid points) in memory at once."""

_MOST_ENTRIES = 1 << 21
"""Largest number of entries of nodes on one long grid. Little noise asks for more and has no table entries: Renyi DP,
nearly tight at its large epsilons, bounds the examples that reach these nodes."""

_LONG = 1 << 13
"""Points of a grid up to which it may have any number of entries; ordinary noise needs fewer."""

_LEVELS = 40
"""Number of grids, each for sqrt(u) up to half of that of the one before; the last one is for all that is below."""

_SINC_LATER = 0.21724
"""The largest |sin(y)/y| for y >= pi."""


def exponent_of(direction: Direction, z: Point) -> Point:
    """Return the exponent of P / Q whose mean under Q is E[exp((z - 1) loss)]."""
    return z if direction is Direction.REMOVE else 1.0 - z


@dataclass(frozen=True)
class Contour:
    """The points tilt + i k spacing, k = 0 .. size - 1, with tilt > 1."""

    tilt: float
    spacing: float
    size: int

    @property
    def frequencies(self) -> Array:
        """Imaginary parts of the points; shape [points]."""
        return np.asarray(self.spacing * np.arange(self.size), np.float64)

    @property
    def points(self) -> Complex:
        """The complex points; shape [points]."""
        return np.asarray(self.tilt + 1j * self.frequencies, np.complex128)

    @property
    def end(self) -> float:
        """The first frequency beyond the contour."""
        return self.spacing * self.size


@dataclass(frozen=True)
class MomentTable:
    """log A at each node and point of a contour, on the branch that is real at the first point; [nodes, points]. The
    errors [nodes, points] bound the distance of log A from its chord in u, over the two cells beside a node. Where log
    A could not be computed, it is 0 and its error is `UNKNOWN`.
    """

    log_moments: Complex
    errors: Array


def moment_table(law: StepLaw, precisions: Array, contour: Contour, direction: Direction) -> MomentTable:
    """Tabulate log A at nodes ``precisions`` [nodes], ascending, for one law and direction.

    For a law that does not always take place it is log(1 + chance (A - 1)), whose derivatives are the derivatives of
    chance A over that number.
    """
    sample_rate, chance = law
    exponents, roots = exponent_of(direction, contour.points), np.sqrt(precisions)
    found = np.full((len(roots), contour.size), np.nan, np.complex128)
    powers = np.full((3, len(roots)), np.nan)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for at, tilted, log_ratio, members in _tilted(sample_rate, roots, exponents):
            found[at] = _moments(tilted, log_ratio, exponents)
            powers[:, at] = [(tilted * members**k).sum(axis=1) for k in (2, 3, 4)]
        suprema = chance * _cell_suprema(sample_rate, precisions, exponents[0].real, powers)
        found = found if chance == 1.0 else 1.0 + chance * (found - 1.0)
        errors = _linearity_errors(np.diff(precisions), exponents, np.abs(found), suprema)
        log_moments = np.log(np.abs(found)) + 1j * np.unwrap(np.angle(found), axis=1)
    known = np.isfinite(log_moments) & (errors < UNKNOWN)
    return MomentTable(np.where(known, log_moments, 0.0), np.where(known, errors, UNKNOWN))


def _tilted(sample_rate: float, roots: Array, exponents: Complex) -> Iterator[tuple[slice, Array, Array, Array]]:
    """Yield for a few nodes at a time: their slice; G^(Re z) times the grid's weights, log G and p, all [nodes, grid].

    Nodes whose grid would be too long are left out (`_grids`).
    """
    for level, widest in _grids(sample_rate, roots, exponents):
        block = max(1, int(_BLOCK_ENTRIES / _grid_size(sample_rate, exponents, widest)))
        for start in range(level.start, level.stop, block):
            at = slice(start, min(start + block, level.stop))
            log_ratio, members, log_density = _integration_grid(sample_rate, roots[at], exponents, widest)
            yield at, np.exp(exponents[0].real * log_ratio + log_density), log_ratio, members


def _grids(sample_rate: float, roots: Array, exponents: Complex) -> Iterator[tuple[slice, float]]:
    """Yield the nodes that share a grid, and the largest sqrt(u) for which the grid is accurate.

    roots [nodes]: ascending; the two largest are never left out (`spreading.near_reached`) and tell how many nodes the
    grid would serve. So a node's grid depends on its own sqrt(u) and on these two only.
    """
    widest, spacing = float(roots[-1]), float(roots[-1] - roots[-2])
    for level in range(_LEVELS):
        lowest = 0.5 * widest if level < _LEVELS - 1 else -1.0
        start, stop = np.searchsorted(roots, [lowest, widest], side="right").tolist()
        size = _grid_size(sample_rate, exponents, widest)
        few = size <= _LONG or size * max(1.0, (widest - lowest) / spacing) <= _MOST_ENTRIES
        if start < stop and few:
            yield slice(start, stop), widest
        widest *= 0.5


def _moments(tilted: Array, log_ratio: Array, exponents: Complex) -> Complex:
    """Return the sums [nodes, points] over the grid of ``tilted`` [nodes, grid] times exp(i (Im z) log G), for each
    exponent z.
    """
    angles = (exponents[1] - exponents[0]).imag * log_ratio
    real, imaginary = np.empty((2, len(tilted), len(exponents)))
    write_moments(tilted, np.cos(angles), np.sin(angles), real, imaginary)
    return np.asarray(real + 1j * imaginary)


def _integration_grid(
    sample_rate: float, roots: Array, exponents: Complex, widest: float
) -> tuple[Array, Array, Array]:
    """Return log G [nodes, grid], p [nodes, grid] and the log weight of each grid point under the normal law [grid]."""
    low, high, step = _grid(sample_rate, exponents, widest)
    x = np.arange(low, high, step)
    log_ratio, members = _ratio(sample_rate, roots[:, None] * x - 0.5 * np.square(roots)[:, None])
    return log_ratio, members, np.log(step) - 0.5 * np.log(2.0 * np.pi) - 0.5 * x**2


def _grid_size(sample_rate: float, exponents: Complex, widest: float) -> float:
    low, high, step = _grid(sample_rate, exponents, widest)
    return (high - low) / step


def _grid(sample_rate: float, exponents: Complex, widest: float) -> tuple[float, float, float]:
    """Return the ends and the step of the grid over x.

    It is accurate for every sqrt(u) up to ``widest``. G^z is analytic for |Im x| <= d with s d <= pi/2. There
    |G^z| <= G^Re(z) e^(|Im z| s d), times sec(s d / 2)^|Re z| when Re z < 0, and the normal density grows by e^(d^2/2).
    So the trapezoidal rule with step h errs by less than 2 exp(growth - 2 pi d / h). Left of the grid G^z is at most
    max(1, (1-q)^Re z). Right of it, for a = Re z > 0, G^a <= 2^a max(1, q^a M^a). Times the normal density, q^a M^a is
    centred at a s and integrates to at most A_a.
    """
    real, top = exponents[0].real, float(np.abs(exponents.imag).max())
    left = np.sqrt(2.0 * (_LOG_PRECISION - min(real, 0.0) * -np.log1p(-sample_rate)))
    right = max(real, 0.0) * widest + np.sqrt(2.0 * (_LOG_PRECISION + max(real, 0.0) * np.log(2.0)))
    strip = min(0.5 * np.pi / max(widest, 1e-300), 6.0)
    growth = 0.5 * strip**2 + top * widest * strip - min(real, 0.0) * -np.log(np.cos(0.5 * widest * strip))
    step = 2.0 * np.pi * strip / (growth + _LOG_PRECISION)
    return float(-left), float(right + step), float(step)


def _ratio(sample_rate: float, log_m: Array) -> tuple[Array, Array]:
    """Return log G and p where log M is ``log_m``, without cancellation for M near 1 or overflow for large M."""
    excess = sample_rate * np.expm1(np.minimum(log_m, 30.0))
    log_ratio = np.where(
        log_m <= 30.0, np.log1p(excess), np.logaddexp(np.log1p(-sample_rate), np.log(sample_rate) + log_m)
    )
    return log_ratio, np.exp(np.minimum(np.log(sample_rate) + log_m - log_ratio, 0.0))


def _cell_suprema(sample_rate: float, precisions: Array, exponent: float, powers: Array) -> Array:
    """Return the upper bounds [3, cells] of E[p^k G^e], k = 2, 3, 4, over each cell of u, for real e outside [0, 1].

    For e > 1, x -> x^k (1 - q + q x)^(e-k) is convex, so h_k(u) = E[p^k G^e] grows with u. For e < 0, by Ito's formula
    and dropping a negative term, h_k' <= k(k-1)/2 h_k + (k-e)(k-e+1)/2 h_(k+2). There h_(k+2) is at most h_k, because
    p <= 1, and, because G >= 1-q, at most q^(k+2) e^((k+2)(k+1)u/2) (1-q)^(e-k-2). Integrating the inequality over the
    cell with either of the two gives a bound; the smaller one is returned.
    """
    if exponent > 1.0:
        return powers[:, 1:]
    k, width = np.array([[2.0], [3.0], [4.0]]), np.diff(precisions)
    own, next_but_one = 0.5 * k * (k - 1.0), 0.5 * (k - exponent) * (k - exponent + 1.0)
    beyond = (
        (k + 2.0) * np.log(sample_rate)
        + 0.5 * (k + 2.0) * (k + 1.0) * precisions[1:]
        + (exponent - k - 2.0) * np.log1p(-sample_rate)
    )
    first = powers[:, :-1] * np.exp((own + next_but_one) * width)
    second = (powers[:, :-1] + next_but_one * np.exp(beyond) * width) * np.exp(own * width)
    return np.asarray(np.minimum.accumulate(np.fmin(first, second), axis=0))


def _linearity_errors(widths: Array, exponents: Complex, moduli: Array, suprema: Array) -> Array:
    """Return the bound on |log A - chord| beside each node: width^2/8 times the largest |(log A)''| of the cell.

    A' = z(z-1)/2 E[p^2 G^z]; A'' = z(z-1)/4 E[(2 p^2 + 4(z-2) p^3 + (z-2)(z-3) p^4) G^z]; (log A)'' = A''/A - (A'/A)^2.
    """
    z, width = exponents[None, :], widths[:, None]
    second, third, fourth = suprema[:, :, None]
    slope = 0.5 * np.abs(z * (z - 1.0)) * second
    bend = 2.0 * second + 4.0 * np.abs(z - 2.0) * third + np.abs((z - 2.0) * (z - 3.0)) * fourth
    floor = moduli[:-1] - width * slope
    curvature = 0.25 * np.abs(z * (z - 1.0)) * bend / floor + np.square(slope / floor)
    cells = np.where(floor > 0.0, 0.125 * width**2 * curvature, np.inf)
    return beside_nodes(cells)


def beside_nodes(cells: Array) -> Array:
    """Return the larger value of the two cells beside each node; [nodes, ...] from [cells, ...]."""
    return np.asarray(np.maximum(np.pad(cells, ((1, 0), (0, 0))), np.pad(cells, ((0, 1), (0, 0)))))


@dataclass(frozen=True)
class DecayBound:
    """Proves |A_(e + i w)| <= A_e exp(-decay) for every |w| from some frequency on, in every cell of u.

    The density of the privacy loss under the tilted law G^e N(x) / A_e lies above a stack of uniform layers on nested
    intervals. A layer of mass m and length l lowers the modulus by m (1 - |sin(w l/2) / (w l/2)|).
    masses and lengths have shape [cells, layers].
    """

    masses: Array
    lengths: Array

    def node_decay(self, frequency: float) -> Array:
        """Return the decay for |w| >= ``frequency``, the smaller of the two cells beside each node; shape [nodes]."""
        y = np.clip(0.5 * frequency * self.lengths, 1e-12, np.pi)
        cells = (self.masses * np.maximum(1.0 - np.maximum(np.sin(y) / y, _SINC_LATER), 0.0)).sum(axis=1)
        return np.asarray(np.minimum(np.append(cells[:1], cells), np.append(cells, cells[-1:])))


def decay_bound(sample_rate: float, precisions: Array, exponent: float, layers: int = 128) -> DecayBound:
    """Return uniform layers below the loss's density for every u of a cell: each factor takes its worst value in the
    cell.
    """
    roots = np.sqrt(precisions)
    low, high = roots[:-1, None], roots[1:, None]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        x = np.linspace(-6.0, 6.0 + max(exponent, 0.0) * float(roots.max()), layers + 1)
        left, right = x[:-1], x[1:]
        least = np.minimum(low * left - 0.5 * low**2, high * left - 0.5 * high**2)
        most = np.maximum(low * right - 0.5 * low**2, high * right - 0.5 * high**2)
        most = np.where((right > low) & (right < high), 0.5 * right**2, most)
        (least_ratio, least_member), (most_ratio, most_member) = (_ratio(sample_rate, v) for v in (least, most))
        totals = np.full((len(roots), 1), np.nan)
        for at, tilted, _, _ in _tilted(sample_rate, roots, np.array([exponent + 0j])):
            totals[at] = tilted.sum(axis=1, keepdims=True)
        log_tilt = np.minimum(exponent * least_ratio, exponent * most_ratio) - np.log(totals[1:])
        log_normal = -0.5 * np.maximum(left**2, right**2) - 0.5 * np.log(2.0 * np.pi)
        heights = np.exp(log_tilt + log_normal) / (high * most_member)
        lengths = low * least_member * np.diff(x)
    heights = np.nan_to_num(_unimodal(heights), nan=0.0, posinf=0.0)
    order = np.argsort(-heights, axis=1)
    stacked = np.cumsum(np.take_along_axis(lengths, order, axis=1), axis=1)
    falling = np.take_along_axis(heights, order, axis=1)
    drops = falling - np.append(falling[:, 1:], np.zeros_like(falling[:, :1]), axis=1)
    return DecayBound(drops * stacked, stacked)


def _unimodal(heights: Array) -> Array:
    """Return the largest function below ``heights`` [cells, layers] that rises to the peak and then falls."""
    columns = np.arange(heights.shape[1])
    peak = heights.argmax(axis=1)[:, None]
    rising = np.where(columns <= peak, heights, np.inf)[:, ::-1]
    falling = np.where(columns >= peak, heights, np.inf)
    rising = np.minimum.accumulate(rising, axis=1)[:, ::-1]
    falling = np.minimum.accumulate(falling, axis=1)
    return np.asarray(np.where(columns <= peak, rising, falling))
