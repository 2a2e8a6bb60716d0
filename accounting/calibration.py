"""Solve for a parameter: the noise, the decay or the length of a run that meets a privacy target.

Every solver works on a cost that is monotone in the parameter, brackets the solution, refines it, and returns a value
on the safe side that was itself evaluated and found to meet the target.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from accounting.accountants import account, total_rho
from accounting.errors import (
    InvalidInput,
    Unreachable,
    UnsupportedMechanism,
    keep_finite,
    require_finite,
    require_whole,
)
from accounting.mechanism import Trace
from accounting.registry import lookup
from accounting.rounds import require_group_size
from accounting.schedules import (
    LARGEST_EPOCHS,
    SCHEDULES,
    DecayParameter,
    NoiseSchedule,
    make_schedule,
)

SEARCHED_NOISE_MULTIPLIERS = (1e-2, 1e6)
"""The range in which a noise multiplier is sought."""

_TOLERANCE = 1e-6
_ROUNDING = 1e-12
_DIGITS = 6


class Budget(Protocol):
    """What a run may cost."""

    @property
    def limit(self) -> float: ...

    @property
    def unit(self) -> str: ...

    @property
    def resolution(self) -> float:
        """How finely, relative to the limit, it pays to solve for the cost."""
        ...

    def cost(self, trace: Trace) -> float: ...


@dataclass(frozen=True)
class RhoBudget:
    """A budget of zero-concentrated DP, as in paper C: shuffled epochs cost 1/(2 sigma^2) each."""

    limit: float
    group_size: int = 1
    unit: str = "rho"
    resolution: float = 0.0

    def __post_init__(self) -> None:
        keep_finite(self, "limit", "budget rho", above=0.0)
        object.__setattr__(self, "group_size", require_group_size(self.group_size))

    def cost(self, trace: Trace) -> float:
        return total_rho(trace, self.group_size)


@dataclass(frozen=True)
class EpsilonBudget:
    """A budget of epsilon at ``delta``, as ``accountant`` measures it, for groups of ``group_size`` examples."""

    limit: float
    delta: float
    accountant: str = "auto"
    group_size: int = 1
    unit: str = "epsilon"

    def __post_init__(self) -> None:
        keep_finite(self, "limit", "target epsilon", above=0.0)
        keep_finite(self, "delta", "delta", above=0.0, below=1.0)
        object.__setattr__(self, "group_size", require_group_size(self.group_size))

    @property
    def resolution(self) -> float:
        """The bounds of pld are 1e-4 apart, and every evaluation of it costs: solving more finely gains nothing."""
        return 5e-5 if self.accountant in ("pld", "auto") else 0.0

    def cost(self, trace: Trace) -> float:
        return account(trace, self.delta, self.accountant, self.group_size).epsilon


def count_within_budget(trace_of: Callable[[int], Trace], budget: Budget, at_most: int) -> int:
    """How many steps or epochs, 0 to ``at_most``, stay within ``budget``; trace_of gives the run of that length.

    A budget that is reached exactly, to floating-point rounding, is not passed (paper C: training ends before the
    first epoch whose cost would pass the budget).
    """
    at_most = require_whole("the longest run", at_most, at_least=0)
    return _largest_count(lambda length: budget.cost(trace_of(length)), budget.limit, at_most)


def length_within_budget(trace_of: Callable[[int], Trace], budget: Budget, at_most: int) -> int:
    """`count_within_budget` for a question that must have an answer.

    Raises: Unreachable when not even a run of length 1 does, or when one of ``at_most`` still does.
    """
    found = count_within_budget(trace_of, budget, at_most)
    if found == 0:
        raise Unreachable(
            f"{budget.unit} {budget.limit:g} is unreachable: a run of length 1 already costs {budget.unit} "
            f"{budget.cost(trace_of(1)):.6g}; raise the target or the noise multiplier"
        )
    if found == at_most:
        raise Unreachable(
            f"{budget.unit} {budget.limit:g} outlasts the longest run of {at_most}, which costs {budget.unit} "
            f"{budget.cost(trace_of(at_most)):.6g}; lower the target or the noise multiplier"
        )
    return found


def calibrate_noise_multiplier(
    trace_of: Callable[[float], Trace],
    target_epsilon: float,
    delta: float,
    accountant: str = "pld",
    group_size: int = 1,
) -> float:
    """The smallest noise multiplier whose run meets (target_epsilon, delta), rounded up to six digits.

    trace_of maps a noise multiplier, or the initial one of a schedule, to the run that it would give.
    Raises: Unreachable when no noise multiplier up to 1e6 meets the target.
    """
    return noise_multiplier_within_budget(trace_of, EpsilonBudget(target_epsilon, delta, accountant, group_size))


def noise_multiplier_within_budget(trace_of: Callable[[float], Trace], budget: Budget) -> float:
    """The smallest noise multiplier, to six digits and the budget's resolution, whose run stays within ``budget``."""

    def excess(noise_multiplier: float) -> float:
        return _excess(budget.cost(trace_of(noise_multiplier)), budget.limit)

    found = _smallest(excess, *_guess(trace_of, budget), SEARCHED_NOISE_MULTIPLIERS, budget.resolution)
    if found is None:
        largest = SEARCHED_NOISE_MULTIPLIERS[1]
        raise Unreachable(
            f"{budget.unit} {budget.limit:g} is unreachable: even noise multiplier {largest:g} costs {budget.unit} "
            f"{budget.cost(trace_of(largest)):.6g}; raise the target or spend less on side queries and releases"
        )
    return found


def calibrate_decay(
    name: str,
    initial_noise_multiplier: float,
    epochs: int,
    budget: Budget,
    trace_of: Callable[[NoiseSchedule, int], Trace],
    decimals: int | None = None,
    **params: Any,
) -> float:
    """The smallest decay parameter of the schedule ``name`` with which ``budget`` lasts exactly ``epochs`` epochs.

    Exactly: so many epochs stay within the budget and one more would pass it (paper C, Table III, whose values are
    these rounded up to their printed digits). The parameter is the schedule's own (`NoiseSchedule.decay_parameter`);
    ``params`` are its others. trace_of(schedule, n) is the run of n epochs. The result is rounded up to ``decimals``
    decimals, by default to six significant digits.

    Raises: Unreachable, naming how long the budget can be made to last, when no value makes it last ``epochs`` epochs.
    """
    parameter = decay_parameter(name)
    epochs = require_whole("epochs", epochs, at_least=1, at_most=LARGEST_EPOCHS)
    if decimals is not None:
        decimals = require_whole("decimals", decimals, at_least=0, at_most=300)

    def cost(value: float, length: int) -> float:
        schedule = make_schedule(name, initial_noise_multiplier, **params, **{parameter.name: value})
        return budget.cost(trace_of(schedule, length))

    def excess(value: float) -> float:
        # Falls with the value: a slower decay affords the epochs, or a faster one no longer affords one more.
        length = epochs if parameter.sign > 0 else epochs + 1
        return parameter.sign * _excess(cost(value, length), budget.limit)

    lowest, highest = 1e-9, parameter.highest
    found = _smallest(excess, 0.05, 0.1, (lowest, highest))
    if found is not None:
        value = found if decimals is None else round_up(found, decimals)
        if _fits(cost(value, epochs), budget.limit) and not _fits(cost(value, epochs + 1), budget.limit):
            return value
    lasts = sorted(_largest_count(functools.partial(cost, value), budget.limit, 10_000) for value in (lowest, highest))
    places = "" if decimals is None else f" with {decimals} decimals"
    raise Unreachable(
        f"no {parameter.name}{places} of schedule {name!r} makes {budget.unit} {budget.limit:g} last {epochs} epochs: "
        f"it lasts between {lasts[0]} and {lasts[1]}; choose epochs in between or another initial noise multiplier"
    )


def decay_parameter(name: str) -> DecayParameter:
    """What decays in the schedule ``name``; InvalidInput for a schedule without such a parameter."""
    parameter = lookup(SCHEDULES, name, "schedule").decay_parameter
    if parameter is None:
        raise InvalidInput(f"schedule {name!r} has no decay to solve for; choose time, exponential, step or polynomial")
    return parameter


def round_up(value: float, decimals: int | None = None) -> float:
    """``value`` > 0 rounded up to so many decimals, by default to six significant digits; never below it."""
    value = require_finite("the value to round up", value, above=0.0)
    places = _DIGITS - 1 - math.floor(math.log10(value)) if decimals is None else decimals
    rounded = round(value, places)
    return rounded if rounded >= value else round(rounded + 10.0**-places, places)


def _guess(trace_of: Callable[[float], Trace], budget: Budget) -> tuple[float, float]:
    """A starting point and a first stride for the search, which is correct from any.

    The rdp accountant is cheap, and typically asks for 5 % more noise than the tightest one.
    """
    if not isinstance(budget, EpsilonBudget) or budget.accountant == "rdp":
        return 1.0, 0.5
    single = EpsilonBudget(budget.limit / budget.group_size, budget.delta, "rdp")
    try:
        found = _smallest(
            lambda sigma: _excess(single.cost(trace_of(sigma)), single.limit),
            1.0,
            0.5,
            SEARCHED_NOISE_MULTIPLIERS,
            waste=1e-3,
        )
    except UnsupportedMechanism:
        return 1.0, 0.5
    return (0.95 * found, 0.02) if found else (1.0, 0.5)


def _fits(cost: float, limit: float) -> bool:
    """Whether a cost, a sum of many rounded terms, is at most ``limit``."""
    return cost <= limit * (1.0 + _ROUNDING)


def _excess(cost: float, limit: float) -> float:
    """How far ``cost`` >= 0 is above ``limit``, relative to it when close; at most 2, so that infinity does no harm."""
    return 2.0 if math.isinf(cost) else 2.0 * (cost - limit) / (cost + limit)


def _smallest(
    excess: Callable[[float], float], guess: float, stride: float, bounds: tuple[float, float], waste: float = 0.0
) -> float | None:
    """The smallest number of six digits within ``bounds`` with excess(x) <= 0; one of -waste or more will do.

    ``excess`` falls with x. None when it is positive even at the upper bound, the lower bound when negative there.
    Brackets by growing strides in log x and then interpolates (regula falsi with the Illinois rule).
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
    """The largest count in [0, at_most] with cost(count) <= limit, for a cost that grows with the count."""
    low, high = 0, 1
    while high <= at_most and _fits(cost(high), limit):
        low, high = high, 2 * high
    high = min(high, at_most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(cost(middle), limit) else (low, middle)
    return low
