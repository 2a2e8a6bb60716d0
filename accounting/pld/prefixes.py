"""Upper bounds on the epsilon of growing runs, on one lattice for all: each distinct round is discretised once.

Guarantee: as of `dpsweep.accounting.pld.composition` for each run by itself, because its composition is certified for
any plan. A plan that fits one run less well gives a looser bound, not a wrong one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from scipy import fft

from dpsweep.accounting.pld.composition import is_too_coarse, require_pld_delta, tail_of
from dpsweep.accounting.pld.fourier import UpperProduct
from dpsweep.accounting.pld.group_rounds import GroupRounds
from dpsweep.accounting.pld.lattice import make_plan, spacing_for
from dpsweep.accounting.pld.loss import DIRECTIONS, Direction
from dpsweep.accounting.pld.saddlepoint import Cumulants, cumulants, saddle_at_delta
from dpsweep.accounting.pld.sensitivity import AllocatedRound, Array, RoundLaw

_SHORTEST: Final = 0.25
"""Shortest run that shares a lattice with the longest one, in rounds; the tilt of shorter ones differs too much."""
_MOST_SHIFTS: Final = 64
"""Shifts of random allocation that are told apart: a block of each takes some 10 ms."""
_ROOM: Final = 1.25
"""Points over those of the longest run, for windows that begin lower."""


@np.errstate(all="ignore")  # overflow gives infinity or NaN, which no bound uses
def upper_of_prefixes(runs: Sequence[GroupRounds], delta: float, tolerance: float) -> list[float]:
    """Return an upper bound on the epsilon at ``delta`` of each of ``runs``, which all begin with the one before.

    The target for the relative error is ``tolerance``; random allocation adds a few hundredths where it has many
    shifts. Infinity is returned where no lattice gives a bound, and where runs differ in more than sampled rounds.
    Raises: InvalidInput for a delta outside [1e-250, 1).
    """
    delta, runs = require_pld_delta(delta), _with_few_shifts(runs)
    found: list[float] = []
    while len(found) < len(runs):
        left = runs[: len(runs) - len(found)]
        block = [run for run in left if run.count >= _SHORTEST * left[-1].count]
        found = [*_upper_of_block(block, delta, tolerance), *found]
    return found


def _with_few_shifts(runs: Sequence[GroupRounds]) -> Sequence[GroupRounds]:
    """Return runs that dominate these, with at most `_MOST_SHIFTS` shifts of random allocation.

    A smaller shift is post-processing of a larger one (docs/accounting-proofs.md, "Random allocation").
    """
    shifts = sorted({block.shift for run in runs for block, _ in run.allocated})
    if len(shifts) <= _MOST_SHIFTS:
        return runs
    levels = np.geomspace(shifts[-1], shifts[0], _MOST_SHIFTS + 1)[:-1][::-1]
    return [replace(run, allocated=tuple(_raised(run.allocated, levels).items())) for run in runs]


def _raised(allocated: Iterable[tuple[AllocatedRound, int]], levels: Array) -> Counter[AllocatedRound]:
    found = Counter[AllocatedRound]()
    for block, count in allocated:
        place = min(int(np.searchsorted(levels, block.shift)), len(levels) - 1)
        found[replace(block, shift=max(float(levels[place]), block.shift))] += count
    return found


def _upper_of_block(runs: Sequence[GroupRounds], delta: float, tolerance: float) -> list[float]:
    others = {(run.gaussian, run.pure) for run in runs}
    if len(others) > 1 or any(not run.is_private or not (run.laws or run.allocated) for run in runs):
        return [math.inf] * len(runs)
    tail = tail_of(runs[-1], delta)
    tables = {direction: cumulants(runs[-1], direction, tail) for direction in DIRECTIONS}
    bounds = [_upper_of_direction(runs, delta, tolerance, tail, each, tables) for each in DIRECTIONS]
    return [max(both) for both in zip(*bounds, strict=True)]


def _upper_of_direction(
    runs: Sequence[GroupRounds],
    delta: float,
    tolerance: float,
    tail: float,
    direction: Direction,
    tables: dict[Direction, Cumulants],
) -> list[float]:
    other = next(table for each, table in tables.items() if each != direction)
    saddle = saddle_at_delta(tables[direction], math.log(delta))
    spacing = spacing_for(runs[-1].count, saddle, tolerance)
    plan = make_plan(tables[direction], other, saddle, spacing, tail, runs[-1].count)
    if is_too_coarse(runs[-1], plan):
        return [math.inf] * len(runs)
    roomy = replace(plan, points=2 * fft.next_fast_len(math.ceil(_ROOM * plan.points / 2), real=True))
    product, before = UpperProduct.begun(runs[0].gaussian, runs[0].pure, roomy), Counter[RoundLaw | AllocatedRound]()
    centre = saddle_at_delta(cumulants(runs[0], direction, tail), math.log(delta)).epsilon
    found = []
    for run in runs:
        now: Counter[RoundLaw | AllocatedRound] = Counter(dict((*run.laws, *run.allocated)))
        for law, count in (now - before).items():
            product = product.then(law, count)
        before = now
        root = product.curve(centre).epsilon_at(delta)
        found.append(root.epsilon)
        centre = max(root.nearest, 0.0)
    return found
