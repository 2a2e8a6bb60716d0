"""Totals of one trial over test examples, as counts or sums, and functions that compute metrics of them. Pure numpy.

Leading axes [...] are free: none for one test set, or one for many resamples of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dpsweep.workers.evaluation import rates
from dpsweep.workers.evaluation.rates import Array, Rate


@dataclass(frozen=True)
class Tally:
    """Totals over some test examples: counts [..., K, K] by label and predicted class, and mean scores [...]."""

    counts: Array
    log_loss: Array
    calibration_error: Array


@dataclass(frozen=True)
class ScoreSums:
    """Totals over some test examples of a task besides classification: sums [..., m] of `Task.kept`."""

    values: Array
    task: str


Seen = Tally | ScoreSums
Statistic = Callable[[Seen], Array | None]
"""A function from totals over test examples to a metric [...]; None if it is not defined."""


@dataclass(frozen=True)
class Tested:
    """Totals of one trial: over all its test examples [...], and over each group that is shown [..., G].

    `parity`: whether parity gaps are defined, that is, there are two classes that are not the groups. `baseline`: the
    non-private trial that it is compared with, on the same examples. `users`: the same where everybody counts once,
    overall and in each group, however many rows they have; None if the data name no users.
    """

    everyone: Seen
    groups: Seen
    parity: bool
    baseline: Tested | None = None
    users: Tested | None = None


Measure = Callable[[Tested], Array | None]
"""A function from a trial to a metric of each resample [...], or of each of its groups [..., G]; None if undefined."""


def of_counts(rate: Rate) -> Statistic:
    """Return the score that is a rate of counts; None for tasks without counts."""
    return lambda seen: rate(seen.counts) if isinstance(seen, Tally) else None


ACCURACY: Final = of_counts(rates.accuracy)


def of_two(name: str) -> Statistic:
    """Return the score that is a rate of `dpsweep.workers.evaluation.rates.OF_TWO_CLASSES`; None unless there are two
    classes."""
    rate = rates.OF_TWO_CLASSES[name]
    return lambda seen: rate(seen.counts) if isinstance(seen, Tally) and seen.counts.shape[-1] == 2 else None


def log_loss(seen: Seen) -> Array | None:
    """Return the mean -ln p(label), in nats."""
    return seen.log_loss if isinstance(seen, Tally) else None


def tested_calibration_error(seen: Seen) -> Array | None:
    """Return the calibration error, as in `dpsweep.workers.evaluation.rates.calibration_error`."""
    return seen.calibration_error if isinstance(seen, Tally) else None


def of_sums(task: str, score: Callable[[Array], Array]) -> Statistic:
    """Return a score of a task (`dpsweep.workers.tasks.Score.of`); None for other tasks."""
    return lambda seen: score(seen.values) if isinstance(seen, ScoreSums) and seen.task == task else None


def overall(score: Statistic) -> Measure:
    """Measure a score on all test examples."""
    return lambda tested: score(tested.everyone)


def by_group(score: Statistic) -> Measure:
    """Measure a score on each group."""
    return lambda tested: score(tested.groups)


def over_users(measure: Measure) -> Measure:
    """Measure what ``measure`` does where everybody counts once; None if the data name no users."""
    return lambda tested: None if tested.users is None else measure(tested.users)


def between_groups(name: str) -> Measure:
    """Measure the gap between groups that is called ``name`` in `dpsweep.workers.evaluation.rates`."""

    def measure(tested: Tested) -> Array | None:
        groups = tested.groups
        if not isinstance(groups, Tally):
            return None
        if name in rates.GAPS:
            return rates.GAPS[name](groups.counts) if groups.counts.shape[-3] else None
        return rates.PARITY[name](groups.counts) if tested.parity else None

    return measure


def change(measure: Measure) -> Measure:
    """Measure what ``measure`` does, minus the same of the baseline; None without a baseline."""

    def changed(tested: Tested) -> Array | None:
        if tested.baseline is None:
            return None
        own, before = measure(tested), measure(tested.baseline)
        return None if own is None or before is None else own - before

    return changed


def over_groups(measure: Measure, reduce: Callable[[Array], Array], least: int = 2) -> Measure:
    """Measure an extreme of a number over groups, or a gap between them; None for fewer than ``least`` groups.

    measure: of each group. reduce: from its values [..., G] to [...].
    """

    def reduced(tested: Tested) -> Array | None:
        values = measure(tested)
        return None if values is None or values.shape[-1] < least else reduce(values)

    return reduced
