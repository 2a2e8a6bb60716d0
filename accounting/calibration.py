"""Solve for a parameter: the noise, the decay or the length of a run that meets a privacy target.

Every solver works on a cost that is monotone in the parameter, brackets the solution, refines it, and returns a value
on the safe side that was itself evaluated and found to meet the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from scipy.optimize import brentq

from accounting.accountants import account, total_rho
from accounting.errors import InvalidInput, Unreachable, UnsupportedMechanism, require_finite
from accounting.mechanism import Release, Sampling, SideQuery, Trace
from accounting.registry import lookup
from accounting.schedules import (
    SCHEDULES,
    DecayParameter,
    NoiseSchedule,
    make_schedule,
    planned_trace,
)

NOISE_MULTIPLIERS = (1e-2, 1e6)
"""The range in which a noise multiplier is sought."""

LONGEST_RUN = 1_000_000_000
_TOLERANCE = 1e-6
_DIGITS = 6


class Budget(Protocol):
    """What a run may cost."""

    @property
    def limit(self) -> float: ...

    @property
    def unit(self) -> str: ...

    def cost(self, trace: Trace) -> float: ...


@dataclass(frozen=True)
class RhoBudget:
    """A budget of zero-concentrated DP, as in paper C: shuffled epochs cost 1/(2 sigma^2) each."""

    limit: float
    unit: str = "rho"

    def __post_init__(self) -> None:
        require_finite("budget rho", self.limit, above=0.0)

    def cost(self, trace: Trace) -> float:
        return total_rho(trace)


@dataclass(frozen=True)
class EpsilonBudget:
    """A budget of epsilon at ``delta``, as ``accountant`` measures it, for groups of ``group_size`` examples."""

    limit: float
    delta: float
    accountant: str = "auto"
    group_size: int = 1
    unit: str = "epsilon"

    def __post_init__(self) -> None:
        require_finite("target epsilon", self.limit, above=0.0)
        require_finite("delta", self.delta, above=0.0, below=1.0)

    def cost(self, trace: Trace) -> float:
        return account(trace, self.delta, self.accountant, self.group_size).epsilon


def within_budget(trace: Trace, budget: Budget) -> bool:
    """Whether ``trace`` stays within ``budget``; reaching it exactly is allowed."""
    return budget.cost(trace) <= budget.limit


def epochs_within_budget(
    schedule: NoiseSchedule,
    budget: Budget,
    sampling: Sampling,
    steps_per_epoch: int,
    dataset_size: int,
    side_queries: tuple[SideQuery, ...] = (),
    releases: tuple[Release, ...] = (),
    max_epochs: int = 100_000,
) -> int:
    """How many whole epochs, at most ``max_epochs``, complete within ``budget`` (paper C: training ends before the
    first epoch whose cost would pass it). 0 when the first one does not fit.
    """

    def cost(epochs: int) -> float:
        return budget.cost(
            planned_trace(schedule, sampling, epochs, steps_per_epoch, dataset_size, side_queries, releases)
        )

    return _largest_count(cost, budget.limit, max_epochs)


def steps_within_budget(trace_of: Callable[[int], Trace], budget: Budget, max_steps: int = LONGEST_RUN) -> int:
    """How many steps, at most ``max_steps``, stay within ``budget``; trace_of gives the run of so many steps."""
    return _largest_count(lambda steps: budget.cost(trace_of(steps)), budget.limit, max_steps)


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
    """The smallest noise multiplier whose run stays within ``budget``, rounded up to six digits."""

    def cost(noise_multiplier: float) -> float:
        return budget.cost(trace_of(noise_multiplier))

    found = _smallest(cost, budget.limit, _guess(trace_of, budget), *NOISE_MULTIPLIERS)
    if found is None:
        raise Unreachable(
            f"{budget.unit} {budget.limit:g} is unreachable: even noise multiplier {NOISE_MULTIPLIERS[1]:g} costs "
            f"{budget.unit} {cost(NOISE_MULTIPLIERS[1]):.6g}; raise the target or spend less on side queries and releases"
        )
    rounded = round_up(found)
    return rounded if cost(rounded) <= budget.limit else found


def calibrate_decay(
    name: str,
    initial_noise_multiplier: float,
    trace_of: Callable[[NoiseSchedule], Trace],
    budget: Budget,
    **params: Any,
) -> float:
    """The fastest decay of the schedule ``name`` at which the run ``trace_of(schedule)`` stays within ``budget``.

    It makes the budget last exactly as long as that run (paper C, Table III). The value is that of the schedule's own
    decay parameter (`NoiseSchedule.decay_parameter`); ``params`` are its other parameters.
    Raises: Unreachable when the run passes the budget even without decay, or stays within it at any decay.
    """
    parameter = _decay_parameter(name)

    def cost(slowness: float) -> float:
        decay = slowness**parameter.sign
        return budget.cost(trace_of(make_schedule(name, initial_noise_multiplier, **params, **{parameter.name: decay})))

    slowest = parameter.highest if parameter.sign > 0 else 1e9
    fastest = 1e-6 if parameter.sign > 0 else 1.0 / parameter.highest
    found = _smallest(cost, budget.limit, min(10.0, slowest), fastest, slowest)
    if found is None:
        raise Unreachable(
            f"{budget.unit} {budget.limit:g} is unreachable: the run costs {budget.unit} {cost(slowest):.6g} even with "
            f"{parameter.name} {slowest**parameter.sign:g}; raise the initial noise multiplier or shorten the run"
        )
    if found == fastest:
        raise Unreachable(
            f"{budget.unit} {budget.limit:g} outlasts the run: it costs {budget.unit} {cost(fastest):.6g} even with "
            f"{parameter.name} {fastest**parameter.sign:g}; lower the initial noise multiplier or lengthen the run"
        )
    rounded = round_up(found) if parameter.sign > 0 else 1.0 / round_down(1.0 / found)
    return (rounded if cost(rounded) <= budget.limit else found) ** parameter.sign


def _decay_parameter(name: str) -> DecayParameter:
    parameter = getattr(lookup(SCHEDULES, name, "schedule"), "decay_parameter", None)
    if parameter is None:
        raise InvalidInput(f"schedule {name!r} has no decay to solve for; choose time, exponential, step or polynomial")
    return parameter


def round_up(value: float) -> float:
    """``value`` > 0 to six significant digits, never below it."""
    quantum = 10.0 ** (math.floor(math.log10(value)) + 1 - _DIGITS)
    return max(value, round(math.ceil(value / quantum) * quantum, 15))


def round_down(value: float) -> float:
    """``value`` > 0 to six significant digits, never above it."""
    quantum = 10.0 ** (math.floor(math.log10(value)) + 1 - _DIGITS)
    return min(value, round(math.floor(value / quantum) * quantum, 15))


def _guess(trace_of: Callable[[float], Trace], budget: Budget) -> float:
    """A starting point from the cheap rdp accountant; the search is correct from any."""
    if not isinstance(budget, EpsilonBudget) or budget.accountant == "rdp":
        return 1.0
    single = EpsilonBudget(budget.limit / budget.group_size, budget.delta, "rdp")
    try:
        found = _smallest(lambda sigma: single.cost(trace_of(sigma)), single.limit, 1.0, *NOISE_MULTIPLIERS)
    except UnsupportedMechanism:
        return 1.0
    return found or 1.0


def _smallest(
    cost: Callable[[float], float], limit: float, guess: float, lowest: float, highest: float
) -> float | None:
    """The smallest evaluated x in [lowest, highest] with cost(x) <= limit, to a relative tolerance of 1e-6.

    ``cost`` falls with x and may be infinite. None when even ``highest`` does not meet the limit.
    """
    excess: dict[float, float] = {}

    def f(log_x: float) -> float:
        if log_x not in excess:
            value = cost(math.exp(log_x))
            excess[log_x] = 1.0 if math.isinf(value) else (value - limit) / (value + limit)
        return excess[log_x]

    bottom, top, stride = math.log(lowest), math.log(highest), 0.1
    low = high = min(max(math.log(guess), bottom), top)
    while f(high) > 0.0:
        if high == top:
            return None
        low, high, stride = high, min(high + stride, top), 2.0 * stride
    while f(low) <= 0.0:
        if low == bottom:
            return lowest
        low, high, stride = max(low - stride, bottom), low, 2.0 * stride
    brentq(f, low, high, xtol=_TOLERANCE / 4.0, rtol=1e-15)
    return math.exp(min(log_x for log_x, value in excess.items() if value <= 0.0))


def _largest_count(cost: Callable[[int], float], limit: float, at_most: int) -> int:
    """The largest count in [0, at_most] with cost(count) <= limit, for a cost that grows with the count."""
    low, high = 0, 1
    while high <= at_most and cost(high) <= limit:
        low, high = high, 2 * high
    high = min(high, at_most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= limit else (low, middle)
    return low
