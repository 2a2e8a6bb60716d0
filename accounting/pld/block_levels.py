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
from dpsweep.accounting.pld.lattice import LatticePlan
from dpsweep.accounting.pld.levels import MARGIN, coordinate
from dpsweep.accounting.pld.loss import Direction, LatticeLoss, by_draw
from dpsweep.accounting.pld.saddlepoint import Cumulants, saddle_at_epsilon
from dpsweep.accounting.pld.sensitivity import AllocatedRound, Array

_FEWEST: Final = 48
"""Fewer levels have no nodes."""
_WIDEST: Final = 0.06
"""Width of a cell in the log of the shift, before it is halved."""
_HALVINGS: Final = 8
_DEGREE: Final = 5
"""Of the polynomial that logs of moments are read from, between a few of them; less for levels close together."""
_STEP: Final = 2.0**-7
"""Of logs of shifts, for slopes of moments."""
_LARGE: Final = 1.5
"""Shift above which laws take long, and their own bounds are narrow, so that errors of chords count a third."""
_TRIES: Final = 12
"""Errors of a cell that are tried, each a fraction `_FINER` of the one before."""
_FINER: Final = 0.6
_LEAST_LOG_DELTA: Final = -700.0
"""Log of the least delta that weighs single large losses; 1 over a smaller one is no number."""
_ENDS: Final = (2, 1)
"""Nodes that the first and the last cell of a run need beside one for each cell."""


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
    blocks: Iterable[tuple[AllocatedRound, int]], table: Cumulants, plan: LatticePlan, allowed: float
) -> Mapping[AllocatedRound, Level]:
    """Return where blocks lie between nodes, for those that have enough others near them.

    table: of some of the blocks. allowed: about what the epsilons of bounds from above and from below may differ by
    because of nodes, relative to epsilon.
    """
    counts: dict[int, dict[float, int]] = defaultdict(dict)
    for block, count in blocks:
        counts[block.steps][block.shift] = count
    bulk, (sticks, rates) = table.below(plan.centre), table.sticks(plan.centre)
    slope = saddle_at_epsilon(bulk, plan.centre).tilt
    moments = np.expm1(bulk.each(slope))
    over_delta = math.exp(-max(plan.log_delta, _LEAST_LOG_DELTA))
    alone = float(table.counts @ sticks) * over_delta
    if alone > 0.0:  # the share of delta that single large losses make
        slope += min(alone, 1.0) * (float(table.counts @ rates / (table.counts @ sticks)) - slope)
    found = dict[AllocatedRound, Level]()
    for steps, levels in counts.items():
        tables = enumerate(table.rounds)
        known = {row: each.shift for row, each in tables if isinstance(each, AllocatedRound) and each.steps == steps}
        if len(levels) < _FEWEST or len(known) <= _DEGREE:
            continue
        shifts = np.array(sorted(levels))
        kind, rows = _Kind(shifts, np.array([levels[shift] for shift in shifts.tolist()]), steps), list(known)
        logs, ends = np.log(np.array(list(known.values()))), np.log(shifts[[0, -1]])
        chords = _Chords.of(logs, moments[rows], sticks[rows] * over_delta, ends)
        share = sum(levels.values()) / sum(sum(each.values()) for each in counts.values())
        for nodes in _cheapest(kind, chords, share * allowed * slope * plan.centre):
            found.update(kind.placed(nodes))
    return found


@dataclass(frozen=True)
class _Chords:
    """By how much chords raise the log of delta: ``curvatures`` times the distances of both ends, by ``places``.

    All are in logs of shifts; arrays are [places].
    """

    places: Array
    curvatures: Array

    @classmethod
    def of(cls, known: Array, moments: Array, sticks: Array, ends: Array) -> _Chords:
        """Return them from end to end. moments, less 1, and sticks, over delta: of rounds at logs of shifts."""
        places = np.arange(ends[0] - 2 * _STEP, ends[1] + 3 * _STEP, _STEP)
        inside = np.clip(places, known[0], known[-1])
        growth = np.expm1(np.exp(2.0 * places)) / np.expm1(np.exp(2.0 * inside))  # of variances, beyond the known
        coordinates = coordinate(np.exp(places), math.exp(places[0]))
        widths = coordinates[2:] - coordinates[:-2]

        def curved(values: Array) -> tuple[Array, Array]:
            degree = min(2 + int(2.0 * np.ptp(known)), _DEGREE)
            fitted = np.polynomial.Polynomial.fit(known, np.log(np.maximum(values, 1e-300)), degree)
            of_places = np.exp(fitted(inside)) * growth
            return np.abs(np.diff(np.diff(of_places) / np.diff(coordinates)) / widths), of_places[1:-1]

        of_moments, found = curved(moments)
        of_sticks, _ = curved(sticks)
        weights = np.where(places[1:-1] > math.log(_LARGE), 1.0 / 3.0, 1.0)
        largest = weights * np.maximum(of_moments / (1.0 + found), of_sticks)
        return cls(places[1:-1], np.asarray(largest * (widths / (2.0 * _STEP)) ** 2, dtype=np.float64))

    def largest(self, low: float, high: float) -> float:
        """Return the largest curvature near an interval."""
        first, last = np.searchsorted(self.places, (low - _STEP, high + _STEP)).tolist()
        return float(self.curvatures[max(first - 1, 0) : last + 1].max())


@dataclass(frozen=True)
class _Kind:
    """Blocks of ``steps`` steps: their ``shifts``, ascending, and how often each occurs; both [levels]."""

    shifts: Array
    counts: Array
    steps: int

    def placed(self, nodes: Array) -> Iterator[tuple[AllocatedRound, Level]]:
        """Place all levels between the second of ``nodes`` and the last but one."""
        first, last = np.searchsorted(self.shifts, nodes[[1, -2]]).tolist()
        return _in_run(nodes, self.shifts[first:last], self.steps)

    def error(self, nodes: Array, chords: _Chords) -> float:
        """Return about what bounds on the log of delta differ by because of these levels."""
        first, last = np.searchsorted(self.shifts, nodes[[1, -2]]).tolist()
        levels, edges = np.log(self.shifts[first:last]), np.log(nodes)
        cells = np.clip(np.searchsorted(edges, levels, side="right") - 1, 1, len(edges) - 3)
        before, low, high, after = (levels - edges[cells + place] for place in range(-1, 3))
        above, below = -low * high, np.minimum(low * before, high * after)
        curvatures = np.interp(levels, chords.places, chords.curvatures)
        return float(self.counts[first:last] @ (curvatures * (above + below)))


def _cheapest(kind: _Kind, chords: _Chords, allowed: float) -> list[Array]:
    """Return the nodes of each run of cells, as few in all as lead to about the error that is ``allowed``.

    For the least number all cells err by the same.
    """
    runs = list[Array]()
    for attempt in range(_TRIES):
        runs = list(_runs(*_cells(kind, chords, 0.2 * allowed * _FINER**attempt)))
        if sum(kind.error(nodes, chords) for nodes in runs) <= allowed:
            break
    return runs


def _cells(kind: _Kind, chords: _Chords, most: float) -> tuple[list[tuple[int, int]], list[int]]:
    """Return cells (place, halvings) from the first level to the last, ascending, and the number of levels in each.

    Each errs by at most about ``most``, or has one level or none.
    """
    logs, totals = np.log(kind.shifts), np.append(0, np.cumsum(kind.counts))
    ends = float(logs[0]), float(logs[-1])
    found, numbers = list[tuple[int, int]](), list[int]()
    waiting = [(place, 0) for place in range(math.floor(ends[0] / _WIDEST), math.floor(ends[1] / _WIDEST) + 1)][::-1]
    while waiting:
        place, halvings = waiting.pop()
        low, high = _edge(place, halvings), _edge(place + 1, halvings)
        if high < ends[0] or low > ends[1]:
            continue
        first, last = np.searchsorted(logs, (low, high)).tolist()
        error = 0.5 * chords.largest(low, high) * (high - low) ** 2 * float(totals[last] - totals[first])
        if halvings == _HALVINGS or last - first <= 1 or error <= most:
            found.append((place, halvings))
            numbers.append(last - first)
        else:
            waiting += [(2 * place + 1, halvings + 1), (2 * place, halvings + 1)]
    return found, numbers


def _edge(place: int, halvings: int) -> float:
    """Return a log of a shift, the same for the same edge of cells of different widths."""
    return place * _WIDEST * 2.0**-halvings


def _runs(cells: Sequence[tuple[int, int]], numbers: Sequence[int]) -> Iterator[Array]:
    """Yield the nodes of runs of cells, for the fewest laws of nodes and of levels that are in no run."""
    outside, inside, before = 0.0, math.inf, list[tuple[bool, bool]]()  # whether the cell before is in a run
    for number in numbers:
        ended, begun = inside + _ENDS[1], outside + _ENDS[0]
        before.append((ended < outside, inside <= begun))
        outside, inside = min(outside, ended) + number, min(inside, begun) + 1.0
    within, stop = inside + _ENDS[1] < outside, len(cells)
    for at in range(len(cells) - 1, -1, -1):
        was = before[at][within]
        if within and not was:
            yield _nodes(cells[at:stop])
        if was and not within:
            stop = at
        within = was


def _nodes(cells: Sequence[tuple[int, int]]) -> Array:
    """Return the edges of a run of cells, and one more on either side."""
    (low, halvings), (high, last) = cells[0], cells[-1]
    edges = [_edge(low, halvings), *(_edge(place + 1, each) for place, each in cells)]
    return np.asarray(np.exp([_edge(low - 1, halvings), *edges, _edge(high + 2, last)]), dtype=np.float64)


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
    return by_draw(((1.0 - share, weaker), (share, stronger)))


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

        Negative masses are moved, in terms of losses and of masses under the first measure of the pair. This lowers
        expectations of all functions in question. One is spread over positive ones on either side, so that both its
        measures stay. A hockey stick of a spread mass is at least that of the mass itself, and it is subtracted. Where
        there is none below, it takes as much from the next one above, whose hockey stick is at least as large. Where
        there is none above, it is left out, and returned. So a delta may be too high by these, and by ``share`` of the
        mass at infinity.
        """
        from dpsweep.accounting.pld.block_kernels import absorb  # loads numba and compiled code

        masses = (1.0 + share) * (1.0 - ROUNDING) * self.nearer - share * (1.0 + ROUNDING) * self.farther
        left = np.zeros_like(masses)
        absorb(masses, self.sizes, left)
        return masses, left

    def lowered(self, masses: Array, share: float, spacing: float) -> LatticeLoss:
        """Return the law of the ``masses`` that `beyond` has found, on a lattice."""
        return replace(lowered(self.losses, masses, spacing), infinity_mass=share * self.infinity)
