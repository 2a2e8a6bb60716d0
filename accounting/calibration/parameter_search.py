"""Solve for a parameter: the noise, the decay or the length of a run that meets a privacy target.

The cost is monotone in the parameter. Each solver brackets the solution, refines the bracket, and returns a value on
the safe side whose own cost was evaluated and meets the target.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from dpsweep.accounting.accountants.methods import total_rdp
from dpsweep.accounting.calibration.budgets import Budget, EpsilonBudget
from dpsweep.accounting.errors import (
    InvalidInput,
    Unreachable,
    UnsupportedMechanism,
    count_of,
    require_finite,
    require_whole,
)
from dpsweep.accounting.mechanism.filters import GaussianFilter, IndividualFilter, RenyiFilter, conversion
from dpsweep.accounting.mechanism.rounds import enforced_epsilon
from dpsweep.accounting.mechanism.samplings import Draws, PoissonSampling
from dpsweep.accounting.mechanism.schedules import (
    LARGEST_EPOCHS,
    SCHEDULES,
    DecayParameter,
    NoiseSchedule,
    make_schedule,
)
from dpsweep.accounting.mechanism.trace import Segment, Trace, require_filterable
from dpsweep.accounting.numerics.renyi import ORDERS
from dpsweep.accounting.numerics.roots import root
from dpsweep.accounting.registry import lookup

T = TypeVar("T", int, float)

SEARCHED_NOISE_MULTIPLIERS = (1e-2, 1e6)
"""The range in which a noise multiplier is searched."""

_FEW_SEGMENTS = 8
"""About how many segments the approximate run has that starts the search for a noise multiplier."""
_TOLERANCE = 1e-6
"""Relative width of the bracket at which a search ends."""
_ROUNDING = 1e-12
"""Relative excess of a cost over its limit that counts as rounding error."""
_DIGITS = 6
"""Significant digits of the results of searches."""
_MARGIN = 1e-8
"""Share of a filter's budget reserved for rounding errors, and the smallest budget that is searched."""


def calibrate_filter(planned: Trace, epsilon: float, delta: float) -> IndividualFilter:
    """Return the filter under which every example's epsilon at ``delta`` is at most ``epsilon``, whatever a run does.

    planned: the complete run without a filter; the budget pays for its releases first. Full batches get a Gaussian DP
    filter, other batches a Renyi DP filter. Its order is fixed here: the order at which an example that contributes in
    full to every step can train for the most steps.

    Raises: Unreachable when the releases alone cost as much, UnsupportedMechanism for a run that no filter covers.
    """
    epsilon = require_finite("epsilon of a filter", epsilon, above=0.0)
    delta = require_finite("delta", delta, above=0.0, below=1.0)
    for segment in planned.segments:
        require_filterable(segment, RenyiFilter(1.0, 2))
    full = all(segment.sampling.sample_rate == 1.0 for segment in planned.segments)
    found = _gaussian_filter(planned, epsilon, delta) if full else _renyi_filter(planned, epsilon, delta)
    if found is None:
        raise Unreachable(
            f"nothing is left of a budget of epsilon {epsilon:g} at delta {delta:g} for the steps, after what is "
            "released besides them; raise the budget, or the noise of the releases"
        )
    return found


def _renyi_filter(planned: Trace, epsilon: float, delta: float) -> RenyiFilter | None:
    steps, best, longest = replace(planned, releases=()), None, 0.0
    costs = total_rdp(steps)
    releases = total_rdp(replace(planned, segments=()))
    for index in np.flatnonzero((np.floor(ORDERS) == ORDERS) & (ORDERS >= 2.0)):
        order = int(ORDERS[index])
        budget = (epsilon - conversion(order, delta)) * (1.0 - _MARGIN) - releases[index]
        if budget > 0.0 and budget / costs[index] > longest:
            best, longest = RenyiFilter(_rounded(budget), order), budget / costs[index]
    return best


def _gaussian_filter(planned: Trace, epsilon: float, delta: float) -> GaussianFilter | None:
    """Return the largest mu^2 whose epsilon, with the releases, is within the budget."""

    def excess(log_square: float) -> float:
        return enforced_epsilon(GaussianFilter(math.exp(log_square)), planned, delta) - epsilon

    lowest, highest = math.log(_MARGIN), math.log(1.0 / _MARGIN)
    if not excess(lowest) < 0.0:
        return None
    if excess(highest) < 0.0:
        return GaussianFilter(math.exp(highest))
    log_square = root(excess, lowest, highest, absolute=1e-12)
    return GaussianFilter(_rounded(math.exp(log_square) * (1.0 - _MARGIN)))


def _rounded(budget: float) -> float:
    """``budget`` rounded to ten digits, by less than `_MARGIN`: the last digits differ between machines."""
    return float(f"{budget:.10g}")


def count_within_budget(trace_of: Callable[[int], Trace], budget: Budget, at_most: int) -> int:
    """Return the largest number of steps or epochs, from 0 to ``at_most``, whose run stays within ``budget``.

    trace_of(n) is the run of length n. A cost equal to the limit, up to floating-point rounding, is within the budget
    (paper C: training ends before the first epoch that would exceed it).
    """
    at_most = require_whole("the longest run", at_most, at_least=0)
    return _largest_count(_cost(trace_of, budget), budget.limit, at_most)


def length_within_budget(trace_of: Callable[[int], Trace], budget: Budget, at_most: int) -> int:
    """Return `count_within_budget`, with an error where the budget does not determine a length.

    Raises: Unreachable when a run of length 1 exceeds the budget, or when one of length ``at_most`` stays within it.
    """
    at_most, cost = require_whole("the longest run", at_most, at_least=0), functools.cache(_cost(trace_of, budget))
    found = _largest_count(cost, budget.limit, at_most)
    if found == 0:
        raise Unreachable(
            f"{budget.unit} {budget.limit:g} is unreachable: a run of length 1 already costs {budget.unit} "
            f"{cost(1):.6g}; raise the target or the noise multiplier"
        )
    if found == at_most:
        raise Unreachable(
            f"{budget.unit} {budget.limit:g} outlasts the longest run of {at_most}, which costs {budget.unit} "
            f"{cost(at_most):.6g}; lower the target or the noise multiplier"
        )
    return found


def calibrate_noise_multiplier(
    trace_of: Callable[[float], Trace],
    target_epsilon: float,
    delta: float,
    accountant: str = "pld",
    group_size: int = 1,
) -> float:
    """Return the smallest noise multiplier whose run meets (target_epsilon, delta), rounded up to six digits.

    trace_of maps a noise multiplier (for a schedule: the initial one) to the planned run.

    Raises: Unreachable when no noise multiplier up to 1e6 meets the target.
    """
    return noise_multiplier_within_budget(trace_of, EpsilonBudget(target_epsilon, delta, accountant, group_size))


def noise_multiplier_within_budget(trace_of: Callable[[float], Trace], budget: Budget) -> float:
    """Return the smallest noise multiplier whose run stays within ``budget``, rounded up to six digits.

    It is found to the budget's resolution. trace_of maps a noise multiplier to the planned run.

    Raises: Unreachable when no noise multiplier up to 1e6 stays within the budget.
    """
    cost = functools.cache(_cost(trace_of, budget))  # a message names a cost again, which may take seconds

    def excess(noise_multiplier: float) -> float:
        return _excess(cost(noise_multiplier), budget.limit)

    found = _smallest(excess, *_guess(trace_of, budget), SEARCHED_NOISE_MULTIPLIERS, budget.resolution)
    if found is None:
        largest = SEARCHED_NOISE_MULTIPLIERS[1]
        raise Unreachable(
            f"{budget.unit} {budget.limit:g} is unreachable: even noise multiplier {largest:g} costs {budget.unit} "
            f"{cost(largest):.6g}; raise the target or spend less on side queries and releases"
        )
    return found


def calibrate_decay(
    name: str,
    initial_noise_multiplier: float,
    epochs: int,
    budget: Budget,
    trace_of: Callable[[NoiseSchedule, int], Trace],
    params: Mapping[str, Any] = MappingProxyType({}),
) -> float:
    """Return the smallest decay parameter of the schedule ``name`` with which ``budget`` lasts exactly ``epochs``
    epochs.

    Exactly: ``epochs`` epochs stay within the budget, and one more exceeds it. Paper C's Table III prints these values,
    rounded up. The parameter solved for is `NoiseSchedule.decay_parameter`; ``params`` are the schedule's other ones.
    trace_of(schedule, n) is the run of n epochs. The result is rounded up to six significant digits.

    Raises: Unreachable when no value makes the budget last ``epochs`` epochs; the message names how long it can last.
    InvalidInput for a parameter that ``params`` gives though it is solved for.
    """
    parameter = decay_parameter(name)
    if parameter.name in params:
        raise InvalidInput(f"{parameter.name!r} of schedule {name!r} is what is being solved for: drop it")
    epochs = require_whole("epochs", epochs, at_least=1, at_most=LARGEST_EPOCHS)

    def cost(value: float, length: int) -> float:
        schedule = make_schedule(name, initial_noise_multiplier, **params, **{parameter.name: value})
        return budget.cost(trace_of(schedule, length))

    def excess(value: float) -> float:
        # Decreases in the value. sign 1: less decay until the epochs fit; sign -1: more decay until one more does not.
        length = epochs if parameter.sign > 0 else epochs + 1
        return parameter.sign * _excess(cost(value, length), budget.limit)

    lowest, highest = 1e-9, parameter.highest
    slowest = highest if parameter.sign > 0 else lowest
    reachable = _fits(cost(slowest, epochs), budget.limit)
    found = _smallest(excess, 0.05, 0.1, (lowest, highest)) if reachable else None
    if found is not None:
        is_exact = _fits(cost(found, epochs), budget.limit) and not _fits(cost(found, epochs + 1), budget.limit)
        if is_exact:
            return found
    lasts = sorted(_largest_count(functools.partial(cost, value), budget.limit, 10_000) for value in (lowest, highest))
    raise Unreachable(
        f"no {parameter.name} of schedule {name!r} makes {budget.unit} {budget.limit:g} last "
        f"{count_of(epochs, 'epoch')}: it lasts between {lasts[0]} and {lasts[1]}; "
        "choose epochs in between or another initial noise multiplier"
    )


def decay_parameter(name: str) -> DecayParameter:
    """Return the decay parameter of the schedule ``name``; InvalidInput for a schedule without one."""
    parameter = lookup(SCHEDULES, name, "schedule").decay_parameter
    if parameter is None:
        raise InvalidInput(f"schedule {name!r} has no decay to solve for; choose time, exponential, step or polynomial")
    return parameter


def round_up(value: float, decimals: int | None = None) -> float:
    """Return ``value`` > 0 rounded up to ``decimals`` decimals, by default to six significant digits.

    >>> round_up(1.23456789), round_up(0.01812, 3)
    (1.23457, 0.019)
    """
    value = require_finite("the value to round up", value, above=0.0)
    places = _DIGITS - 1 - math.floor(math.log10(value)) if decimals is None else decimals
    rounded = round(value, places)
    return rounded if rounded >= value else round(rounded + 10.0**-places, places)


def epsilon_text(epsilon: float) -> str:
    """Return an upper bound on epsilon as text, rounded up to four decimals.

    >>> epsilon_text(0.71801), epsilon_text(225.30012), epsilon_text(0.0), epsilon_text(math.inf)
    ('0.7181', '225.3002', '0.0000', 'infinite')
    """
    if not epsilon < math.inf:
        return "infinite"
    return f"{round_up(epsilon, 4) if epsilon > 0.0 else 0.0:.4f}"


def _cost(trace_of: Callable[[T], Trace], budget: Budget) -> Callable[[T], float]:
    return lambda parameter: budget.cost(trace_of(parameter))


def _guess(trace_of: Callable[[float], Trace], budget: Budget) -> tuple[float, float]:
    """Return a starting point and a first stride for the search; they affect its speed, not its result.

    A run with many noise multipliers is costly to account for; a similar run with few of them is solved first.
    """
    rough = budget.roughly()
    if rough is None:
        return 1.0, 0.5

    def solved(budget: Budget, guess: float, stride: float) -> float | None:
        def excess(sigma: float) -> float:
            return _excess(budget.cost(_in_few_segments(sampled_alike(trace_of(sigma)))), budget.limit)

        return _smallest(excess, guess, stride, SEARCHED_NOISE_MULTIPLIERS, waste=1e-3)

    try:
        found = solved(rough, 1.0, 0.5)
    except UnsupportedMechanism:
        return 1.0, 0.5
    if not found:
        return 1.0, 0.5
    run = trace_of(found)
    if _in_few_segments(run) is run:
        return 0.95 * found, 0.02
    return solved(budget, 0.95 * found, 0.02) or found, 0.002


def sampled_alike(trace: Trace) -> Trace:
    """Return a run of nearly the same cost: random allocation as Poisson batches, which Renyi DP covers."""
    segments = tuple(
        replace(segment, sampling=PoissonSampling(1.0 / segment.sampling.steps_per_round))
        if segment.sampling.draws is Draws.ALLOCATED
        else segment
        for segment in trace.segments
    )
    return replace(trace, segments=segments)


def _in_few_segments(trace: Trace) -> Trace:
    """Return a run of nearly the same cost, with neighbouring segments of one sampling merged into one of mean
    precision.

    An approximation to start a search from. A run of few segments is returned as it is.
    """
    several = -(-len(trace.segments) // _FEW_SEGMENTS)
    if several < 2:
        return trace
    merged: list[Segment] = []
    for sampling, group in itertools.groupby(trace.segments, key=lambda segment: segment.sampling):
        alike = list(group)
        for first in range(0, len(alike), several):
            part = alike[first : first + several]
            steps = sum(segment.steps for segment in part)
            precision = math.fsum(segment.steps * segment.noise_multiplier**-2 for segment in part) / steps
            start = merged[-1].stop_step if merged else 0
            merged.append(Segment(start, steps, sampling, precision**-0.5, part[0].side_queries))
    return replace(trace, segments=tuple(merged))


def _fits(cost: float, limit: float) -> bool:
    """Return whether ``cost`` is at most ``limit``, up to the rounding of a sum of many terms."""
    return cost <= limit * (1.0 + _ROUNDING)


def _excess(cost: float, limit: float) -> float:
    """Relative excess of ``cost`` >= 0 over ``limit``, from -2 to 2 (an infinite cost)."""
    return 2.0 if math.isinf(cost) else 2.0 * (cost - limit) / (cost + limit)


def _smallest(
    excess: Callable[[float], float], guess: float, stride: float, bounds: tuple[float, float], waste: float = 0.0
) -> float | None:
    """Return the smallest number of six digits within ``bounds`` with excess(x) <= 0.

    ``excess`` decreases in x. The search stops early at any x with -waste <= excess(x) <= 0. Returns None if the excess
    is positive at the upper bound, and the lower bound if it is not positive there. Brackets by growing strides in
    log x and then interpolates (regula falsi with the Illinois rule).
    """
    lowest, highest = bounds
    low = high = round_up(min(max(guess, lowest), highest))
    above = below = excess(high)
    while below > 0.0:
        if high >= highest:
            return None
        low, above, high, stride = high, below, round_up(min(high * math.exp(stride), highest)), 2.0 * stride
        below = excess(high)
    while above <= 0.0:
        if low <= lowest:
            return low
        high, below, low, stride = low, above, round_up(max(low * math.exp(-stride), lowest)), 2.0 * stride
        above = excess(low)
    aim = -0.5 * waste
    weight_low, weight_high, moved = above - aim, aim - below, ""
    while high > low * (1.0 + _TOLERANCE) and below < -waste:
        candidates = (weight_low / (weight_low + weight_high), 0.5)
        x = next((x for x in (round_up(low * (high / low) ** share) for share in candidates) if low < x < high), high)
        if x == high:
            break
        value = excess(x)
        if value > 0.0:
            weight_high *= 0.5 if moved == "low" else 1.0
            low, weight_low, moved = x, value - aim, "low"
        else:
            weight_low *= 0.5 if moved == "high" else 1.0
            high, below, weight_high, moved = x, value, aim - value, "high"
    return high


def _largest_count(cost: Callable[[int], float], limit: float, at_most: int) -> int:
    """Return the largest count in [0, at_most] with cost(count) <= limit, for a cost that increases with the count."""
    low, high = 0, min(1, at_most)
    while low < high and _fits(cost(high), limit):
        if high == at_most:
            return at_most
        low, high = high, min(2 * high, at_most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(cost(middle), limit) else (low, middle)
    return low
