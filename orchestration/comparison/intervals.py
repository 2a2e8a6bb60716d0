"""Confidence intervals for numbers that vary with seeds, splits and test examples. Pure numpy.

Test examples are resampled by the bootstrap, with the same resamples for every run on the same test set, so that runs
stay paired. Seeds and splits are too few to resample (percentiles of 5 seeds: about 84% coverage for 95%); their
contribution is therefore the sample variance, with Student's t. The variances are added, and the degrees of freedom
follow from Satterthwaite's approximation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from scipy import special

Array = npt.NDArray[np.float64]
Covers = Literal["seeds and test examples", "splits, seeds and test examples", "test examples"]
LEVEL: Final = 0.95
_FEW: Final = 3
"""With fewer degrees of freedom, the sample variance over seeds may be far too small."""


@dataclass(frozen=True)
class ConfidenceInterval:
    """A mean over ``runs`` runs with its interval. covers: sources of variation that the interval accounts for."""

    value: float
    low: float
    high: float
    runs: int
    covers: Covers

    def within(self, least: float, most: float) -> ConfidenceInterval:
        """The interval cut to the possible values [least, most]; it still contains ``value``."""
        low, high = max(self.low, min(least, self.value)), min(self.high, max(most, self.value))
        return ConfidenceInterval(self.value, low, high, self.runs, self.covers)


@dataclass(frozen=True)
class RunValues:
    """One number of several runs.

    values: [R], on the original test examples. resampled: [R, B]; runs of one split have the same resample of the test
    examples in column b. splits: [R], index of the split; runs of one split have the same test examples. overlap:
    number of test examples divided by number of training examples if splits are drawn from the same data, else 0.
    """

    values: Array
    resampled: Array
    splits: npt.NDArray[np.int64]
    overlap: float = 0.0

    def minus(self, other: RunValues) -> RunValues:
        """The differences to ``other``, whose runs are paired with these one to one."""
        return RunValues(self.values - other.values, self.resampled - other.resampled, self.splits, self.overlap)


def interval(
    runs: RunValues, level: float = LEVEL, examples: int = 0, possible: tuple[float, float] = (0.0, 1.0)
) -> ConfidenceInterval | None:
    """The mean over runs with its interval; None if the mean is not finite, or fewer than two resamples are.

    examples: number of examples behind a share, or a difference of shares, with values in ``possible``; 0 for other
    numbers. Where resamples do not vary, the interval follows from this number (`_ends`).
    """
    value = float(runs.values.mean())
    usable = np.isfinite(runs.resampled).all(0)
    if not math.isfinite(value) or usable.sum() < 2:
        return None
    resampled = runs.resampled[:, usable]
    means = resampled.mean(0)
    half = _half_width(*_variance(runs, resampled, float(means.var(ddof=1))), level)
    low, high = _ends(value, means, half, _reach(level, examples), possible)
    return ConfidenceInterval(value, low, high, len(runs.values), _covers(runs))


def unpaired(
    one: RunValues,
    other: RunValues,
    level: float = LEVEL,
    examples: int = 0,
    possible: tuple[float, float] = (-1.0, 1.0),
) -> ConfidenceInterval | None:
    """The difference of two means with its interval, for runs with the same test examples but without common seeds.

    examples, possible: as in `interval`.
    """
    value = float(one.values.mean() - other.values.mean())
    means = one.resampled.mean(0) - other.resampled.mean(0)
    means = means[np.isfinite(means)]
    if not math.isfinite(value) or len(means) < 2:
        return None
    seeds = [_of_seeds(runs, runs.resampled[:, np.isfinite(runs.resampled).all(0)]) for runs in (one, other)]
    treated, between, spent = (sum(part) for part in zip(*seeds, strict=True))
    variance = _total(float(means.var(ddof=1)), treated, between, min(len(one.values), len(other.values)) - 1)
    half = _half_width(variance, _degrees(variance, spent, len(one.values) - 1), level)
    low, high = _ends(value, means, half, _reach(level, examples), possible)
    return ConfidenceInterval(value, low, high, min(len(one.values), len(other.values)), _covers(one))


def _reach(level: float, examples: int) -> float:
    """Clopper and Pearson's upper bound on a share of which ``examples`` examples show nothing; 0 without examples."""
    return 1.0 - ((1.0 - level) / 2.0) ** (1.0 / examples) if examples else 0.0


def _ends(value: float, means: Array, half: float, reach: float, possible: tuple[float, float]) -> tuple[float, float]:
    """Ends of the interval around ``value``, whose bootstrap ``means`` correct its bias; half: its half width.

    If all resamples agree, every example has the same value, and examples that were not drawn, a share of at most
    ``reach``, may have any of the ``possible`` values. For a share this is the interval of Clopper and Pearson, and a
    difference of 1 or -1 excludes 0 when the exact test of McNemar does.
    """
    centre = value - (float(means.mean()) - value)
    low, high = min(centre - half, value), max(centre + half, value)
    if not reach or np.ptp(means) > 0.0:
        return low, high
    least, most = possible
    return min(low, value - reach * (value - least)), max(high, value + reach * (most - value))


def _half_width(variance: float, degrees: float, level: float) -> float:
    """Half width of the interval at this confidence level around a mean, by Student's t distribution."""
    return float(special.stdtrit(degrees, 0.5 + level / 2.0)) * math.sqrt(variance)


def _covers(runs: RunValues) -> Covers:
    if len(np.unique(runs.splits)) > 1:
        return "splits, seeds and test examples"
    return "seeds and test examples" if len(runs.values) > 1 else "test examples"


def _variance(runs: RunValues, resampled: Array, of_examples: float) -> tuple[float, float]:
    """Variance of the mean over runs, and its degrees of freedom."""
    names = np.unique(runs.splits)
    freedom = len(runs.values) - len(names)
    treated, between, spent = _of_seeds(runs, resampled)
    whole = _total(of_examples, treated, between, freedom)
    degrees = _degrees(whole, spent, freedom)
    if len(names) < 2:
        return whole, degrees
    means = np.array([runs.values[runs.splits == name].mean() for name in names])
    # correction for splits that overlap, being of the same data: Nadeau and Bengio 2003, Section 3.2
    of_splits = float(means.var(ddof=1)) * (1.0 / len(names) + runs.overlap)
    return (of_splits, len(names) - 1.0) if of_splits > whole else (whole, degrees)


def _total(of_examples: float, treated: float, between: float, freedom: int) -> float:
    """The variance of a mean. With few seeds, which may agree by chance, it is never below the bootstrap's variance."""
    total = max(0.0, of_examples - treated) + between
    return max(total, of_examples) if freedom < _FEW else total


def _degrees(variance: float, spent: float, least: int) -> float:
    """Degrees of freedom by Satterthwaite's approximation, at least those of the seeds (``least``)."""
    return max(float(least), variance**2 / spent) if spent else math.inf


def _of_seeds(runs: RunValues, resampled: Array) -> tuple[float, float, float]:
    """Parts of the variance of the mean that come from the seeds; all 0 if every split has one run.

    Returns ``treated``: the part from runs that treat single examples differently, which the bootstrap variance already
    contains; ``between``: the variance between runs, which contains ``treated``; and the square of the larger one
    divided by its degrees of freedom, for Satterthwaite's approximation.
    """
    freedom, count = len(runs.values) - len(np.unique(runs.splits)), len(runs.values)
    if freedom < 1:
        return 0.0, 0.0, 0.0
    between = float(_within_splits(runs.values[:, None], runs.splits)[0]) / freedom / count
    treated = float(_within_splits(resampled - runs.values[:, None], runs.splits).mean()) / freedom / count
    return treated, between, max(treated, between) ** 2 / freedom


def _within_splits(values: Array, splits: npt.NDArray[np.int64]) -> Array:
    """Sum of squared deviations of values [R, B] from the mean of their split. Returns: [B]."""
    total = np.zeros(values.shape[1])
    for split in np.unique(splits):
        own = values[splits == split]
        total += ((own - own.mean(0)) ** 2).sum(0)
    return total
