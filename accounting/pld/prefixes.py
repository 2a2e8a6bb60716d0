"""Upper bounds on the epsilon of growing runs, on one lattice for all: few noise levels of each kind are discretised.

Guarantee: as of `dpsweep.accounting.pld.composition` for each run by itself, because its composition is certified for
any plan, and `dpsweep.accounting.pld.levels` for any levels. A plan that fits one run less well gives a looser bound,
not a wrong one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Final

import numpy as np
from scipy import fft

from dpsweep.accounting.pld.ceilings import gaussian_ceiling
from dpsweep.accounting.pld.composition import PairBounds, is_too_coarse, require_pld_delta, tail_of
from dpsweep.accounting.pld.fourier import UpperProduct
from dpsweep.accounting.pld.group_rounds import GroupRounds
from dpsweep.accounting.pld.lattice import make_plan, spacing_for
from dpsweep.accounting.pld.levels import AnyRound, from_few
from dpsweep.accounting.pld.loss import DIRECTIONS, Direction
from dpsweep.accounting.pld.saddlepoint import Cumulants, Saddle, cumulants, saddle_at_delta

_SHORTEST: Final = 0.25
"""Shortest run that shares a lattice with the longest one, in rounds; the tilt of shorter ones differs too much."""
_ROOM: Final = 1.25
"""Points over those of the longest run, for windows that begin lower."""
_ROWS: Final = 32
"""Most tables by which a lattice is planned."""
_FEW: Final = 8
"""Most tables by which the first run is judged."""
_GAP: Final = 0.25
"""Share of the gap to the other direction that the target of the cheaper one may be."""
_LOOSEST: Final = 0.05
_LOST: Final = 1e-8
_LOST_OF_RARE: Final = 1e-4
"""The same where rare cases of rounds have losses far above epsilon, which else decide where the lattice is precise."""
_CLOSER: Final = 0.25
"""Share of the tolerance for one run alone, whose few levels are looser where single large losses decide."""
_UP: Final = 1.0 + 1e-12


@np.errstate(all="ignore")  # overflow gives infinity or NaN, which no bound uses
def upper_of_prefixes(runs: Sequence[GroupRounds], delta: float, tolerance: float, lost: float = _LOST) -> list[float]:
    """Return an upper bound on the epsilon at ``delta`` of each of ``runs``, which all begin with the one before.

    The target for the relative error is ``tolerance``; ``lost`` is the share of delta that all rounds of a run together
    may lose to infinity. Infinity is returned where no lattice gives a bound, and where
    runs differ in pure releases. Raises: InvalidInput for a delta outside [1e-250, 1).
    """
    delta = require_pld_delta(delta)
    found: list[float] = []
    while len(found) < len(runs):
        left = runs[: len(runs) - len(found)]
        block = [run for run in left if run.count >= _SHORTEST * left[-1].count]
        found = [*_upper_of_block(block, delta, tolerance, lost), *found]
    return found


def upper_of_many_levels(rounds: GroupRounds, delta: float, tolerance: float) -> PairBounds:
    """Return an upper bound on the epsilon of one run at ``delta`` by few of its noise levels, and 0 from below.

    The target for its relative error is ``tolerance``. Raises: InvalidInput for a delta outside [1e-250, 1).
    """
    (upper,) = upper_of_prefixes([rounds], delta, _CLOSER * tolerance, _LOST_OF_RARE)
    ceiling = gaussian_ceiling(rounds, delta)
    return PairBounds(upper, 0.0) if upper < ceiling else PairBounds(ceiling, 0.0, "gdp")


def _upper_of_block(runs: Sequence[GroupRounds], delta: float, tolerance: float, lost: float) -> list[float]:
    unlike = len({run.pure for run in runs}) > 1
    if unlike or any(not run.is_private or not (run.laws or run.allocated) for run in runs):
        return [math.inf] * len(runs)
    tail = tail_of(runs[-1], delta, lost)
    tables = {each: cumulants(runs[-1], each, tail) for each in DIRECTIONS}
    first = {each: saddle_at_delta(cumulants(runs[0], each, tail, _FEW), math.log(delta)) for each in DIRECTIONS}
    last = {each: saddle_at_delta(table.sparser(_ROWS), math.log(delta)) for each, table in tables.items()}
    gaps = {each: 1.0 - max(_share(saddles, each) for saddles in (first, last)) for each in DIRECTIONS}
    targets = {each: max(tolerance, min(_GAP * gap, _LOOSEST)) for each, gap in gaps.items()}

    def bounds_of(each: Direction, target: float) -> list[float]:
        return _upper_of_direction(runs, delta, target, tail, tables[each], last[each], first[each].epsilon)

    bounds = {each: bounds_of(each, target) for each, target in targets.items()}
    worse = max(DIRECTIONS, key=lambda each: bounds[each][-1])
    if targets[worse] > tolerance:  # saddle points misjudged the gap
        bounds[worse] = bounds_of(worse, tolerance)
    return [max(both) for both in zip(*bounds.values(), strict=True)]


def _share(saddles: Mapping[Direction, Saddle], direction: Direction) -> float:
    """Return about the epsilon of one direction over that of the worse one."""
    return saddles[direction].epsilon / max(max(saddle.epsilon for saddle in saddles.values()), 1e-300)


def _upper_of_direction(
    runs: Sequence[GroupRounds],
    delta: float,
    tolerance: float,
    tail: float,
    table: Cumulants,
    saddle: Saddle,
    centre: float,
) -> list[float]:
    """Return the bounds of one direction. table, saddle: of the last run. centre: about the epsilon of the first."""
    few = table.sparser(_ROWS)
    plan = make_plan(few, few, saddle, spacing_for(runs[-1].count, saddle, tolerance), tail, runs[-1].count)
    if is_too_coarse(runs[-1], plan):
        return [math.inf] * len(runs)
    roomy = replace(plan, points=2 * fft.next_fast_len(math.ceil(_ROOM * plan.points / 2), real=True))
    levels = from_few([each for each, _ in _sampled(runs[-1])], table, saddle.tilt, tolerance)
    product = UpperProduct.begun(runs[0].gaussian, runs[0].pure, roomy)
    before, gaussian, found = Counter[AnyRound](), runs[0].gaussian, []
    for run in runs:
        now = Counter(dict(_sampled(run)))
        further = sorted((now - before).items(), key=itemgetter(1))
        for count, equal in groupby(further, key=itemgetter(1)):
            product = product.then([levels.get(each, each) for each, _ in equal], count)
        if run.gaussian > gaussian:
            product = product.then_gaussian(_UP * math.sqrt(run.gaussian**2 - gaussian**2))
        before, gaussian = now, max(run.gaussian, gaussian)
        root = product.curve(centre).epsilon_at(delta)
        found.append(root.epsilon)
        centre = max(root.nearest, 0.0)
    return found


def _sampled(run: GroupRounds) -> tuple[tuple[AnyRound, int], ...]:
    return (*run.laws, *run.allocated)
