"""Noise schedules: the noise multiplier as a pure function of the epoch.

Paper C (Yu et al., Differentially Private Model Publishing for Deep Learning) Sec. IV-A: the noise multiplier is
constant within an epoch and changes between epochs. Pre-defined schedules read no data and cost no privacy. The
validation schedule reads the accuracy history on a *public* data set only.

Epochs count from 0. Every schedule may be held constant outside a window of epochs: it stays at its initial value
before epoch ``hold_before`` and keeps the value of epoch ``hold_after`` from then on. Inside the window the schedule
sees the epoch counted from ``hold_before``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, ClassVar

from dpsweep.accounting.errors import InvalidInput, UnsupportedMechanism, keep_whole, require_finite, require_whole
from dpsweep.accounting.mechanism.noise_strategies import (
    CORRELATED,
    INDEPENDENT,
    STRATEGIES,
    NoiseStrategy,
    make_strategy,
)
from dpsweep.accounting.mechanism.samplings import Adjacency, Sampling, draws_by_epoch
from dpsweep.accounting.mechanism.trace import (
    NOISE_MULTIPLIERS,
    Release,
    Segment,
    SideQuery,
    Trace,
    join_segments,
)
from dpsweep.accounting.mechanism.units import EXAMPLE, Unit
from dpsweep.accounting.registry import build, lookup, one_of

NEGLIGIBLE_NOISE = NOISE_MULTIPLIERS[0]
"""Noise multipliers below this count as 0: no noise, and epsilon infinity from every accountant.

Added in float32 to a gradient of the largest norm, noise much smaller than this is rounded away.
"""

LARGEST_EPOCHS = 10**7
"""Largest accepted number of epochs: a plan evaluates the schedule at each of them."""


@dataclass(frozen=True)
class DecayParameter:
    """The parameter, in (0, ``highest``], that sets how fast a schedule's noise falls.

    sign: 1 if a larger value means slower decay, -1 if it means faster decay.
    """

    name: str
    sign: int
    highest: float


@dataclass(frozen=True)
class NoiseSchedule(ABC):
    """Base of all schedules. ``noise_multiplier(epoch)`` is noise std over L2 sensitivity during that epoch.

    The value at the first epoch of the window is ``initial_noise_multiplier``; 0 trains without noise.
    """

    initial_noise_multiplier: float
    hold_before: int = field(default=0, kw_only=True)
    hold_after: int | None = field(default=None, kw_only=True)

    decay_parameter: ClassVar[DecayParameter | None] = None
    """The parameter that `dpsweep.accounting.calibrate_decay` solves for, if the schedule has one."""
    reads_accuracies: ClassVar[bool] = False
    """Whether it follows the accuracy on public data."""

    def __post_init__(self) -> None:
        require_finite("initial_noise_multiplier", self.initial_noise_multiplier, at_least=0.0)
        keep_whole(self, "hold_before", "hold_before", at_least=0)
        if self.hold_after is not None:
            keep_whole(self, "hold_after", "hold_after", at_least=self.hold_before)

    def noise_multiplier(self, epoch: int, validation_accuracies: Sequence[float] = ()) -> float:
        """Return the noise multiplier of ``epoch`` (>= 0), given the public validation accuracy after each completed
        epoch.
        """
        epoch = require_whole("epoch", epoch, at_least=0)
        last = epoch if self.hold_after is None else min(epoch, self.hold_after)
        value = self._at(max(last - self.hold_before, 0), validation_accuracies[self.hold_before :])
        return value if value >= NEGLIGIBLE_NOISE else 0.0

    def runs(self, epochs: int, accuracies: Sequence[float] = ()) -> Iterator[tuple[float, int]]:
        """Yield the noise multipliers of the first ``epochs`` epochs, each with the number of epochs that it lasts."""
        levels = (self.noise_multiplier(epoch, accuracies[:epoch]) for epoch in range(epochs))
        return ((level, sum(1 for _ in equal)) for level, equal in groupby(levels))

    @abstractmethod
    def _at(self, epoch: int, accuracies: Sequence[float]) -> float:
        """Return the value at ``epoch`` of the window; ``accuracies`` start with the window."""


@dataclass(frozen=True)
class ConstantSchedule(NoiseSchedule):
    """sigma_t = sigma_0."""

    def runs(self, epochs: int, accuracies: Sequence[float] = ()) -> Iterator[tuple[float, int]]:
        return iter([(self.noise_multiplier(0), epochs)] if epochs else [])

    def _at(self, epoch: int, accuracies: Sequence[float]) -> float:
        return self.initial_noise_multiplier


@dataclass(frozen=True)
class _DecayingSchedule(NoiseSchedule):
    """Falls from sigma_0 without a floor; the total decay grows by ``decay`` every ``every`` epochs."""

    decay: float
    every: int = 1

    decay_parameter: ClassVar[DecayParameter | None] = DecayParameter("decay", sign=-1, highest=1e3)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite("decay", self.decay, at_least=0.0)
        keep_whole(self, "every", "every", at_least=1)

    def _at(self, epoch: int, accuracies: Sequence[float]) -> float:
        return self._decayed(self.decay * (epoch // self.every))

    @abstractmethod
    def _decayed(self, amount: float) -> float:
        """Return the value at a total decay of ``amount`` >= 0."""


@dataclass(frozen=True)
class TimeSchedule(_DecayingSchedule):
    """sigma_t = sigma_0 / (1 + decay * floor(t / every))  (paper C, Sec. IV-A2 a)."""

    def _decayed(self, amount: float) -> float:
        return self.initial_noise_multiplier / (1.0 + amount)


@dataclass(frozen=True)
class ExponentialSchedule(_DecayingSchedule):
    """sigma_t = sigma_0 * exp(-decay * floor(t / every))  (paper C, Sec. IV-A2 b)."""

    def _decayed(self, amount: float) -> float:
        return self.initial_noise_multiplier * math.exp(-amount)


@dataclass(frozen=True)
class StepSchedule(NoiseSchedule):
    """sigma_t = sigma_0 * factor^floor(t / period)  (paper C, Sec. IV-A2 c)."""

    factor: float
    period: int

    decay_parameter: ClassVar[DecayParameter | None] = DecayParameter("factor", sign=1, highest=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite("factor", self.factor, above=0.0, at_most=1.0)
        keep_whole(self, "period", "period", at_least=1)

    def _at(self, epoch: int, accuracies: Sequence[float]) -> float:
        return float(self.initial_noise_multiplier * self.factor ** (epoch // self.period))


@dataclass(frozen=True)
class _EndingSchedule(NoiseSchedule):
    """Moves from sigma_0 to ``end_noise_multiplier`` within ``period`` epochs and stays there."""

    end_noise_multiplier: float
    period: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite("end_noise_multiplier", self.end_noise_multiplier, above=0.0)
        keep_whole(self, "period", "period", at_least=1)

    def _at(self, epoch: int, accuracies: Sequence[float]) -> float:
        remaining = self._remaining(min(epoch / self.period, 1.0))
        end = self.end_noise_multiplier
        return (self.initial_noise_multiplier - end) * remaining + end

    @abstractmethod
    def _remaining(self, progress: float) -> float:
        """Remaining share of sigma_0 - sigma_end at ``progress`` in [0, 1]: 1 at the start, 0 at the end."""


@dataclass(frozen=True)
class PolynomialSchedule(_EndingSchedule):
    """sigma_t = (sigma_0 - sigma_end) (1 - t / period)^power + sigma_end  (paper C, Sec. IV-A2 d)."""

    power: float

    decay_parameter: ClassVar[DecayParameter | None] = DecayParameter("power", sign=-1, highest=1e3)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite("power", self.power, above=0.0)

    def _remaining(self, progress: float) -> float:
        return float((1.0 - progress) ** self.power)


@dataclass(frozen=True)
class LinearSchedule(_EndingSchedule):
    """A straight line from sigma_0 to sigma_end: the polynomial schedule of power 1."""

    def _remaining(self, progress: float) -> float:
        return 1.0 - progress


@dataclass(frozen=True)
class CosineSchedule(_EndingSchedule):
    """Half a cosine from sigma_0 to sigma_end: flat at both ends."""

    def _remaining(self, progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class ValidationSchedule(NoiseSchedule):
    """Multiply sigma by ``factor`` whenever the public validation accuracy stops improving (paper C, Sec. IV-A1).

    Every ``period`` epochs the mean accuracy of the last ``window`` epochs (Eq. 10) is compared with that of the
    previous check (0 at the first). An improvement of at most ``threshold`` reduces the noise (Eq. 8).

    A check without known accuracies counts as no improvement. Without history the schedule therefore gives the lowest
    noise that a run can reach, and a plan made before training bounds the cost from above.
    """

    factor: float
    period: int
    threshold: float = 0.0
    window: int = 1

    decay_parameter: ClassVar[DecayParameter | None] = DecayParameter("factor", sign=1, highest=1.0)
    reads_accuracies: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite("factor", self.factor, above=0.0, at_most=1.0)
        keep_whole(self, "period", "period", at_least=1)
        require_finite("threshold", self.threshold)
        keep_whole(self, "window", "window", at_least=1)
        if self.window > self.period:
            raise InvalidInput(f"window is {self.window}, but must be at most the period {self.period}")

    def _at(self, epoch: int, accuracies: Sequence[float]) -> float:
        reductions = sum(
            not improvement > self.threshold for improvement in self._improvements(epoch // self.period, accuracies)
        )
        return float(self.initial_noise_multiplier * self.factor**reductions)

    def _improvements(self, checks: int, accuracies: Sequence[float]) -> Iterator[float]:
        before = 0.0
        for check in range(1, checks + 1):
            stop = check * self.period
            known = stop <= len(accuracies)
            mean = math.fsum(accuracies[stop - self.window : stop]) / self.window if known else -math.inf
            yield mean - before if known else -math.inf
            before = mean


SCHEDULES: Mapping[str, type[NoiseSchedule]] = {
    "constant": ConstantSchedule,
    "time": TimeSchedule,
    "exponential": ExponentialSchedule,
    "step": StepSchedule,
    "polynomial": PolynomialSchedule,
    "linear": LinearSchedule,
    "cosine": CosineSchedule,
    "validation": ValidationSchedule,
}


def reads_accuracies(name: str) -> bool:
    """Return whether the noise of this name, of `NOISES`, follows the accuracy on public data."""
    return name in SCHEDULES and SCHEDULES[name].reads_accuracies


def make_schedule(name: str, initial_noise_multiplier: float, /, **params: Any) -> NoiseSchedule:
    """Return the schedule ``name`` with ``params``; InvalidInput with the nearest valid word for an unknown name or
    key.

    Raises: UnsupportedMechanism for the name of a noise strategy.
    """
    if isinstance(name, str) and name in STRATEGIES:
        raise UnsupportedMechanism(
            f"{name} is a noise strategy, not a schedule: the command line takes it as --noise-strategy; choose a "
            f"noise schedule: {one_of(SCHEDULES)}"
        )
    return build(SCHEDULES, name, params, "noise schedule", initial_noise_multiplier=initial_noise_multiplier)


NOISES: Mapping[str, Callable[..., NoiseSchedule | NoiseStrategy]] = {**SCHEDULES, **CORRELATED}
"""The noise of a trial: a schedule with independent noise, or a strategy with constant noise."""


def make_noise(
    name: str, noise_multiplier: float, params: Mapping[str, Any], steps: int, apart: int
) -> tuple[NoiseSchedule, NoiseStrategy]:
    """Return the schedule and the strategy of a trial of ``steps`` steps, by the name of either.

    apart: steps between two participations of an example, ``steps`` for one participation.

    Raises: InvalidInput with the nearest valid word for an unknown name or key.
    """
    lookup(NOISES, name, "noise schedule")
    if name in CORRELATED:
        return ConstantSchedule(noise_multiplier), make_strategy(name, params, steps, apart)
    return build(SCHEDULES, name, params, "noise schedule", initial_noise_multiplier=noise_multiplier), INDEPENDENT


def parse_schedule(text: str, initial_noise_multiplier: float) -> NoiseSchedule:
    """Return a schedule from ``name`` or ``name:key=value,...``, as the command line writes it."""
    name, params = split_schedule(text)
    return make_schedule(name, initial_noise_multiplier, **params)


def split_schedule(text: str) -> tuple[str, dict[str, float]]:
    """Return the name and parameters of ``name:key=value,...``.

    >>> split_schedule("step:factor=0.5,period=10")
    ('step', {'factor': 0.5, 'period': 10})
    """
    name, _, listed = text.partition(":")
    params: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in listed.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key in params:
            raise InvalidInput(f"schedule parameter {item!r} must be written key=value, each key once")
        try:
            params[key] = int(value) if value.lstrip("+-").isdigit() else float(value)
        except ValueError:
            raise InvalidInput(f"schedule parameter {key!r} is {value!r}, but must be a number") from None
    return name.strip(), params


def with_initial(schedule: NoiseSchedule, initial_noise_multiplier: float) -> NoiseSchedule:
    """Return the same schedule with another initial noise multiplier."""
    return replace(schedule, initial_noise_multiplier=initial_noise_multiplier)


def planned_trace(
    schedule: NoiseSchedule,
    sampling: Sampling,
    epochs: int,
    steps_per_epoch: int,
    dataset_size: int,
    side_queries: tuple[SideQuery, ...] = (),
    releases: tuple[Release, ...] = (),
    validation_accuracies: Sequence[float] = (),
    adjacency: Adjacency | None = None,
    unit: Unit = EXAMPLE,
) -> Trace:
    """Return the trace of ``epochs`` epochs of ``steps_per_epoch`` steps each under ``schedule``.

    Noise is constant within an epoch. Neighbouring epochs of equal noise share one segment. adjacency None is the first
    of `Sampling.adjacencies`. validation_accuracies: public accuracy after each completed epoch, for schedules that
    react to it. The trace notes if it changed the noise (`Trace.noise_follows_results`).

    Raises: InvalidInput for shuffled epochs whose own number of steps is not ``steps_per_epoch``. UnsupportedMechanism
    for a sampling not accounted for under ``adjacency``.
    """
    epochs = require_whole("epochs", epochs, at_least=0, at_most=LARGEST_EPOCHS)
    steps_per_epoch = require_whole("steps_per_epoch", steps_per_epoch, at_least=1)
    if draws_by_epoch(sampling) and sampling.steps_per_epoch != steps_per_epoch:
        raise InvalidInput(
            f"steps_per_epoch is {steps_per_epoch}, but the {sampling.stored_name} sampling has "
            f"{sampling.steps_per_epoch}"
        )
    runs = list(schedule.runs(epochs, validation_accuracies))
    segments = (Segment(0, steps_per_epoch * count, sampling, level, side_queries) for level, count in runs)
    return Trace(
        dataset_size,
        join_segments(segments),
        releases,
        adjacency or sampling.adjacencies[0],
        noise_follows_results=bool(validation_accuracies) and runs != list(schedule.runs(epochs)),
        unit=unit,
    )
