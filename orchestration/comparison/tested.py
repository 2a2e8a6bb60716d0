"""What test examples showed of one trial, as counts, and the measures that are computed from them. Pure numpy.

Leading axes are free: one trial as it was tested, or many resamples of it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workers import rates
from workers.rates import Array, Rate


@dataclass(frozen=True)
class Tested:
    """Counts of one trial: of all its test examples [..., K, K], and of each group that is shown [..., G, K, K].

    log_loss, calibration_error: [...]. parity: whether there are two classes that are not the groups. baseline: the
    non-private trial that it is compared with, on the same examples.
    """

    everyone: Array
    groups: Array
    log_loss: Array
    calibration_error: Array
    parity: bool
    baseline: Tested | None = None


Measure = Callable[[Tested], Array | None]
"""A number of each resample, [...]; None where it is not defined."""


def overall(rate: Rate) -> Measure:
    """A rate over all test examples."""
    return lambda tested: rate(tested.everyone)


def overall_of_two(name: str) -> Measure:
    """A rate of `workers.rates.OF_TWO_CLASSES` over all test examples."""
    rate = rates.OF_TWO_CLASSES[name]
    return lambda tested: rate(tested.everyone) if tested.everyone.shape[-1] == 2 else None


def between_groups(name: str) -> Measure:
    """A gap of `workers.rates`."""
    if name in rates.GAPS:
        return lambda tested: rates.GAPS[name](tested.groups) if tested.groups.shape[-3] else None
    return lambda tested: rates.PARITY[name](tested.groups) if tested.parity else None


def of_group(rate: Rate, place: int) -> Measure:
    """A rate of the group at ``place`` among those shown."""
    return lambda tested: rate(tested.groups[..., place, :, :])


def change(tested: Tested) -> Array | None:
    """Accuracy minus that of the baseline."""
    before = tested.baseline
    return rates.accuracy(tested.everyone) - rates.accuracy(before.everyone) if before else None


def unequal_change(tested: Tested) -> Array | None:
    """Largest minus smallest change of a group's accuracy against the baseline."""
    before = tested.baseline
    if before is None or tested.groups.shape[-3] < 2:
        return None
    return rates.gap(rates.accuracy(tested.groups) - rates.accuracy(before.groups))
