"""Certified privacy of a whole trace: upper and lower bounds on epsilon or delta.

Guarantee: for a group of ``group_size`` examples under the trace's adjacency, the run is (upper, delta)-DP, with every
step's output visible and later steps chosen adaptively. lower is certainly not above the exact epsilon of the rounds'
dominating pairs, so the gap bounds what the numerics cost.

Method: each round's loss is discretised upwards and downwards on one lattice (`accounting.mixture.discretise`), the
rounds compose in the frequency domain (`accounting._fourier`, which lists the error terms), and an approximate answer
(`accounting._saddlepoint`) only decides where to look. Formulas and error analysis: docs/accounting.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from accounting._fourier import Composed, Plan, compose, compose_upper
from accounting._gaussian import gaussian_delta, gaussian_epsilon
from accounting._loss import DIRECTIONS
from accounting._plan import MAX_POINTS, make_plan, spacing_for
from accounting._rounds import Rounds, rounds_of_group
from accounting._saddlepoint import Cumulants, Saddle, cumulants, saddle_at_delta, saddle_at_epsilon
from accounting.errors import require_finite
from accounting.mechanism import Contributions, Trace

TOLERANCE = 2e-4  # the relative gap between upper and lower that is aimed at
MIN_DELTA = 1e-250  # below, the mass that a round may lose to infinity is not a double any more
_ATTEMPTS = 4
_ENOUGH = 1.5  # a gap of so many tolerances is not worth another composition
_COARSEST = 4.0  # spacing of losses from which on a lattice shows no more than the ceiling does
_STRONGEST = 1e6  # mean shift from which on the Gaussian's closed form has too few digits left
_SPENT_MARGIN = 0.5  # of the distance between two directions, what the coarseness of a lattice may use up


@dataclass(frozen=True)
class CertifiedEpsilon:
    """lower <= exact epsilon at ``delta`` <= upper; both are infinite for a run without noise.

    kind says what upper is worth for the run: an ``estimate`` where the pairs bounded here need not dominate its steps.
    """

    upper: float
    lower: float
    delta: float
    kind: Contributions = "guarantee"


@dataclass(frozen=True)
class CertifiedDelta:
    """lower <= exact delta at ``epsilon`` <= upper; both are 1 for a run without noise. kind is as above."""

    upper: float
    lower: float
    epsilon: float
    kind: Contributions = "guarantee"


def epsilon_pld(trace: Trace, delta: float, group_size: int = 1, tolerance: float = TOLERANCE) -> CertifiedEpsilon:
    """The epsilon of a trace at ``delta`` for a group of ``group_size`` examples, certified from both sides.

    The bounds hold whatever ``tolerance`` is; it is the relative gap that is aimed at. Raises InvalidInput for a delta
    outside [1e-250, 1).
    """
    return replace(epsilon_of_rounds(rounds_of_group(trace, group_size), delta, tolerance), kind=trace.kind)


def delta_pld(trace: Trace, epsilon: float, group_size: int = 1, tolerance: float = TOLERANCE) -> CertifiedDelta:
    """The delta of a trace at ``epsilon`` >= 0 for a group of ``group_size`` examples, certified from both sides."""
    return replace(delta_of_rounds(rounds_of_group(trace, group_size), epsilon, tolerance), kind=trace.kind)


@np.errstate(all="ignore")  # what overflows on the way becomes infinite or NaN, and neither ever helps a bound
def epsilon_of_rounds(rounds: Rounds, delta: float, tolerance: float = TOLERANCE) -> CertifiedEpsilon:
    """As `epsilon_pld`, for rounds from anywhere."""
    delta = require_finite("delta", delta, at_least=MIN_DELTA, below=1.0)
    tolerance = require_finite("tolerance", tolerance, above=0.0)
    if not rounds.is_private:
        return CertifiedEpsilon(math.inf, math.inf, delta)
    if not rounds.mixtures and not rounds.pure:
        upper, lower = gaussian_epsilon(rounds.gaussian, delta)
        return CertifiedEpsilon(upper, lower, delta)
    ceiling = _epsilon_ceiling(rounds, delta)
    if ceiling == 0.0:
        return CertifiedEpsilon(0.0, 0.0, delta)
    tail = _tail(rounds, delta)
    pair = [cumulants(rounds, direction, tail) for direction in DIRECTIONS]
    saddles = [saddle_at_delta(generating, math.log(delta)) for generating in pair]
    first = int(saddles[1].epsilon > saddles[0].epsilon)
    worse = _bracket_epsilon(rounds, delta, tolerance, pair[first], pair[1 - first], saddles[first], ceiling)
    if worse.upper == ceiling or worse.opposite_delta(worse.upper) <= delta:
        return CertifiedEpsilon(worse.upper, worse.lower, delta)
    if _is_below(rounds, worse.upper, delta, tolerance, pair[1 - first], pair[first], saddles[1 - first]):
        return CertifiedEpsilon(worse.upper, worse.lower, delta)
    other = _bracket_epsilon(
        rounds, delta, tolerance, pair[1 - first], pair[first], saddles[1 - first], ceiling, worse.lower
    )
    return CertifiedEpsilon(max(worse.upper, other.upper), max(worse.lower, other.lower), delta)


@np.errstate(all="ignore")
def delta_of_rounds(rounds: Rounds, epsilon: float, tolerance: float = TOLERANCE) -> CertifiedDelta:
    """As `delta_pld`, for rounds from anywhere."""
    epsilon = require_finite("epsilon", epsilon, at_least=0.0)
    tolerance = require_finite("tolerance", tolerance, above=0.0)
    if not rounds.is_private:
        return CertifiedDelta(1.0, 1.0, epsilon)
    if not rounds.mixtures and not rounds.pure:
        return CertifiedDelta(*gaussian_delta(rounds.gaussian, epsilon), epsilon)
    ceiling = _delta_ceiling(rounds, epsilon)
    if ceiling < MIN_DELTA:
        return CertifiedDelta(ceiling, 0.0, epsilon)
    pair = [cumulants(rounds, direction, 1e-20) for direction in DIRECTIONS]
    saddles = [saddle_at_epsilon(generating, epsilon) for generating in pair]
    tail = _tail(rounds, math.exp(max(saddle.log_delta for saddle in saddles)))
    pair = [cumulants(rounds, direction, tail) for direction in DIRECTIONS]
    pair.sort(key=lambda generating: -saddle_at_epsilon(generating, epsilon).log_delta)
    upper, lower = 0.0, 0.0
    for generating, other in (pair, pair[::-1]):
        saddle = saddle_at_epsilon(generating, epsilon)
        spacing = spacing_for(rounds, saddle, tolerance)
        plan = make_plan(generating, other, saddle, spacing, tail, rounds.count)
        if not _shows_something(rounds, plan):
            return CertifiedDelta(ceiling, lower, epsilon)
        composed = compose(rounds, plan)
        upper, lower = max(upper, composed.upper.delta_at(epsilon)), max(lower, composed.lower.delta_at(epsilon))
        if composed.opposite_delta(epsilon) <= upper:
            break
    return CertifiedDelta(min(ceiling, upper), lower, epsilon)


@dataclass(frozen=True)
class _Bracket:
    upper: float
    lower: float
    composed: Composed | None

    def opposite_delta(self, epsilon: float) -> float:
        return 1.0 if self.composed is None else self.composed.opposite_delta(epsilon)


def _epsilon_ceiling(rounds: Rounds, delta: float) -> float:
    """An epsilon for both directions without a lattice, which shows nothing where noise is very weak or very strong.

    A mixture of Gaussians is made from the Gaussian of its largest sensitivity without looking at the data: draw the
    sensitivity, shrink the output to it, and add the noise that this removed. So all rounds together are dominated by
    one Gaussian; the missing probabilities add to delta, and pure releases to epsilon.
    """
    mean, missing = _dominating_gaussian(rounds)
    left = (delta - missing) * (1 - 1e-3)
    if not left > 0.0:
        return math.inf
    of_gaussian = gaussian_epsilon(mean, left)[0] if mean < _STRONGEST else math.inf
    chernoff = mean * (mean / 2 + math.sqrt(-2 * math.log(left))) * (1 + 1e-9)  # Pr[N > z] <= exp(-z^2 / 2)
    return min(of_gaussian, chernoff) + math.fsum(rounds.pure)


def _delta_ceiling(rounds: Rounds, epsilon: float) -> float:
    """As `_epsilon_ceiling`: a delta for both directions at ``epsilon``."""
    mean, missing = _dominating_gaussian(rounds)
    left = epsilon * (1 - 1e-12) - math.fsum(rounds.pure) * (1 + 1e-12)
    return min(1.0, gaussian_delta(mean, left)[0] + missing) if left >= 0.0 else 1.0


def _dominating_gaussian(rounds: Rounds) -> tuple[float, float]:
    """The mean shift of the Gaussian of `_epsilon_ceiling`, and what it adds to delta."""
    shifts = (mixture.sensitivities[-1] * math.sqrt(count) for mixture, count in rounds.mixtures)
    mean = math.hypot(rounds.gaussian, *shifts) * (1 + 1e-12)
    return mean, math.fsum(count * mixture.missing for mixture, count in rounds.mixtures)


def _shows_something(rounds: Rounds, plan: Plan) -> bool:
    """Whether a lattice is fine enough to show more than the ceiling does, and holds the losses of pure releases."""
    fits = max(rounds.pure, default=0.0) <= plan.spacing * MAX_POINTS
    return plan.spacing <= _COARSEST and math.isfinite(plan.bottom) and fits


def _tail(rounds: Rounds, delta: float) -> float:
    """Probability that each round may lose to infinity: together a negligible share of delta."""
    return max(delta * 1e-8 / rounds.count, 1e-300)


def _is_below(
    rounds: Rounds,
    epsilon: float,
    delta: float,
    tolerance: float,
    generating: Cumulants,
    other: Cumulants,
    saddle: Saddle,
) -> bool:
    """Whether one direction's epsilon is certainly at most ``epsilon``, on the coarsest lattice that shows it.

    Not tried where the approximate answer is so close that it would take the finest lattice.
    """
    margin = _SPENT_MARGIN * (1 - saddle.epsilon / max(epsilon, saddle.epsilon, 1e-300))
    if not margin > tolerance:
        return False
    aim = replace(saddle, log_delta=math.log(delta))
    plan = make_plan(generating, other, aim, spacing_for(rounds, saddle, margin), _tail(rounds, delta), rounds.count)
    return _shows_something(rounds, plan) and compose_upper(rounds, plan).epsilon_at(delta).epsilon <= epsilon


def _bracket_epsilon(
    rounds: Rounds,
    delta: float,
    tolerance: float,
    generating: Cumulants,
    other: Cumulants,
    saddle: Saddle,
    ceiling: float,
    enough: float = 0.0,
) -> _Bracket:
    """Bounds on the epsilon of one direction: compose, and refine the lattice until the bounds are close.

    ``ceiling`` is an upper bound known before; it stays where the lattice has none. An upper bound below ``enough``
    needs no refinement: the other direction is certainly worse.
    """
    tail = _tail(rounds, delta)
    spacing = spacing_for(rounds, saddle, tolerance)
    upper, lower = ceiling, 0.0
    for attempt in range(_ATTEMPTS):
        aim = replace(saddle, log_delta=math.log(delta))
        plan = make_plan(generating, other, aim, spacing, tail, rounds.count)
        if not _shows_something(rounds, plan):
            return _Bracket(upper, lower, None)
        composed = compose(rounds, plan)
        above, below = composed.upper.epsilon_at(delta), composed.lower.epsilon_at(delta)
        upper, lower = min(upper, above.epsilon), max(lower, below.epsilon)
        if math.isinf(above.epsilon):
            return _Bracket(upper, lower, composed)
        gap = (upper - lower) / max(upper, 1 / (1 + saddle.tilt))
        if gap <= _ENOUGH * tolerance or upper <= enough or plan.points >= MAX_POINTS // 2 or attempt == _ATTEMPTS - 1:
            return _Bracket(upper, lower, composed)
        spacing = plan.spacing * float(np.clip(0.8 * np.sqrt(tolerance / gap), 0.1, 0.7))
        saddle = saddle_at_epsilon(generating, max(above.nearest, 0.0))
    raise AssertionError("unreachable: the last attempt returns")
