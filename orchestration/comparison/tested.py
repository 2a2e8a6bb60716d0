"""What test examples showed of one trial, as counts, and the measures that are computed from them. Pure numpy.

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


Score = Callable[[Tally], Array | None]
"""A number of some test examples, [...]; None where it is not defined."""


@dataclass(frozen=True)
class Tested:
    """One trial: all its test examples [...], and each group that is shown [..., G].

    parity: whether there are two classes that are not the groups. baseline: the non-private trial that it is compared
    with, on the same examples.
    """

    everyone: Tally
    groups: Tally
    parity: bool
    baseline: Tested | None = None


Measure = Callable[[Tested], Array | None]
"""A number of each resample, [...], or of each of its groups, [..., G]; None where it is not defined."""


def of_counts(rate: Rate) -> Score:
    """A rate of counts."""
    return lambda tally: rate(tally.counts)


def of_two(name: str) -> Score:
    """A rate of `workers.rates.OF_TWO_CLASSES`."""
    rate = rates.OF_TWO_CLASSES[name]
    return lambda tally: rate(tally.counts) if tally.counts.shape[-1] == 2 else None


def log_loss(tally: Tally) -> Array:
    """Mean -ln p(label), in nats."""
    return tally.log_loss


def calibration_error(tally: Tally) -> Array:
    """As `workers.rates.calibration_error`."""
    return tally.calibration_error


def overall(score: Score) -> Measure:
    """A number of all test examples."""
    return lambda tested: score(tested.everyone)


def by_group(score: Score) -> Measure:
    """The same of each group."""
    return lambda tested: score(tested.groups)


def between_groups(name: str) -> Measure:
    """A gap of `workers.rates`."""
    if name in rates.GAPS:
        return lambda tested: rates.GAPS[name](tested.groups.counts) if tested.groups.counts.shape[-3] else None
    return lambda tested: rates.PARITY[name](tested.groups.counts) if tested.parity else None


def change(tested: Tested) -> Array | None:
    """Accuracy minus that of the baseline."""
    before = tested.baseline
    return rates.accuracy(tested.everyone.counts) - rates.accuracy(before.everyone.counts) if before else None


def change_by_group(tested: Tested) -> Array | None:
    """The same of each group."""
    before = tested.baseline
    return rates.accuracy(tested.groups.counts) - rates.accuracy(before.groups.counts) if before else None


def unequal_change(tested: Tested) -> Array | None:
    """Largest minus smallest change of a group's accuracy against the baseline."""
    found = change_by_group(tested)
    return None if found is None or found.shape[-1] < 2 else rates.gap(found)
