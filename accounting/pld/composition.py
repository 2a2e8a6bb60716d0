"""Certified privacy of given rounds: upper and lower bounds on epsilon or delta.

Guarantee: a run that the rounds dominate is (upper, delta)-DP, with every step's output visible and later steps chosen
adaptively. The lower one is a certified lower bound on the exact epsilon of the rounds' dominating pairs, so the gap
bounds the numerical error.

Method: each round's loss is discretised upwards and downwards on one lattice
(`dpsweep.accounting.pld.loss.discretise`); the rounds compose in the frequency domain
(`dpsweep.accounting.pld.fourier`, which lists the error terms). An uncertified approximation
(`dpsweep.accounting.pld.saddlepoint`) chooses the lattice. Error analysis: docs/accounting-proofs.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from dpsweep.accounting.errors import InvalidInput, require_finite
from dpsweep.accounting.numerics.gaussian import gaussian_delta, gaussian_epsilon
from dpsweep.accounting.pld.ceilings import (
    CeilingMethod,
    gaussian_ceiling,
    gaussian_delta_ceiling,
    renyi_ceiling,
    total_variation,
)
from dpsweep.accounting.pld.curve import Composed
from dpsweep.accounting.pld.exact import HIGHEST_EXACT, LEAST_TAIL, exact_deltas, exact_epsilon
from dpsweep.accounting.pld.fourier import compose, compose_from_above, compose_upper, law_rounded_up
from dpsweep.accounting.pld.group_rounds import GroupRounds
from dpsweep.accounting.pld.lattice import LatticePlan, make_plan, spacing_for
from dpsweep.accounting.pld.loss import DIRECTIONS, MAX_POINTS
from dpsweep.accounting.pld.saddlepoint import Cumulants, Saddle, centres, cumulants, saddle_at_delta, saddle_at_epsilon
from dpsweep.accounting.pld.sensitivity import RoundLaw

TOLERANCE = 2e-4  # target for the relative gap between upper and lower
MIN_DELTA = 1e-250  # below it, the mass that a round may lose to infinity underflows
_ATTEMPTS = 4  # most compositions of one direction
_ENOUGH = 1.5  # gap, in tolerances, that is accepted without another composition
_KEPT_LAWS = 100  # of random allocation; with more, each composition forms all anew, and the second gap may be twice it
_FINER = 0.4  # share of the tolerance that the lattice may use where random allocation uses the rest
_COARSEST = 4.0  # coarser lattices cannot improve on the closed-form bound
_STEEPEST = 40.0  # largest tilt * spacing: with more, too, lattices cannot improve on the closed-form bound
_VACUOUS = 1e4  # a lattice that gives an upper epsilon above this and a lower one of 0 is not refined
_HOPELESS = 1e7  # approximate epsilons above which no lattice is tried
_SPENT_MARGIN = 0.5  # fraction of the gap between directions allowed as discretisation error
_NEAR = 1.05  # ratio of the bounds on delta that is accepted without losing more
_MISJUDGED = 0.2  # error of a saddle point's log of delta above which it is far off
_LOST = (1e-8, 1e-4, 1e-2)  # shares of delta that all rounds together may lose to infinity, tried in this order


class PairBounds(NamedTuple):
    """Bounds on the epsilon, or the delta, of the rounds' pairs themselves.

    method: how upper was obtained: ``pld``, or ``gdp`` or ``rdp`` if one dominating Gaussian or Renyi DP is lower.
    """

    upper: float
    lower: float
    method: CeilingMethod = "pld"


def require_pld_delta(delta: float) -> float:
    """Return the delta. Raises: InvalidInput for one outside [1e-250, 1), which names accountants that take smaller
    ones.
    """
    delta = require_finite("delta", delta, above=0.0, below=1.0)
    if delta < MIN_DELTA:
        raise InvalidInput(
            f"delta is {delta:g}, but pld computes epsilons from {MIN_DELTA:g} on; rdp, gdp and auto take smaller ones"
        )
    return delta


@np.errstate(all="ignore")  # overflow gives infinity or NaN, which no bound uses
def epsilon_of_rounds(rounds: GroupRounds, delta: float, tolerance: float = TOLERANCE) -> PairBounds:
    """Return the epsilon of given rounds at ``delta``, certified from both sides."""
    asked = _Asked(rounds, *_required(delta, tolerance), _BOTH)
    known, is_enough = _without_lattices(asked)
    return known if is_enough else _with_ceilings(asked, _on_lattices(asked, known))


@np.errstate(all="ignore")
def upper_epsilon_of_rounds(rounds: GroupRounds, delta: float, tolerance: float = TOLERANCE) -> PairBounds:
    """Return `epsilon_of_rounds` from above only, several times faster; the lower one may be 0."""
    delta, tolerance = _required(delta, tolerance)
    if rounds.is_private and rounds.laws:
        tail = tail_of(rounds, delta)
        rounds = replace(rounds, laws=tuple((law_rounded_up(law, tail), count) for law, count in rounds.laws))
    asked = _Asked(rounds, delta, tolerance, _FROM_ABOVE)
    known, is_enough = _without_lattices(asked)
    if is_enough:
        return known
    found = _on_lattices(asked, known)
    return found if found.upper < known.upper else _with_ceilings(asked, found)


def _required(delta: float, tolerance: float) -> tuple[float, float]:
    return require_pld_delta(delta), require_finite("tolerance", tolerance, above=0.0)


def _without_lattices(asked: _Asked) -> tuple[PairBounds, bool]:
    """Return the epsilon by closed forms, and whether it needs no better bounds."""
    rounds, delta = asked.rounds, asked.delta
    if not rounds.is_private:
        return PairBounds(math.inf, math.inf), True
    if rounds.is_one_gaussian:
        return PairBounds(*gaussian_epsilon(rounds.gaussian, delta)), True
    if total_variation(rounds) <= delta:
        return PairBounds(0.0, 0.0), True
    highest, lowest = math.inf, 0.0
    if (deltas := exact_deltas(rounds, tail_of(rounds, delta))) is not None:
        highest, lowest = exact_epsilon(deltas, delta)
        if highest <= lowest * (1 + asked.tolerance):
            return PairBounds(highest, lowest), True
    ceiling = gaussian_ceiling(rounds, delta)
    return PairBounds(min(highest, ceiling), lowest, "gdp" if ceiling <= highest else "pld"), False


def _with_ceilings(asked: _Asked, found: PairBounds) -> PairBounds:
    """Return better bounds than ``found`` if these are apart: from below by one round, from above by Renyi DP."""
    if not found.upper > found.lower * (1 + 2 * _ENOUGH * asked.tolerance):
        return found
    lower = max(found.lower, _of_the_strongest(asked.rounds, asked.delta))
    bounds = (found._replace(lower=lower), PairBounds(renyi_ceiling(asked.rounds, asked.delta), lower, "rdp"))
    return min(bounds, key=lambda bound: bound.upper)


def _of_the_strongest(rounds: GroupRounds, delta: float) -> float:
    """Return a lower bound on epsilon: that of the one sampled round with the largest mean sensitivity, as others
    only add.
    """
    if not rounds.laws:
        return 0.0
    strongest, _ = max(rounds.laws, key=lambda pair: _mean_sensitivity(pair[0]))
    deltas = exact_deltas(GroupRounds(((strongest, 1),)))
    return 0.0 if deltas is None else exact_epsilon(deltas, delta)[1]


def _mean_sensitivity(law: RoundLaw) -> float:
    return sum(share * float(np.dot(mixture.sensitivities, mixture.probabilities)) for share, mixture in law.cases)


def _on_lattices(asked: _Asked, known: PairBounds) -> PairBounds:
    """Return the epsilon of the worse direction, where that is closer than ``known``.

    Where examples are drawn rarely, losses far above epsilon decide at which tilt the lattice is precise, although they
    hardly add to delta, and the saddle point misjudges delta. So while the bounds are apart there, rounds may lose more
    of these losses to infinity. That ends where it helps by less than the tolerance.
    """
    upper, lower = known.upper, 0.0
    for share in _LOST:
        tail = tail_of(asked.rounds, asked.delta, share)
        pair = [cumulants(asked.rounds, direction, tail) for direction in DIRECTIONS]
        above, below = _epsilon_losing(replace(asked, tail=tail), pair, upper)
        helped = above < upper * (1 - asked.tolerance) or below > lower * (1 + asked.tolerance)
        upper, lower = min(upper, above), max(lower, below)
        enough = upper <= lower * (1 + 2 * _ENOUGH * asked.tolerance)
        if enough or not helped or not _misjudge(pair, upper, asked.delta):
            break
    method = known.method if upper == known.upper else "pld"
    return PairBounds(upper, max(lower, known.lower), method)


def _misjudge(pair: Sequence[Cumulants], epsilon: float, delta: float) -> bool:
    """Return whether the saddle points at a lattice's ``epsilon`` are far from the ``delta`` that the lattice has
    there.
    """
    if epsilon > _HOPELESS:
        return False
    saddles = [saddle_at_epsilon(generating, epsilon) for generating in pair]
    return not abs(max(saddle.log_delta for saddle in saddles) - math.log(delta)) <= _MISJUDGED


@dataclass(frozen=True)
class _Search:
    """How bounds are sought on lattices: composed by ``compose``, first at ``share`` of the spacing for both bounds.

    finer: the factor on the spacing of the next lattice, given the saddle and the loss where delta was reached, and the
    gap between the bounds; None where another lattice would not help.
    """

    compose: Callable[[GroupRounds, LatticePlan], Composed]
    share: float
    finer: Callable[[_Asked, Saddle, float, float], float | None]


def _until_close(asked: _Asked, saddle: Saddle, nearest: float, gap: float) -> float | None:
    """Return `_Search.finer` for both bounds: refine until they are close, or with public draws until the aim is.

    The least losses of a round's cases lie on no common lattice. So the bound from below errs by a share of the spacing
    in every round. Its gap says nothing of the bound from above, which errs by squares of the spacing.
    """
    if asked.rounds.has_draws and abs(nearest - saddle.epsilon) <= _MISJUDGED * max(nearest, 0.0):
        return None
    return float(np.clip(0.8 * np.sqrt(asked.tolerance / gap), 0.1, 0.7))


def _until_aimed(asked: _Asked, saddle: Saddle, nearest: float, gap: float) -> float | None:
    """Return `_Search.finer` for the upper bound alone, whose lattice is as fine as a second one: only aim again."""
    near = max(nearest, 1 / (1 + saddle.tilt))
    return None if abs(nearest - saddle.epsilon) <= _MISJUDGED * near else 1.0


_BOTH = _Search(compose, 1.0, _until_close)
_FROM_ABOVE = _Search(compose_from_above, 0.7, _until_aimed)


@dataclass(frozen=True)
class _Asked:
    """The epsilon at ``delta`` of rounds that may each lose ``tail`` to infinity. tolerance: target for its gap."""

    rounds: GroupRounds
    delta: float
    tolerance: float
    search: _Search
    tail: float = 0.0


@dataclass(frozen=True)
class _Side:
    """The cumulants of one direction, with the saddle near its epsilon, and of the other one."""

    generating: Cumulants
    other: Cumulants
    saddle: Saddle


def _epsilon_losing(asked: _Asked, pair: Sequence[Cumulants], ceiling: float) -> tuple[float, float]:
    """(upper, lower) epsilon of the worse direction. pair: of both directions."""
    sides = [
        _Side(generating, other, saddle_at_delta(generating, math.log(asked.delta)))
        for generating, other in (pair, pair[::-1])
    ]
    first, second = sorted(sides, key=lambda side: -side.saddle.epsilon)
    worse = _bracket_epsilon(asked, first, ceiling)
    if worse.upper == ceiling or worse.opposite_delta(worse.upper) <= asked.delta:
        return worse.upper, worse.lower
    if _is_below(asked, second, worse.upper):
        return worse.upper, worse.lower
    other = _bracket_epsilon(asked, second, ceiling, worse.upper)
    return max(worse.upper, other.upper), max(worse.lower, other.lower)


@np.errstate(all="ignore")
def delta_of_rounds(rounds: GroupRounds, epsilon: float, tolerance: float = TOLERANCE) -> PairBounds:
    """Return the delta of given rounds at ``epsilon``, certified from both sides."""
    epsilon = require_finite("epsilon", epsilon, at_least=0.0)
    tolerance = require_finite("tolerance", tolerance, above=0.0)
    if not rounds.is_private:
        return PairBounds(1.0, 1.0)
    if rounds.is_one_gaussian:
        return PairBounds(*gaussian_delta(rounds.gaussian, epsilon))
    if (deltas := exact_deltas(rounds)) is not None and epsilon <= HIGHEST_EXACT:
        upper, lower = deltas(epsilon)
        if upper <= lower * _NEAR:
            return PairBounds(upper, lower)
    else:
        upper, lower = 1.0, 0.0
    upper = min(upper, total_variation(rounds), gaussian_delta_ceiling(rounds, epsilon))
    if upper < MIN_DELTA:
        return PairBounds(upper, lower)
    pair = [cumulants(rounds, direction, LEAST_TAIL) for direction in DIRECTIONS]
    log_delta = min(max(saddle_at_epsilon(generating, epsilon).log_delta for generating in pair), 0.0)
    for share in _LOST:
        above, below = _delta_losing(rounds, epsilon, log_delta, tolerance, share)
        upper, lower = min(upper, above), max(lower, below)
        if upper <= lower * _NEAR:
            break
        log_delta = min(log_delta, math.log(max(upper, MIN_DELTA)))
    return PairBounds(upper, lower)


def _delta_losing(
    rounds: GroupRounds, epsilon: float, log_delta: float, tolerance: float, share: float
) -> tuple[float, float]:
    """(upper, lower) delta of the worse direction. log_delta: about its log; ``share`` of it may be lost."""
    tail = tail_of(rounds, math.exp(log_delta), share)
    pair = [cumulants(rounds, direction, tail) for direction in DIRECTIONS]
    pair.sort(key=lambda generating: -saddle_at_epsilon(generating, epsilon).log_delta)
    upper, lower, opposite = 0.0, 0.0, 1.0
    for generating, other in (pair, pair[::-1]):
        aims = centres(generating, epsilon, log_delta)
        found = first_fine(
            rounds, generating, other, aims, partial(spacing_for, rounds.count, tolerance=tolerance), tail
        )
        if found is None:
            return max(upper, opposite), lower
        aim, plan = found
        composed = compose(rounds, plan)
        above = composed.upper.delta_at(min(epsilon, aim.epsilon))  # delta never rises with epsilon
        upper, lower = max(upper, min(above, opposite)), max(lower, composed.lower.delta_at(epsilon))
        opposite = composed.opposite_delta(epsilon)
        if opposite <= upper:
            break
    return upper, lower


@dataclass(frozen=True)
class _Bracket:
    upper: float
    lower: float
    composed: Composed | None

    def opposite_delta(self, epsilon: float) -> float:
        return 1.0 if self.composed is None else self.composed.opposite_delta(epsilon)


def tail_of(rounds: GroupRounds, delta: float, share: float = _LOST[0]) -> float:
    """Return the probability that each round may lose to infinity; the sum is ``share`` of delta."""
    return max(delta * share / rounds.count, 1e-300)


def first_fine(
    rounds: GroupRounds,
    generating: Cumulants,
    other: Cumulants,
    aims: Iterable[Saddle],
    spacing_at: Callable[[Saddle], float],
    tail: float,
) -> tuple[Saddle, LatticePlan] | None:
    """Return the first aim whose lattice is fine enough, and its plan; None if none is."""
    for aim in aims:
        plan = make_plan(generating, other, aim, spacing_at(aim), tail, rounds.count)
        if not is_too_coarse(rounds, plan):
            return aim, plan
    return None


def is_too_coarse(rounds: GroupRounds, plan: LatticePlan) -> bool:
    """Return whether the lattice cannot improve on the ceilings, or is too short for the losses of pure releases."""
    holds_pure = max(rounds.pure, default=0.0) <= plan.spacing * MAX_POINTS
    coarse = plan.spacing > _COARSEST or plan.spacing * plan.tilt > _STEEPEST
    return coarse or not math.isfinite(plan.bottom) or not holds_pure


def _is_below(asked: _Asked, side: _Side, epsilon: float) -> bool:
    """Return whether one direction's epsilon is certified to be at most ``epsilon``, on a lattice as coarse as the gap
    allows.

    False without trying if the approximate epsilon is so close that the finest lattice would be needed.
    """
    rounds, saddle = asked.rounds, side.saddle
    margin = _SPENT_MARGIN * (1 - saddle.epsilon / max(epsilon, saddle.epsilon, 1e-300))
    if not margin > asked.tolerance:
        return False
    looked_at = (saddle, saddle_at_epsilon(side.generating, epsilon))
    aims = [replace(each, log_delta=math.log(asked.delta)) for each in looked_at]
    spacing_at = partial(spacing_for, rounds.count, tolerance=margin)
    found = first_fine(rounds, side.generating, side.other, aims, spacing_at, asked.tail)
    return found is not None and compose_upper(rounds, found[1]).epsilon_at(asked.delta).epsilon <= epsilon


def _bracket_epsilon(asked: _Asked, side: _Side, ceiling: float, enough: float = 0.0) -> _Bracket:
    """Return the bounds on the epsilon of one direction: compose, and refine the lattice until the bounds are close.

    ``ceiling`` is a known upper bound, returned if the lattice gives none below it. An upper bound up to ``enough`` is
    not refined, because the claim is at least that of the other direction.
    """
    rounds, delta, tolerance, saddle = asked.rounds, asked.delta, asked.tolerance, side.saddle
    spacing = spacing_for(rounds.count, saddle, tolerance * (_FINER if rounds.allocated else 1.0)) * asked.search.share
    enough_gap = tolerance * _ENOUGH
    upper, lower = ceiling, 0.0
    if saddle.epsilon > _HOPELESS:
        return _Bracket(upper, lower, None)
    for attempt in range(_ATTEMPTS):
        aim = replace(saddle, log_delta=math.log(delta))
        plan = make_plan(side.generating, side.other, aim, spacing, asked.tail, rounds.count)
        if is_too_coarse(rounds, plan):
            return _Bracket(upper, lower, None)
        composed = asked.search.compose(rounds, plan)
        above, below = composed.upper.epsilon_at(delta), composed.lower.epsilon_at(delta)
        upper, lower = min(upper, above.epsilon), max(lower, below.epsilon)
        if math.isinf(above.epsilon):
            return _Bracket(upper, lower, composed)
        scale = upper if rounds.allocated else max(upper, 1 / (1 + saddle.tilt))
        gap = (upper - lower) / scale if upper > lower else 0.0
        finest = plan.spacing > spacing or plan.points >= MAX_POINTS // 2
        hopeless = lower == 0.0 and upper > _VACUOUS
        is_done = gap <= enough_gap or upper <= enough or finest or hopeless or attempt == _ATTEMPTS - 1
        finer = None if is_done else asked.search.finer(asked, saddle, above.nearest, gap)
        if finer is None:
            return _Bracket(upper, lower, composed)
        enough_gap = tolerance * _ENOUGH * (2.0 if len(rounds.allocated) > _KEPT_LAWS else 1.0)
        spacing *= finer
        saddle = saddle_at_epsilon(side.generating, max(above.nearest, 0.0))
    raise AssertionError("unreachable: the last attempt returns")
