"""What test examples showed of one trial, as counts or sums, and the measures that follow from them. Pure numpy.

Leading axes are free: one trial as it was tested, or many resamples of it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workers import rates
from workers.rates import Array, Rate


@dataclass(frozen=True)
class Tally:
    """What some test examples add up to: counts [..., K, K] by label and predicted class, and mean scores [...]."""

    counts: Array
    log_loss: Array
    calibration_error: Array


@dataclass(frozen=True)
class Sums:
    """What some test examples of another task than classification add up to: sums [..., m] of `Task.kept`."""

    values: Array
    task: str


Seen = Tally | Sums
Score = Callable[[Seen], Array | None]
"""A number of some test examples, [...]; None where it is not defined."""


@dataclass(frozen=True)
class Tested:
    """One trial: all its test examples [...], and each group that is shown [..., G].

    parity: whether there are two classes that are not the groups. baseline: the non-private trial that it is compared
    with, on the same examples.
    """

    everyone: Seen
    groups: Seen
    parity: bool
    baseline: Tested | None = None


Measure = Callable[[Tested], Array | None]
"""A number of each resample, [...], or of each of its groups, [..., G]; None where it is not defined."""


def of_counts(rate: Rate) -> Score:
    """A rate of counts."""
    return lambda seen: rate(seen.counts) if isinstance(seen, Tally) else None


def of_two(name: str) -> Score:
    """A rate of `workers.rates.OF_TWO_CLASSES`."""
    rate = rates.OF_TWO_CLASSES[name]
    return lambda seen: rate(seen.counts) if isinstance(seen, Tally) and seen.counts.shape[-1] == 2 else None


def log_loss(seen: Seen) -> Array | None:
    """Mean -ln p(label), in nats."""
    return seen.log_loss if isinstance(seen, Tally) else None


def calibration_error(seen: Seen) -> Array | None:
    """As `workers.rates.calibration_error`."""
    return seen.calibration_error if isinstance(seen, Tally) else None


def of_sums(task: str, score: Callable[[Array], Array]) -> Score:
    """A score of a task (`workers.tasks.Score.of`)."""
    return lambda seen: score(seen.values) if isinstance(seen, Sums) and seen.task == task else None


def overall(score: Score) -> Measure:
    """A number of all test examples."""
    return lambda tested: score(tested.everyone)


def by_group(score: Score) -> Measure:
    """The same of each group."""
    return lambda tested: score(tested.groups)


def between_groups(name: str) -> Measure:
    """A gap of `workers.rates`."""

    def measure(tested: Tested) -> Array | None:
        groups = tested.groups
        if not isinstance(groups, Tally):
            return None
        if name in rates.GAPS:
            return rates.GAPS[name](groups.counts) if groups.counts.shape[-3] else None
        return rates.PARITY[name](groups.counts) if tested.parity else None

    return measure


def change_of(score: Score) -> Measure:
    """A number minus that of the baseline."""
    return lambda tested: _minus(score(tested.everyone), score(tested.baseline.everyone)) if tested.baseline else None


def change_by_group_of(score: Score) -> Measure:
    """The same of each group."""
    return lambda tested: _minus(score(tested.groups), score(tested.baseline.groups)) if tested.baseline else None


def gap_of(score: Score) -> Measure:
    """The largest minus the smallest number of a group, of two groups or more."""

    def measure(tested: Tested) -> Array | None:
        values = score(tested.groups)
        return None if values is None or values.shape[-1] < 2 else rates.gap(values)

    return measure


def _minus(one: Array | None, other: Array | None) -> Array | None:
    return None if one is None or other is None else one - other


change = change_of(of_counts(rates.accuracy))
"""Accuracy minus that of the baseline."""
change_by_group = change_by_group_of(of_counts(rates.accuracy))
"""The same for each group."""


def unequal_change(tested: Tested) -> Array | None:
    """Largest minus smallest change of a group's accuracy against the baseline."""
    found = change_by_group(tested)
    return None if found is None or found.shape[-1] < 2 else rates.gap(found)
