"""Intervals for numbers that vary with seeds, splits and test examples. Pure numpy.

A hierarchical bootstrap: test examples are resampled, the same ones for every run that was tested on them, so that runs
stay paired. Seeds and splits are few, and resampling a handful of them covers too little (percentiles of 5 seeds: about
84% for 95%); their level is therefore the sample variance, with Student's t. Components add up, and their degrees of
freedom by Satterthwaite.
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
"""Degrees of freedom of seeds below which their sample variance may be far too small."""


@dataclass(frozen=True)
class Interval:
    """A number with its interval. runs: how many it is the mean of. covers: what its interval accounts for."""

    value: float
    low: float
    high: float
    runs: int
    covers: Covers

    def within(self, least: float, most: float) -> Interval:
        """The interval without impossible values."""
        low, high = max(self.low, min(least, self.value)), min(self.high, max(most, self.value))
        return Interval(self.value, low, high, self.runs, self.covers)


@dataclass(frozen=True)
class Runs:
    """One number of several runs.

    values: [R], on the test examples as they are. resampled: [R, B], column b on the same resample of the test examples
    for runs of one split. splits: [R], runs of one split have the same test examples. overlap: test over training
    examples where splits are drawn from the same data, else 0.
    """

    values: Array
    resampled: Array
    splits: npt.NDArray[np.int64]
    overlap: float = 0.0

    def minus(self, other: Runs) -> Runs:
        """The paired differences of runs that correspond one to one."""
        return Runs(self.values - other.values, self.resampled - other.resampled, self.splits, self.overlap)


def interval(runs: Runs, level: float = LEVEL, examples: int = 0) -> Interval | None:
    """The mean over runs with its interval; None if a value is not finite.

    examples: those that a share is measured on. Where all resamples agree on a share of 0 or 1, its bound is that of
    Clopper and Pearson for so many.
    """
    value = float(runs.values.mean())
    usable = np.isfinite(runs.resampled).all(0)
    if not math.isfinite(value) or usable.sum() < 2:
        return None
    resampled = runs.resampled[:, usable]
    means = resampled.mean(0)
    variance, freedom = _variance(runs, resampled, float(means.var(ddof=1)))
    if variance == 0.0 and value in (0.0, 1.0) and examples:
        reach = 1.0 - ((1.0 - level) / 2.0) ** (1.0 / examples)
        low, high = (0.0, reach) if value == 0.0 else (1.0 - reach, 1.0)
        return Interval(value, low, high, len(runs.values), _covers(runs))
    centre = value - (float(means.mean()) - value)
    half = _half_width(variance, freedom, level)
    return Interval(value, min(centre - half, value), max(centre + half, value), len(runs.values), _covers(runs))


def unpaired(one: Runs, other: Runs, level: float = LEVEL) -> Interval | None:
    """The difference of two means with its interval, of runs without common seeds but with the same test examples."""
    value = float(one.values.mean() - other.values.mean())
    means = one.resampled.mean(0) - other.resampled.mean(0)
    means = means[np.isfinite(means)]
    if not math.isfinite(value) or len(means) < 2:
        return None
    seeds = [_of_seeds(runs, runs.resampled[:, np.isfinite(runs.resampled).all(0)]) for runs in (one, other)]
    treated, between, spent = (sum(part) for part in zip(*seeds, strict=True))
    variance = _total(float(means.var(ddof=1)), treated, between, min(len(one.values), len(other.values)) - 1)
    half = _half_width(variance, _degrees(variance, spent, len(one.values) - 1), level)
    centre = 2.0 * value - float(means.mean())
    count = min(len(one.values), len(other.values))
    return Interval(value, min(centre - half, value), max(centre + half, value), count, _covers(one))


def _half_width(variance: float, degrees: float, level: float) -> float:
    """Half width of an interval of this level around a mean, by Student's t distribution."""
    return float(special.stdtrit(degrees, 0.5 + level / 2.0)) * math.sqrt(variance)


def _covers(runs: Runs) -> Covers:
    if len(np.unique(runs.splits)) > 1:
        return "splits, seeds and test examples"
    return "seeds and test examples" if len(runs.values) > 1 else "test examples"


def _variance(runs: Runs, resampled: Array, of_examples: float) -> tuple[float, float]:
    """Variance of the mean over runs, and its degrees of freedom."""
    names = np.unique(runs.splits)
    freedom = len(runs.values) - len(names)
    treated, between, spent = _of_seeds(runs, resampled)
    whole = _total(of_examples, treated, between, freedom)
    degrees = _degrees(whole, spent, freedom)
    if len(names) < 2:
        return whole, degrees
    means = np.array([runs.values[runs.splits == name].mean() for name in names])
    # splits of the same data overlap: Nadeau and Bengio 2003, Section 3.2
    of_splits = float(means.var(ddof=1)) * (1.0 / len(names) + runs.overlap)
    return (of_splits, len(names) - 1.0) if of_splits > whole else (whole, degrees)


def _total(of_examples: float, treated: float, between: float, freedom: int) -> float:
    """The variance of a mean; of two or three seeds, which may agree by chance, never below that of the bootstrap."""
    total = max(0.0, of_examples - treated) + between
    return max(total, of_examples) if freedom < _FEW else total


def _degrees(variance: float, spent: float, least: int) -> float:
    """Degrees of freedom by Satterthwaite: never fewer than those of the seeds."""
    return max(float(least), variance**2 / spent) if spent else math.inf


def _of_seeds(runs: Runs, resampled: Array) -> tuple[float, float, float]:
    """Of the variance of the mean: the part of runs that treat single examples differently, which the bootstrap has
    already, the part between runs, which contains it, and the square of the larger over the degrees of freedom."""
    freedom, count = len(runs.values) - len(np.unique(runs.splits)), len(runs.values)
    if freedom < 1:
        return 0.0, 0.0, 0.0
    between = float(_within_splits(runs.values[:, None], runs.splits)[0]) / freedom / count
    treated = float(_within_splits(resampled - runs.values[:, None], runs.splits).mean()) / freedom / count
    return treated, between, max(treated, between) ** 2 / freedom


def _within_splits(values: Array, splits: npt.NDArray[np.int64]) -> Array:
    """[B]: sum of squared deviations from the mean of the own split, of values [R, B]."""
    total = np.zeros(values.shape[1])
    for split in np.unique(splits):
        own = values[splits == split]
        total += ((own - own.mean(0)) ** 2).sum(0)
    return total
