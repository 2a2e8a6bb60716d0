"""Random allocation: every example joins one of the t steps of an epoch, chosen uniformly and independently of others.

An epoch, or a block of one, is a round. The dominating pair is P = (1/t) sum_i N(e_i / sigma, I) and Q = N(0, I) in t
dimensions, under adding or removing one example (Chua et al., "Balls and bins", 2025; Feldman and Shenfeld, arXiv
2502.08202). Its likelihood ratio is M = mean of t independent Y_i = exp(x_i / sigma - 1 / (2 sigma^2)), x_i ~ N(0, 1)
under Q. So delta of removing = E_Q[(M - e^eps)+], delta of adding = E_Q[(1 - e^eps M)+].

Both are expectations of convex functions of M. So a law above M in convex order gives a pair that dominates, and one
below M in convex order a pair that is dominated. Sums of independent variables keep convex order:

- upper: mass between two points of a grid is moved onto them, so that its mean stays.
- lower: mass between two points is merged into its mean.

`dpsweep.accounting.pld.allocation_blocks` forms sums where the largest ratios are large, and
`dpsweep.accounting.pld.allocation_transform` where they fit on an even grid. Other laws, such as for means that may be
very small, are formed here by doubling, on grids that follow the law as it narrows. Mass above a grid is moved to its
end, and what that takes off the mean is mass of P at loss infinity; mass below is moved onto 0 and its end.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy import special

from dpsweep.accounting.pld.allocation_blocks import sum_of_ratios
from dpsweep.accounting.pld.allocation_transform import EvenLaw, law_of_mean, normal_masses
from dpsweep.accounting.pld.loss import Bound, Cells, Direction, LatticeLoss, connect_the_dots
from dpsweep.accounting.pld.sensitivity import AllocatedRound, Array

Places = npt.NDArray[np.int64]
_WIDTH: Final = 2.0
"""Distance from the middle up to which a grid is finest, in standard deviations of log M."""
_FAR: Final = 1.0
"""Points that are even in log M, over the others."""
ROUNDING: Final = 1e-8
"""Relative error of masses, far above that of sums of a million positive terms.

All are raised by it for a bound from above, and lowered for one from below.
"""
HEAVY: Final = 0.33
"""Shift above which grids of blocks take less time than one transform."""
_MANY: Final = 3000
"""Steps above which they do at any shift."""
_LONG: Final = 3e4
"""Steps over the shift above which they are narrower, as bounds on rounding of many small cells count."""
_ALL_BUT: Final = 3e-3
"""Largest shift over the root of the steps at which the law of the mean is all but lognormal."""
_KEPT: Final = 1.0 - 1e-6
"""Least mass of a bound from below on grids of blocks, which drop mass where they are too coarse for a shift."""
_LITTLE: Final = 100.0
"""Mass of Q that grids of blocks may lose, over the tail, where both directions are asked for."""
_DECADES: Final = 4
"""The mass that grids may lose is rounded down to a power of 10 whose exponent is a multiple of this, to reuse laws."""


@dataclass(frozen=True)
class Fineness:
    """Points of a grid, and cells and groups of atoms by which it is chosen.

    The width of the bounds falls with the square of the points, and the time of a sum grows with it.
    """

    points: int
    cells: int
    groups: int


FINE: Final = Fineness(3584, 3584, 160)
COARSE: Final = Fineness(256, 512, 48)
"""For choices on which no guarantee rests, and for bounds of many runs at once, looser by less than a hundredth."""


@dataclass(frozen=True)
class _Law:
    """Atoms of M under Q: ``values`` ascending from 0 or above, with ``masses``; both [atoms].

    lost: what grids have taken off the mean, for a bound from above.
    """

    values: Array
    masses: Array
    lost: float

    def grouped(self, groups: int) -> tuple[Array, Array, Array, Array]:
        """Return the lowest value of neighbouring atoms, their mean, the highest, and the mass; [about groups]."""
        size = len(self.values)
        starts = np.unique(np.concatenate(([0, min(1, size - 1)], np.linspace(0, size - 1, groups, dtype=np.int64))))
        masses = np.add.reduceat(self.masses, starts)
        sums = np.add.reduceat(self.masses * self.values, starts)
        lows, highs = self.values[starts], self.values[np.append(starts[1:], size) - 1]
        with np.errstate(invalid="ignore"):
            return lows, np.where(masses > 0.0, sums / masses, lows), highs, masses


@functools.lru_cache(maxsize=256)  # both directions, and all blocks of epochs, ask for the same laws
def _mean_law(shift: float, steps: int, tail: float, bound: Bound, fineness: Fineness) -> _Law:
    """Return the law of the mean of ``steps`` ratios of Gaussians at distance ``shift``, by doubling."""
    power, terms = _one(shift, tail / steps, bound, fineness), 1  # of a power of two terms
    whole, counted = None, 0
    while True:
        if steps & terms:
            whole = power if whole is None else _weighted(whole, counted, power, terms, tail / steps, bound, fineness)
            counted += terms
        if counted == steps:
            break
        power, terms = _weighted(power, terms, power, terms, tail / steps, bound, fineness), 2 * terms
    assert whole is not None
    return whole


def _one(shift: float, tail: float, bound: Bound, fineness: Fineness) -> _Law:
    """Return the law of one ratio Y = exp(shift z - shift^2 / 2), z ~ N(0, 1) under Q and N(shift, 1) under P."""
    reach = -float(special.ndtri(max(tail, 1e-300)))
    edges = np.linspace(-reach, reach + shift, fineness.points + 1)
    (masses, _), (means, _) = (normal_masses(np.concatenate(([-np.inf], edges - s, [np.inf]))) for s in (0.0, shift))
    grid = np.asarray(np.exp(shift * edges - shift**2 / 2), dtype=np.float64)
    return _placed(masses, means, grid, bound)


def _weighted(
    one: _Law, of_one: int, other: _Law, of_other: int, tail: float, bound: Bound, fineness: Fineness
) -> _Law:
    """Return the law of the mean of the two means, weighted by their numbers of terms."""
    from dpsweep.accounting.pld.allocation_kernels import (
        place_own_pairs,
        place_pairs,  # loads numba and compiled code, which takes half a second
    )

    share = of_one / (of_one + of_other)
    grid = _grid(one, share, other, tail, fineness)
    masses, sums = np.zeros((2, len(grid) + 1))
    if one is other:
        place_own_pairs(share * one.values, one.masses, grid, masses, sums)
    else:
        place_pairs(share * one.values, one.masses, (1.0 - share) * other.values, other.masses, grid, masses, sums)
    placed = _placed(masses, sums, grid, bound)
    return _Law(placed.values, placed.masses, placed.lost + share * one.lost + (1.0 - share) * other.lost)


def _grid(one: _Law, share: float, other: _Law, tail: float, fineness: Fineness) -> Array:
    """Return points of the mean, ascending, that leave about ``tail`` of Q below, and of P above.

    They are even in the coordinate asinh(u) + far u, with u = (log M - centre) / scale. It is fine where the mass is,
    and even in log M far away.
    """
    left, right, cells = one.grouped(fineness.groups), other.grouped(fineness.groups), fineness.cells
    lows, means, highs = (
        np.add.outer(share * ours, (1.0 - share) * theirs).ravel()
        for ours, theirs in zip(left[:3], right[:3], strict=True)
    )
    masses = np.multiply.outer(left[3], right[3]).ravel()
    low, high = math.log(float(lows[lows > 0.0].min(initial=highs[-1]))), math.log(float(highs[-1]))
    if high - low < 1e-12:
        return np.asarray(np.exp(np.array([low - 1e-9, high + 1e-9])), dtype=np.float64)
    edges = np.linspace(low, high, cells + 1)

    def by_cell(values: Array, weights: Array) -> Array:
        with np.errstate(divide="ignore"):
            places = (np.log(values) - low) * (cells / (high - low))
        return _sums(np.clip(places, 0, cells - 1).astype(np.int64), weights, cells)

    bottom = min(int(np.searchsorted(np.cumsum(by_cell(lows, masses)), tail)), cells - 1)
    above = np.cumsum(by_cell(highs, masses * highs)[::-1])
    top = cells - int(np.searchsorted(above, tail))
    middles, weights = 0.5 * (edges[1:] + edges[:-1]), by_cell(means, masses)
    centre = float(middles @ weights / weights.sum())
    spread = math.sqrt(float((middles - centre) ** 2 @ weights / weights.sum())) + edges[1] - edges[0]
    return _even(float(edges[bottom]), float(edges[max(top, bottom + 1)]), centre, _WIDTH * spread, fineness.points)


def _coordinate(u: Array, far: float) -> Array:
    return np.asarray(np.arcsinh(u) + far * u)


def _even(low: float, high: float, centre: float, scale: float, size: int) -> Array:
    """Return a grid of log M from ``low`` to ``high``."""
    ends = (np.array([low, high]) - centre) / scale
    far = _FAR * float(np.ptp(np.arcsinh(ends)) / np.ptp(ends))
    start, stop = _coordinate(ends, far)
    first, last = np.arcsinh(ends)
    fine = np.sinh(np.linspace(first, last, 16 * size + 1))
    points = np.exp(centre + scale * np.interp(np.linspace(start, stop, size + 1), _coordinate(fine, far), fine))
    return np.asarray(points, dtype=np.float64)


def _sums(places: Places, weights: Array, size: int) -> Array:
    """[size]: the sum of the weights at each place."""
    return np.bincount(places, weights, size).astype(np.float64)


def _placed(masses: Array, means: Array, grid: Array, bound: Bound) -> _Law:
    """Atoms for the mass below the grid, in its cells and above it; masses and sums of values are [len(grid) + 1]."""
    if bound == "lower":
        kept = masses > 0.0
        return _Law(means[kept] / masses[kept], masses[kept], 0.0)
    nodes = np.concatenate(([0.0], grid))
    widths = np.diff(nodes)
    raised = np.clip((means[:-1] - masses[:-1] * nodes[:-1]) / widths, 0.0, masses[:-1])
    placed = np.zeros(len(nodes))
    placed[1:] += raised
    placed[:-1] += masses[:-1] - raised
    placed[-1] += masses[-1]
    return _Law(nodes, placed, max(0.0, float(means[-1] - masses[-1] * grid[-1])))


def _even_law(
    allocated: AllocatedRound, direction: Direction, tail: float, bound: Bound, order: float, heavy: float
) -> EvenLaw | None:
    """Return the law of the mean on even points, or None where they are too many or too far apart."""
    if allocated.shift > heavy or allocated.steps > min(_MANY, _LONG * allocated.shift):
        found = _by_blocks(allocated.shift, allocated.steps, _rounded(tail), bound)
        if found is not None and (direction is Direction.REMOVE or found.lost_of_q <= tail):
            return found
    return law_of_mean(allocated.shift, allocated.steps, tail, bound, order)


@functools.lru_cache(maxsize=1024)  # both directions ask for the same laws
def _by_blocks(shift: float, steps: int, tail: float, bound: Bound) -> EvenLaw | None:
    """Return the law of the mean by `dpsweep.accounting.pld.allocation_blocks`, if that has a good one."""
    found = sum_of_ratios(shift, steps, tail / steps, bound)
    if found is None or (bound == "lower" and not float(found.masses.sum()) > _KEPT):
        return None
    law = _within(found.values / steps, found.masses, found.lost / steps, tail, bound)
    if bound == "upper":
        law = replace(law, lost_of_p=law.lost_of_p + found.left_out, lost_of_q=law.lost_of_q + found.left_out)
    return law


def _within(values: Array, masses: Array, lost: float, tail: float, bound: Bound) -> EvenLaw:
    """Return the law without ends that have about ``tail`` of Q below, and of P above.

    Left out from below. From above, mass is moved as it is on grids: below onto 0 and the first value kept, above onto
    the last.
    """
    positive = int(values[0] == 0.0)
    first = max(min(int(np.searchsorted(np.cumsum(masses), tail)), len(values) - 1), positive)
    beyond = np.cumsum((masses * values)[::-1])[::-1]
    last = max(int(np.searchsorted(-beyond, -tail)) - 1, first)
    kept = masses[first : last + 1].copy()
    if bound == "lower":
        return EvenLaw(values[first : last + 1], kept, 0.0, 0.0)
    few, many = float(masses[:first].sum()), float(masses[last + 1 :].sum())
    raised = min(float(values[:first] @ masses[:first] / values[first]), few)
    kept[0] += raised
    kept[-1] += many
    more = float(values[last + 1 :] @ masses[last + 1 :]) - many * float(values[last])
    return EvenLaw(values[first : last + 1], kept, lost + max(0.0, more), few - raised)


def quadrature(allocated: AllocatedRound, tail: float) -> tuple[Array, Array]:
    """Return losses log P/Q and logs of their masses under Q, for choices on which no guarantee rests.

    Where the mean of many ratios near 1 is all but lognormal, it counts as that.
    """
    if allocated.shift <= _ALL_BUT * math.sqrt(allocated.steps):
        width = math.sqrt(math.log1p(math.expm1(allocated.shift**2) / allocated.steps))
        reach = -float(special.ndtri(max(tail, 1e-300)))
        outputs = np.linspace(-reach, reach + width, COARSE.points)
        spacing = (outputs[1] - outputs[0]) / math.sqrt(2.0 * math.pi)
        return width * outputs - width**2 / 2.0, math.log(spacing) - outputs**2 / 2.0
    law = _mean_law(allocated.shift, allocated.steps, _rounded(tail), "upper", COARSE)
    kept = (law.values > 0.0) & (law.masses > 0.0)
    return np.log(law.values[kept]), np.log(law.masses[kept])


def _rounded(tail: float) -> float:
    return float(10.0 ** max(_DECADES * math.floor(math.log10(tail) / _DECADES), -300))


def law_of_block(
    allocated: AllocatedRound,
    direction: Direction,
    tail: float,
    bound: Bound,
    tilt: float,
    *,
    heavy: float,
    instead: Fineness = FINE,
) -> EvenLaw:
    """Return the law of the mean of a block, bounded from one side for one direction.

    tilt: of the composition; the law is most precise relative to its moment there. instead: the grid of a law that is
    formed by doubling, as the other ways do not lead to one. heavy: the shift above which grids of blocks are tried
    first; they are narrower, and take more time.
    """
    even = _even_law(allocated, direction, tail, bound, direction.power(tilt), heavy)
    return by_doubling(allocated, tail, bound, instead) if even is None else even


def by_doubling(allocated: AllocatedRound, tail: float, bound: Bound, fineness: Fineness) -> EvenLaw:
    """Return the law of the mean of a block by doubling, for both directions."""
    law = _mean_law(allocated.shift, allocated.steps, _rounded(tail), bound, fineness)
    kept = (law.values > 0.0) & (law.masses > 0.0)
    return EvenLaw(law.values[kept], law.masses[kept], law.lost, float(law.masses[law.values == 0.0].sum()))


def on_lattice(law: EvenLaw, spacing: float, direction: Direction, bound: Bound) -> LatticeLoss:
    """Return the law of the loss on whole multiples of ``spacing``; law: bounded from the same side."""
    losses, first, second, above = losses_of(law, direction)
    if bound == "lower":
        return lowered(losses, (1.0 - ROUNDING) * first, spacing)
    return connect_the_dots(
        _cells_of(losses, (1.0 + ROUNDING) * first, (1.0 + ROUNDING) * second, above, spacing), spacing
    )


def losses_of(law: EvenLaw, direction: Direction) -> tuple[Array, Array, Array, float]:
    """Return losses, ascending, masses under the first and the second measure of the pair, and the mass of the first
    one at an infinite loss.
    """
    losses, of_p = np.asarray(np.log(law.values), dtype=np.float64), law.masses * law.values
    if direction is Direction.REMOVE:
        return losses, of_p, law.masses, law.lost_of_p
    return -losses[::-1], law.masses[::-1], of_p[::-1], law.lost_of_q


def _cells_of(losses: Array, first: Array, second: Array, above: float, spacing: float) -> Cells:
    """Return masses between whole multiples of ``spacing``, under both measures of the pair."""
    places = np.floor(losses / spacing).astype(np.int64)
    start = int(places.min())
    size = int(places.max()) - start + 1
    numerator = _sums(places - start, first, size)
    denominator = np.exp((start + np.arange(size)) * spacing) * _sums(places - start, second, size)
    return Cells(
        start=start,
        numerator=numerator,
        denominator=np.clip(denominator, numerator * math.exp(-spacing), numerator),
        above=above,
        below=0.0,
        rounding=np.zeros(size),
    )


def lowered(losses: Array, masses: Array, spacing: float) -> LatticeLoss:
    """Return a law below that of ``masses`` at ascending ``losses``, on whole multiples of ``spacing``.

    Each mass joins the nearest point, and is merged there. Points that have any are then pooled with the next ones that
    have some, in terms of exp(-loss) under the first measure, so that all means lie on them. A mean above its loss's
    value takes mass from below, and a mean below it mass from above. Mass that finds no partner is merged with its
    neighbour, as far as mass below can pool it. The rest has its loss lowered. Hockey sticks are convex in exp(-loss)
    and fall, so all of this lowers them.
    """
    from dpsweep.accounting.pld.block_kernels import pool  # loads numba and compiled code

    places = np.rint(losses / spacing).astype(np.int64)
    start = int(places[0]) - 1
    size = int(places[-1]) - start + 1
    kept = masses > 0.0
    losses, masses, places = losses[kept], masses[kept], places[kept]
    if places[0] == 0:  # the point of most mass of a narrow law, which otherwise would have no partner for its rounding
        places[losses < 0.0] = -1
    starts = np.flatnonzero(np.diff(places, prepend=places[0] - 1))
    points = np.append(places[0] - 1, places[starts])
    sizes = np.exp((points[-1] - points) * spacing)
    moved = masses * np.expm1(places * spacing - losses)
    found = np.append(0.0, np.add.reduceat(masses, starts))[::-1].copy()
    offsets = (np.append(0.0, np.add.reduceat(moved, starts)) * sizes)[::-1].copy()
    pool(found, offsets, np.diff(sizes[::-1]), rises=True)
    on_points, rounding = np.zeros((2, size))
    on_points[points - start] = found[::-1]
    return LatticeLoss(spacing, start, on_points, 0.0, rounding)


def mean_from_above(allocated: AllocatedRound, tail: float) -> EvenLaw:
    """Return a law of the mean that is above it, for both directions, whatever the order of the moments asked for."""
    found = _by_blocks(allocated.shift, allocated.steps, _rounded(tail), "upper")
    if found is not None and found.lost_of_q <= _LITTLE * tail:
        return found
    return by_doubling(allocated, tail, "upper", FINE)


def mean_from_below(allocated: AllocatedRound, tail: float) -> EvenLaw:
    """Return a law of the mean that is below it, for both directions, without about ``tail`` at either end."""
    found = _by_blocks(allocated.shift, allocated.steps, _rounded(tail), "lower")
    return by_doubling(allocated, tail, "lower", FINE) if found is None else found
