"""The sum of many independent likelihood ratios on grids of blocks, each of even points.

A grid has a centre. Up to a distance of 2 ``half`` units from it on either side, points are a unit apart. In each block
that follows, up to twice the distance, they are twice as far apart. So points are fine where the mass is, and follow a
heavy tail far up. Sums of even points are even, so a sum of two laws is a few dozen products of short tables, in a
tenth of the time of the pairs in `dpsweep.accounting.pld.allocation`. All terms are positive: masses are rounded by a
few ulps of themselves, in a tail, too.

Bounds in convex order are made as everywhere. From above, mass between two points is moved onto both so that its mean
stays. Mass above the last point is moved onto it; what that takes off the mean is mass of P at infinite loss. From
below, the same two shares stay where they are. All shares near a point are merged into their mean, which is then pooled
with mass of a neighbour so that the pool's mean is the point. A mean above its point takes mass from the cell below;
then a mean below its point takes mass on the points above. A cell whose neighbours have too little is merged into the
next one, or dropped. All of these are merges or leave mass out, so they lower every convex function that is positive.

Let A_j be the masses at points of block j of one law, and N_j those at all nearer points. Then the sum of two laws A
and B is the union over j of A_j * B_j, A_j * N_j(B) and N_j(A) * B_j. In the last two, N_j is first moved onto points
that are as far apart; from below its shares stay there. No close numbers are subtracted, so there is no tilt.

A grid begins at 0. Where no ratio below `_NEAR_ONE` has any probability to speak of, it begins at the least such ratio,
times the terms of a sum. Smaller values of one ratio, of probability p, are left out. That they occur in t terms has a
probability of at most t p under Q. Under P, too: one ratio in t is weighted, and its mean over small values is at most
p. From above, t p counts as infinite loss in both directions.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import special

from dpsweep.accounting.pld.allocation_transform import cell_masses
from dpsweep.accounting.pld.loss import Bound
from dpsweep.accounting.pld.sensitivity import Array

_HALF: Final = 176
"""Half the points of the finest block on either side. The width of the bounds falls with its square."""
_LIGHT: Final = 0.33
_STRONG: Final = 1.5
_MORE: Final = 248
_FEWER: Final = 140
"""The same for shifts up to `_LIGHT`, which need few blocks, and above `_STRONG`, whose laws take long."""
_SPREAD: Final = 0.7
"""Least distance that the finest block reaches, over the distance of two quantiles of a law."""
_ASIDE: Final = 20.0
"""Largest distance of a centre from a law's middle, over the distance that the finest block reaches at least."""
_NEAR_ONE: Final = 0.6
"""Least ratio of any probability to speak of above which grids begin at such ratios, not at 0.

They can have their centre anywhere, and so in the middle of a narrow law.
"""
_FARTHEST: Final = 16.0
"""Least distance that a grid of a sum reaches, in the same unit."""
_QUANTILES: Final = (0.16, 0.84)
_PARTS: Final = 4
"""Cells between two points of a grid by which the law of one ratio is placed on it."""
_MOST_LEVELS: Final = 120
"""Most blocks on either side. Far out, positions are rounded by a few ulps of themselves."""


@dataclass(frozen=True)
class Atoms:
    """Positive masses at ascending values.

    lost: what has been taken off the mean, for a bound from above. left_out: probability that a ratio is too small.
    """

    values: Array
    masses: Array
    lost: float
    left_out: float


@functools.cache
def _one_side(half: int) -> Array:
    """Return the distances of all points on one side of a centre, in units."""
    at = np.arange((_MOST_LEVELS + 2) * half + 1)
    levels = np.maximum((at - half - 1) // half, 0)
    return np.asarray((at - levels * half) * 2.0**levels, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class _Grid:
    """Points at ``unit`` times whole numbers: ``below`` of them below the one at ``centre`` units.

    half: of the points of the finest block on either side.
    """

    half: int
    unit: float
    centre: int
    below: int
    above: int

    @functools.cached_property
    def distances(self) -> Array:
        """[points]: of the points from the centre, in units."""
        side = _one_side(self.half)
        return np.concatenate((-side[self.below : 0 : -1], side[: self.above + 1]))

    @functools.cached_property
    def points(self) -> Array:
        """[points]: their values, from 0 on, or from above it where ratios are near 1."""
        return np.asarray((self.centre + self.distances) * self.unit, dtype=np.float64)

    @property
    def farthest(self) -> float:
        """Distance of the last point from the centre."""
        return float(self.distances[-1]) * self.unit

    @property
    def levels(self) -> int:
        """Number of blocks on the longer side."""
        return 1 + max(0, -(-(max(self.above, self.below) - 2 * self.half) // self.half))


@dataclass(frozen=True, eq=False)
class _Law:
    """The law of a sum of ``terms`` ratios: ``masses`` [points] on a grid; lost: what was taken off the mean."""

    grid: _Grid
    masses: Array
    terms: int
    lost: float

    @functools.cached_property
    def quantiles(self) -> tuple[float, float]:
        """About the values of `_QUANTILES` of the mass; no bound rests on them."""
        totals = np.cumsum(self.masses)
        low, high = np.searchsorted(totals, np.array(_QUANTILES) * totals[-1]).tolist()
        return float(self.grid.points[low]), float(self.grid.points[high])


def sum_of_ratios(shift: float, steps: int, tail: float, bound: Bound) -> Atoms | None:
    """Return the law of the sum of ``steps`` ratios of Gaussians at distance ``shift``; None for too many blocks.

    tail: about the probability of an infinite loss that one ratio may add.
    """
    power, terms, whole = _ratio(shift, tail, bound), 1, None
    first = 0.0 if power is None else float(power.grid.points[0])
    while power is not None:
        if steps & terms:
            whole = power if whole is None else _added(whole, power, bound)
            if whole is None:
                return None
            if whole.terms == steps:
                kept = whole.masses > 0.0
                left_out = min(steps * float(special.ndtr(_place_of(first, shift))), 1.0) if first > 0.0 else 0.0
                return Atoms(whole.grid.points[kept], whole.masses[kept], whole.lost, left_out)
        power, terms = _added(power, power, bound), 2 * terms
    return None


def _ratio(shift: float, tail: float, bound: Bound) -> _Law | None:
    """Return the law of one ratio exp(shift z - shift^2 / 2), z ~ N(0, 1), by masses and means of small cells."""
    split = _split(shift, tail)
    if split is None:
        return None
    grid, edges, masses, sums = split
    if bound == "lower":
        kept = masses > 0.0
        masses = masses[kept]
        return _placed(np.clip(sums[kept] / masses, edges[:-1][kept], edges[1:][kept]), masses, grid, 1, 0.0, bound)
    raised = np.clip((sums - masses * edges[:-1]) / np.diff(edges), 0.0, masses)
    last = _place_of(float(edges[-1]), shift)
    above = np.array([special.ndtr(-last)])
    placed = np.concatenate((masses - raised, above)) + np.concatenate((np.zeros(1), raised))
    return _placed(edges, placed, grid, 1, float(special.ndtr(shift - last)), bound)


def _place_of(ratio: float, shift: float) -> float:
    """Return the output at which the ratio has this value."""
    return math.log(ratio) / shift + shift / 2


@functools.lru_cache(maxsize=4)  # both bounds ask for them
def _split(shift: float, tail: float) -> tuple[_Grid, Array, Array, Array] | None:
    """Return a grid for one ratio, edges [cells + 1] of cells between its points, and the masses and sums of these."""
    reach = -float(special.ndtri(max(tail, 1e-300)))
    ratios = (math.exp(shift * z - shift**2 / 2) for z in (-reach, -1.0, 1.0, reach + shift))
    least, low, high, top = ratios
    half = _MORE if shift <= _LIGHT else _HALF if shift <= _STRONG else _FEWER
    lowest = least if least > _NEAR_ONE else 0.0
    grid = _grid(half, 0.5 * (low + high), _SPREAD * (high - low), 2.0 * top, lowest)
    if grid is None:
        return None
    parts = grid.points[:-1, None] + np.diff(grid.points)[:, None] * np.arange(_PARTS) / _PARTS
    edges = np.append(parts.ravel(), grid.points[-1])
    masses, sums, _ = cell_masses(shift, edges)
    return grid, edges, masses, sums


def _grid(half: int, middle: float, reach: float, farthest: float, lowest: float) -> _Grid | None:
    """Return a grid from ``lowest`` to about ``farthest`` above ``middle``, finest within ``reach`` of that, or None.

    From 0 on, points are whole multiples of their distance, so the centre is where that divides it.
    """
    size = 2 * half
    if not reach > 0.0:
        return None
    unit = 2.0 ** math.ceil(math.log2(reach / size))
    highest = max(0, math.ceil(math.log2(max(farthest / unit, 1.0) / size)))
    above = size + highest * half
    if lowest > 0.0:
        centre = round(middle / unit)
        depth = centre - lowest / unit
        level = max(0, math.ceil(math.log2(max(depth, 1.0) / size)))
        return _Grid(half, unit, centre, level * half + math.ceil(depth / 2**level), above)
    level = max(0, math.ceil(math.log2(max(middle / unit, 1.0) / size)))
    centre = max(1, round(middle / unit / 2**level)) * 2**level
    if max(level, highest) > _MOST_LEVELS or centre > size * 2**level or abs(centre * unit - middle) > _ASIDE * reach:
        return None
    return _Grid(half, unit, centre, centre // 2**level + level * half, above)


def _placed(values: Array, weights: Array, grid: _Grid, terms: int, lost: float, bound: Bound) -> _Law:
    """Return the law of ``weights`` at ``values`` on a grid."""
    from dpsweep.accounting.pld.block_kernels import place  # loads numba and compiled code, which takes half a second

    masses, offsets, beyond = _nothing(grid)
    place(values / grid.unit - grid.centre, weights, grid.half, grid.below, masses, offsets, beyond)
    return _finished(grid, masses, offsets, beyond, terms, lost, bound)


def _nothing(grid: _Grid) -> tuple[Array, Array, Array]:
    masses, offsets = np.zeros((2, grid.below + grid.above + 1))
    return masses, offsets, np.zeros(2)


def _finished(grid: _Grid, masses: Array, offsets: Array, beyond: Array, terms: int, lost: float, bound: Bound) -> _Law:
    """Return the law of masses that a kernel has placed, bounded from one side."""
    from dpsweep.accounting.pld.block_kernels import pool

    if bound == "lower":
        pool(masses, offsets, np.diff(grid.distances), rises=False)
        return _Law(grid, masses, terms, 0.0)
    masses[-1] += beyond[0]
    more = max(0.0, float(beyond[1] - beyond[0] * grid.distances[-1])) * grid.unit
    return _Law(grid, masses, terms, lost + more)


def _added(one: _Law, other: _Law, bound: Bound) -> _Law | None:
    """Return the law of the sum of two independent sums."""
    from dpsweep.accounting.pld.block_kernels import add_blocks, add_to_itself, place_sums

    if one.grid.unit != other.grid.unit:
        finer, other = sorted((one, other), key=lambda law: law.grid.unit)
        coarser = _in_units(finer, other.grid.unit, bound)
        if coarser is None:
            return None
        one = coarser
    (low, high), (lows, highs) = one.quantiles, other.quantiles
    width = math.hypot(high - low, highs - lows)
    farthest = max(one.grid.farthest, other.grid.farthest, _FARTHEST * width)
    half = one.grid.half
    lowest = float(one.grid.points[0] + other.grid.points[0])
    grid = _grid(half, 0.5 * (low + high + lows + highs), _SPREAD * width, farthest, lowest)
    if grid is None:
        return None
    sums = np.zeros((max(one.grid.levels, other.grid.levels), 8 * half + 8))
    moved = np.zeros(sums.shape if bound == "lower" else (0, 0))
    if one is other:
        add_to_itself(one.masses, one.grid.below, half, sums, moved)
    else:
        add_blocks(one.masses, one.grid.below, other.masses, other.grid.below, half, sums, moved)
    unit = one.grid.unit / grid.unit
    centre = (one.grid.centre + other.grid.centre) * unit - grid.centre
    masses, offsets, beyond = _nothing(grid)
    place_sums(sums, moved, centre, unit, half, grid.below, masses, offsets, beyond)
    return _finished(grid, masses, offsets, beyond, one.terms + other.terms, one.lost + other.lost, bound)


def _in_units(law: _Law, unit: float, bound: Bound) -> _Law | None:
    """Return the law on a grid of a larger unit."""
    reach, lowest = 2 * law.grid.half * unit, float(law.grid.points[0])
    grid = _grid(law.grid.half, 0.5 * sum(law.quantiles), reach, law.grid.farthest, lowest)
    return None if grid is None else _placed(law.grid.points, law.masses, grid, law.terms, law.lost, bound)
