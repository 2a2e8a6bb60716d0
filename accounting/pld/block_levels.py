"""Laws of blocks of random allocation at many noise levels, from those at few: bounds from above and from below.

Guarantee: under Q, the expectation F of any convex function of a block's likelihood ratio is convex in the coordinate
of `dpsweep.accounting.pld.levels`. So between two nodes F is at most its chord: a public draw between the nodes, made
of laws from above, dominates the block. And F is at least the chord of the next two nodes on one side, extended. That
is a law from below at the nearer one, times 1 + s, less s times one from above at the farther one. `beyond` makes a law
of that whose masses are positive (docs/accounting-proofs.md, "Many noise levels"). The choice of nodes decides how
close a bound is, not whether it holds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from dpsweep.accounting.pld.allocation import ROUNDING, losses_of, lowered
from dpsweep.accounting.pld.allocation_transform import EvenLaw
from dpsweep.accounting.pld.levels import MARGIN, coordinate
from dpsweep.accounting.pld.loss import Direction, LatticeLoss
from dpsweep.accounting.pld.saddlepoint import Cumulants
from dpsweep.accounting.pld.sensitivity import AllocatedRound, Array

_FEWEST: Final = 48
"""Fewer levels have no nodes."""
_ALLOWED: Final = 8e-5
"""Share by which a chord may increase the log of a moment, in the middle of a cell: of it and of their mean."""
_LARGE: Final = 1.5
"""Shift above which laws take long, and their own bounds are narrow, so that chords are allowed twice as much."""
_WIDEST: Final = 0.06
"""Width of a cell in the log of the shift, before it is halved."""
_HALVINGS: Final = 7
_DEGREE: Final = 5
"""Of the polynomial that logs of moments are read from, between a few of them."""
_SPARE: Final = 6
"""Nodes that a run of cells has beside one for each cell, and a few to be worth it."""
_STEP: Final = 2.0**-7
"""Of logs of shifts, for slopes of moments."""


@dataclass(frozen=True)
class Extended:
    """``nearer``, moved by ``share`` times its distance from ``farther``, away from that."""

    nearer: AllocatedRound
    farther: AllocatedRound
    share: float


@dataclass(frozen=True)
class Level:
    """A block between nodes.

    The public draw of ``stronger`` with the probability ``share``, else ``weaker``, dominates it. It dominates each of
    ``below``; the first is the closest.
    """

    weaker: AllocatedRound
    stronger: AllocatedRound
    share: float
    below: tuple[Extended, Extended]

    @property
    def nodes(self) -> tuple[AllocatedRound, ...]:
        """The nodes that laws are needed of."""
        return self.weaker, self.stronger, *(each.farther for each in self.below)


def between_nodes(
    blocks: Iterable[tuple[AllocatedRound, int]], table: Cumulants, tilt: float
) -> Mapping[AllocatedRound, Level]:
    """Return where blocks lie between nodes, for those that have enough others near them.

    table: of some of the blocks. tilt: of the composition.
    """
    shifts: dict[int, list[float]] = defaultdict(list)
    for block, _ in blocks:
        shifts[block.steps].append(block.shift)
    logs, found = table.each(tilt), dict[AllocatedRound, Level]()
    mean = float(table.counts @ logs / table.counts.sum())
    for steps, levels in shifts.items():
        tables = enumerate(table.rounds)
        known = {row: each.shift for row, each in tables if isinstance(each, AllocatedRound) and each.steps == steps}
        if len(levels) < _FEWEST or len(known) <= _DEGREE:
            continue
        logs_of_shifts = np.log(np.array(list(known.values())))
        cells = _cells(logs_of_shifts, logs[list(known)], mean, np.log([min(levels), max(levels)]))
        found.update(_placed(cells, np.sort(levels), steps))
    return found


def _cells(known: Array, logs: Array, mean: float, ends: Array) -> list[tuple[int, int]]:
    """Return cells (place, halvings) that cover logs of shifts from end to end, ascending.

    They are as wide as chords allow: see `_ALLOWED`. logs: of moments, at logs of shifts ``known``. mean: of all.
    """
    fitted = np.polynomial.Polynomial.fit(known, np.log(np.maximum(logs, 1e-300)), _DEGREE)
    places = np.arange(ends[0] - 2 * _STEP, ends[1] + 3 * _STEP, _STEP)
    inside = np.clip(places, known[0], known[-1])
    growth = np.log(np.expm1(np.exp(2.0 * places)) / np.expm1(np.exp(2.0 * inside)))  # of variances, beyond the known
    of_places = np.exp(fitted(inside) + growth)
    moments, coordinates = np.expm1(of_places), coordinate(np.exp(places), math.exp(places[0]))
    slopes = np.diff(moments) / np.diff(coordinates)
    curved = np.abs(2.0 * np.diff(slopes) / (coordinates[2:] - coordinates[:-2]))
    rises = (coordinates[2:] - coordinates[:-2]) / (2.0 * _STEP)
    allowed = 8.0 * _ALLOWED * 0.5 * (of_places[1:-1] + mean) * (1.0 + moments[1:-1])
    allowed *= np.where(places[1:-1] > math.log(_LARGE), 2.0, 1.0)
    widths = np.sqrt(allowed / np.maximum(curved, 1e-300)) / rises
    found = list[tuple[int, int]]()
    waiting = [(place, 0) for place in range(math.floor(ends[0] / _WIDEST), math.floor(ends[1] / _WIDEST) + 1)][::-1]
    while waiting:
        place, halvings = waiting.pop()
        low, high = _edge(place, halvings), _edge(place + 1, halvings)
        if high < ends[0] or low > ends[1]:
            continue
        near = widths[(places[1:-1] >= low - _STEP) & (places[1:-1] <= high + _STEP)]
        if halvings == _HALVINGS or not len(near) or high - low <= float(near.min()):
            found.append((place, halvings))
        else:
            waiting += [(2 * place + 1, halvings + 1), (2 * place, halvings + 1)]
    return found


def _edge(place: int, halvings: int) -> float:
    """Return a log of a shift, the same for the same edge of cells of different widths."""
    return place * _WIDEST * 2.0**-halvings


def _placed(cells: Sequence[tuple[int, int]], levels: Array, steps: int) -> Iterator[tuple[AllocatedRound, Level]]:
    """Place levels in runs of cells that hold more of them than they have edges."""
    edges = np.exp([_edge(*cells[0]), *(_edge(place + 1, halvings) for place, halvings in cells)])
    bounds = np.searchsorted(levels, edges)
    counts = np.diff(bounds)
    at = 0
    while at < len(cells):
        stop = at
        while stop < len(cells) and counts[stop] > 1:
            stop += 1
        if counts[at:stop].sum() > stop - at + _SPARE:
            low, high = cells[at], cells[stop - 1]
            outer = [_edge(low[0] - 1, low[1]), _edge(high[0] + 2, high[1])]
            nodes = np.concatenate((np.exp(outer[:1]), edges[at : stop + 1], np.exp(outer[1:])))
            yield from _in_run(nodes, levels[bounds[at] : bounds[stop]], steps)
        at = max(stop, at + 1)


def _in_run(nodes: Array, levels: Array, steps: int) -> Iterator[tuple[AllocatedRound, Level]]:
    """Yield the place of each level between the second node and the last but one."""
    least = float(nodes[0])
    places, rounds = coordinate(nodes, least), [AllocatedRound(float(node), steps) for node in nodes]
    of_levels = coordinate(levels, least)
    for level, place in zip(levels.tolist(), of_levels.tolist(), strict=True):
        cell = int(np.clip(np.searchsorted(nodes, level, side="right") - 1, 1, len(nodes) - 3))
        before, low, high, after = places[cell - 1 : cell + 3].tolist()
        share = min((place - low) / (high - low) + MARGIN, 1.0)
        from_weaker = max((place - low) / (low - before) - MARGIN, 0.0)
        from_stronger = max((high - place) / (after - high), 0.0) + MARGIN
        up = Extended(rounds[cell], rounds[cell - 1], from_weaker)
        down = Extended(rounds[cell + 1], rounds[cell + 2], from_stronger)
        rises = (place - low) * (place - before) <= (high - place) * (after - place)
        below = (up, down) if rises else (down, up)
        yield AllocatedRound(level, steps), Level(rounds[cell], rounds[cell + 1], share, below)


def drawn(weaker: LatticeLoss, stronger: LatticeLoss, share: float) -> LatticeLoss:
    """Return the law of the loss of a public draw: ``stronger`` with the probability ``share``, else ``weaker``."""
    first = min(weaker.start, stronger.start)
    parts = [(round(law.start - first), law, weight) for law, weight in ((weaker, 1.0 - share), (stronger, share))]
    masses, rounding = np.zeros((2, max(place + len(law.probabilities) for place, law, _ in parts)))
    for place, law, weight in parts:
        masses[place : place + len(law.probabilities)] += weight * law.probabilities
        rounding[place : place + len(law.probabilities)] += weight * law.rounding
    infinity = sum(weight * law.infinity_mass for _, law, weight in parts)
    return LatticeLoss(weaker.spacing, first, masses, infinity, rounding)


@dataclass(frozen=True)
class Beside:
    """The laws of two nodes at the same losses, ascending: masses under the first measure of the pair; all [losses].

    infinity: mass of the farther one at an infinite loss.
    """

    losses: Array
    sizes: Array
    nearer: Array
    farther: Array
    infinity: float

    @classmethod
    def of(cls, nearer: EvenLaw, farther: EvenLaw, direction: Direction) -> Beside:
        """Put ``nearer``, bounded from below, beside ``farther``, bounded from above."""
        (losses, masses, _, _), (others, of_others, _, infinity) = (losses_of(e, direction) for e in (nearer, farther))
        both = np.union1d(losses, others)
        below, above = np.zeros((2, len(both)))
        np.add.at(below, np.searchsorted(both, losses), masses)
        np.add.at(above, np.searchsorted(both, others), of_others)
        return cls(both, np.exp(both[-1] - both), below, above, infinity)

    def beyond(self, share: float) -> tuple[Array, Array]:
        """Return masses of a law below the nearer one, moved away from the farther one by ``share`` of the distance.

        Negative masses are moved outwards onto positive ones, or up, which lowers expectations of all functions in
        question. Those that have no positive one above are left out, and returned, too. So a delta may be too high by
        them, and by ``share`` of the mass at infinity.
        """
        from dpsweep.accounting.pld.block_kernels import absorb  # loads numba and compiled code

        masses, left = (1.0 + share) * self.nearer - share * self.farther, np.zeros_like(self.nearer)
        absorb(masses, self.sizes, left)
        return masses, left

    def lowered(self, masses: Array, share: float, spacing: float) -> LatticeLoss:
        """Return the law of the ``masses`` that `beyond` has found, on a lattice."""
        rounding = 2.0 * ROUNDING * ((1.0 + share) * self.nearer + share * self.farther)
        return replace(lowered(self.losses, masses, rounding, spacing), infinity_mass=share * self.infinity)
