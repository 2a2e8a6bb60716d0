"""Deltas of runs of a single round, and of pure releases alone, which need no lattice.

One round. Let Q = N(0, 1) and P = sum_j p_j N(a_j, 1) with a_j >= 0. The loss log P / Q increases in the output x, so
the best event is a half line. With x at the loss ``epsilon``

    remove: delta = sum_j p_j (Phi(a_j - x) - Phi(-x)) - (e^epsilon - 1) Phi(-x),
    add, x at the loss -epsilon: delta = e^epsilon sum_j p_j (Phi(x) - Phi(x - a_j)) - (e^epsilon - 1) Phi(x).

Any x gives a value of at most delta, and the error of the root enters squared.

One block of random allocation. Deltas are sums over the atoms of bounds on the law of its mean ratio
(`dpsweep.accounting.pld.allocation`), from either side.

Pure releases. Each is dominated by randomised response: a loss of +e or -e with odds e^e : 1. The loss of several is a
sum of these signs; releases of equal epsilon need only the number of plus signs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from scipy import special

from dpsweep.accounting.numerics.roots import root
from dpsweep.accounting.pld.allocation import ROUNDING, mean_from_above, mean_from_below
from dpsweep.accounting.pld.allocation_transform import EvenLaw
from dpsweep.accounting.pld.group_rounds import GroupRounds
from dpsweep.accounting.pld.loss import DIRECTIONS, Direction
from dpsweep.accounting.pld.sensitivity import Array, RoundLaw, SensitivityMixture

_ROUNDING = 1e-14  # relative error allowed for each term; measured below 1e-15 times 1 + x^2 against 60 digits
_MOST_LOSSES = 1 << 20  # distinct losses of pure releases that are enumerated
_MOST_CORNERS = 1 << 10  # the same where delta is computed at each of them, and at a thousand other epsilons
_FARTHEST = 37.0  # outputs beyond which the normal tail nears underflow
_ROUND_UP = 1 + 1e-12  # far above the rounding error of probabilities that sum to 1
_BEYOND = 1e-299  # probability of the outputs beyond
LEAST_TAIL = 1e-20  # probability that a round may lose to infinity where delta is not known yet
HIGHEST_EXACT = 700.0  # epsilons above which e^epsilon overflows

Deltas = Callable[[float], tuple[float, float]]
"""Upper and lower delta at an epsilon; both fall as epsilon grows."""


def exact_deltas(rounds: GroupRounds, tail: float = LEAST_TAIL) -> Deltas | None:
    """Return the certified delta(epsilon) of one round alone or of pure releases alone; None for other runs.

    tail: about what a block of random allocation may lose to infinity.
    """
    if rounds.allocated:
        match rounds.allocated:
            case ((block, 1),) if not rounds.laws and not rounds.pure and not rounds.gaussian:
                above, below = mean_from_above(block, tail), mean_from_below(block, tail)
                return lambda epsilon: _of_one_block(above, below, epsilon)
        return None
    match rounds.laws:
        case ((law, 1),) if not rounds.pure and not rounds.gaussian and not law.missing:
            return lambda epsilon: _of_one_round(law, epsilon)
        case () if not rounds.gaussian and _number_of_losses(rounds.pure) <= _MOST_LOSSES:
            losses, log_weights = _pure_losses(rounds.pure)
            return lambda epsilon: _of_pure(rounds.pure, losses, log_weights, epsilon)
    return None


def corners(rounds: GroupRounds) -> Array | None:
    """Return the epsilons [corners] >= 0 at which delta of pure releases alone bends, the last where it becomes 0.

    Between them delta is linear in e^epsilon. None for other runs, and where there are too many.
    """
    if rounds.laws or rounds.allocated or rounds.gaussian or _number_of_losses(rounds.pure) > _MOST_CORNERS:
        return None
    losses, _ = _pure_losses(rounds.pure)
    largest = sum(map(Fraction, rounds.pure), Fraction(0))
    last = float(largest)
    last = last if Fraction(last) >= largest else math.nextafter(last, math.inf)
    return np.append(np.unique(losses[(losses >= 0.0) & (losses < last)]), last)


def exact_epsilon(deltas: Deltas, delta: float) -> tuple[float, float]:
    """Return (upper, lower) epsilon at ``delta``; the upper one is infinite if it is above 700."""
    upper = _least(lambda epsilon: deltas(epsilon)[0] <= delta)
    lower = _least(lambda epsilon: deltas(epsilon)[1] <= delta)
    return upper[1], lower[0]


def _least(holds: Callable[[float], bool]) -> tuple[float, float]:
    """Return neighbours (fails, holds) around the smallest epsilon that satisfies a monotone condition."""
    if holds(0.0):
        return 0.0, 0.0
    low, high = 0.0, 1e-12
    while not holds(high):
        if high == HIGHEST_EXACT:
            return high, math.inf
        low, high = high, min(2.0 * high, HIGHEST_EXACT)
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high


def _of_one_block(above: EvenLaw, below: EvenLaw, epsilon: float) -> tuple[float, float]:
    """Return (upper, lower) delta of the worse direction. above, below: laws of the mean, bounded from either side."""
    removed, added = (_expected(above, epsilon, direction) for direction in DIRECTIONS)
    upper = max(removed + above.lost_of_p, added + above.lost_of_q)
    lower = max(_expected(below, epsilon, direction) for direction in DIRECTIONS)
    return min(1.0, upper * (1.0 + 2.0 * ROUNDING)), lower * (1.0 - 2.0 * ROUNDING)


def _expected(law: EvenLaw, epsilon: float, direction: Direction) -> float:
    """Return E[(M - e^epsilon)+], or E[(1 - e^epsilon M)+] for adding."""
    beyond = law.values - 1.0  # exact near 1, where differences are small
    if direction is Direction.REMOVE:
        return float(law.masses @ np.maximum(beyond - math.expm1(epsilon), 0.0))
    return math.exp(epsilon) * float(law.masses @ np.maximum(math.expm1(-epsilon) - beyond, 0.0))


def _of_one_round(law: RoundLaw, epsilon: float) -> tuple[float, float]:
    """Return (upper, lower) delta of the worse direction: the mean over the cases, since the case drawn is revealed."""
    upper, lower = 0.0, 0.0
    for direction in DIRECTIONS:
        bounds = [(share, *_half_line(mixture, direction, epsilon)) for share, mixture in law.cases]
        upper = max(upper, math.fsum(share * above for share, above, _ in bounds) * _ROUND_UP)
        lower = max(lower, math.fsum(share * below for share, _, below in bounds) / _ROUND_UP)
    return min(1.0, upper), lower


def _half_line(mixture: SensitivityMixture, direction: Direction, epsilon: float) -> tuple[float, float]:
    """Return (upper, lower) delta of one direction.

    Rounding errors: of both terms, and of the loss at the root, which moves delta by at most that error times the mass
    of the half line.
    """
    shifts, weights = np.asarray(mixture.sensitivities), np.asarray(mixture.probabilities)
    sign = direction.sign

    def excess(output: float) -> float:
        return _loss(shifts, weights, output) - sign * epsilon

    low, high = -_FARTHEST, _FARTHEST + float(shifts[-1])
    if not excess(low) < 0.0 or not excess(high) > 0.0:
        return _BEYOND, 0.0
    x = root(excess, low, high, absolute=1e-13, relative=1e-15)
    tail, shifted = float(special.ndtr(-sign * x)), special.ndtr(sign * (shifts - x))
    gained = math.fsum(weights * sign * (shifted - tail)) * (
        1.0 if direction is Direction.REMOVE else math.exp(epsilon)
    )
    lost = math.expm1(epsilon) * tail
    misplaced = min(1.0, math.fsum(weights * np.abs(np.expm1(np.minimum(shifts * (x - shifts / 2), 1.0)))))
    terms = (
        math.exp(epsilon) * (math.fsum(weights[shifts > 0] * (shifted + tail)[shifts > 0]) + misplaced * tail) + lost
    )
    slack = _ROUNDING * (1.0 + x * x) * terms + _BEYOND
    return min(1.0, max(gained - lost, 0.0) + slack), max(gained - lost - slack, 0.0)


def _loss(shifts: Array, weights: Array, output: float) -> float:
    """Return log P / Q at an output, by the difference of P / Q from 1 unless it is near -1 or overflows."""
    exponents = shifts * (output - shifts / 2)
    difference = math.fsum(weights * np.expm1(np.minimum(exponents, HIGHEST_EXACT)))
    if exponents.max() < HIGHEST_EXACT and difference > -0.5:
        return math.log1p(difference)
    return float(special.logsumexp(exponents, b=weights))


def _number_of_losses(epsilons: tuple[float, ...]) -> int:
    """Return the length of `_pure_losses`."""
    return math.prod(count + 1 for count in Counter(epsilons).values())


def _pure_losses(epsilons: tuple[float, ...]) -> tuple[Array, Array]:
    """Return the distinct sums of signed epsilons and their log probabilities under P."""
    losses, log_weights = np.zeros(1), np.zeros(1)
    for epsilon, count in Counter(epsilons).items():
        plus = np.arange(count + 1)
        log_ways = special.gammaln(count + 1) - special.gammaln(plus + 1) - special.gammaln(count - plus + 1)
        log_weight = log_ways + plus * special.log_expit(epsilon) + (count - plus) * special.log_expit(-epsilon)
        losses = (losses[:, None] + epsilon * (2.0 * plus - count)).ravel()
        log_weights = (log_weights[:, None] + log_weight).ravel()
    return losses, log_weights


def _of_pure(epsilons: tuple[float, ...], losses: Array, log_weights: Array, epsilon: float) -> tuple[float, float]:
    """Return (upper, lower) delta: the mean of 1 - e^(epsilon - loss) over larger losses; both directions agree."""
    if sum(map(Fraction, epsilons)) <= Fraction(epsilon):
        return 0.0, 0.0
    above = losses > epsilon
    weights = np.exp(log_weights[above])
    delta = math.fsum(weights * -np.expm1(epsilon - losses[above]))
    digits = _ROUNDING * (1.0 + len(epsilons) * math.log1p(len(epsilons)) + math.fsum(epsilons))
    slack = digits * (delta + math.fsum(weights) * min(1.0, math.fsum(epsilons))) + _BEYOND
    return min(1.0, delta + slack), max(delta - slack, 0.0)
