"""Confidence intervals for numbers that vary with seeds, splits and test examples. Pure numpy.

Test examples, or the users whom they belong to, are resampled by the bootstrap, with the same resamples for every run
on the same test set, so that runs stay paired. Seeds and splits are too few to resample: percentiles of 5 seeds cover
about 84% in place of 95%. Their contribution is the variance between runs, with Student's t, which
`dpsweep.orchestration.comparison.settings` pools over the private settings of a sweep. With several splits it is that
between the means of splits: what a split decides is the same for all its seeds. The variances are added, and the
degrees of freedom follow from Satterthwaite's approximation.

The bootstrap says little of few examples. In differences, a share is therefore treated as if two more had been seen,
with one counted (Agresti and Caffo 2000). The interval of a single share follows Clopper and Pearson at its effective
number of examples (Korn and Graubard 1998).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from scipy import special

Array = npt.NDArray[np.float64]
Covers = Literal["seeds and test examples", "splits, seeds and test examples", "test examples"]
LEVEL: Final = 0.95
TAIL: Final = (1.0 - LEVEL) / 2.0
"""Probability that the truth lies beyond one end of an interval."""
_FEW: Final = 3
"""With fewer degrees of freedom, the sample variance over seeds may be far too small."""
_FEW_EVENTS: Final = 2.0
"""Number of rare outcomes that the assumption of runs that agree on every example counts for, beside the bootstrap."""
_MORE_UNITS: Final = 2.0
OTHER_SPREAD: Final = 0.1
"""Seeds of one setting spread more than those of the others if an F test rejects that they do not at this level."""
_OTHER_DIFFERENCE: Final = 0.02
"""As `OTHER_SPREAD`, for a difference, whose bounds hold for many pairs at once: there, a spread of its own that two or
three seeds estimate makes them so wide that they say nothing, and what goes unnoticed costs less; see `unnoticed`."""


@dataclass(frozen=True)
class ConfidenceInterval:
    """A mean over ``runs`` runs with its interval. `covers`: sources of variation that the interval accounts for.

    `corrected`: of an extreme over groups, such as the worst-served group, the value without the bias of choosing the
    extreme of noisy numbers; None for other numbers.
    """

    value: float
    low: float
    high: float
    runs: int
    covers: Covers
    corrected: float | None = None

    def within(self, least: float, most: float) -> ConfidenceInterval:
        """Return the interval cut to the possible values [least, most]; the ends stay in order.

        A corrected value is an estimate, which the ends bound.
        """
        low, high = (min(max(end, least), most) for end in (self.low, self.high))
        corrected = None if self.corrected is None else min(max(self.corrected, low), high)
        return replace(self, low=low, high=high, corrected=corrected)

    @property
    def is_of_splits(self) -> bool:
        """Return whether its runs are on several splits of the data, so that more seeds of these tell little more."""
        return self.covers == "splits, seeds and test examples"

    @property
    def is_of_one_seed(self) -> bool:
        """Return whether it knows nothing of other seeds, so that it decides nothing about settings."""
        return self.covers == "test examples"


@dataclass(frozen=True)
class RunValues:
    """K numbers of each of R runs, such as the accuracy of K groups.

    `values`: [R, K], on the original test examples.
    `resampled`: [R, B, K]; runs of one split have the same resample of the test examples in row b.
    `splits`: [R], index of the split; runs of one split have the same test examples.
    `units`: [K], number of resampled units (examples, or users) behind each number if it is a share or a difference of
    shares, else 0.
    `reach`: [K, 2], least and largest possible value of a share.
    `overlap`: number of test examples divided by number of training examples if splits are drawn from the same data,
    else 0.
    """

    values: Array
    resampled: Array
    splits: npt.NDArray[np.int64]
    units: Array
    reach: Array
    overlap: float = 0.0


@dataclass(frozen=True)
class SpreadOfSeeds:
    """Variance between the repeats of private settings (`repeats`), pooled; each [K, K] for one repeat and K numbers.

    `own`: covariance of the numbers of one setting.
    `shared`: covariance with the numbers of another setting of the same seed.
    `own_chance`, `shared_chance`: the parts that come from single test examples, which the bootstrap contains.
    `freedom`: degrees of freedom of one setting.
    `settings`: number of pooled settings.
    """

    own: Array
    shared: Array
    own_chance: Array
    shared_chance: Array
    freedom: int
    settings: int

    def of_mean(self, runs: int) -> _Pooled:
        """Return the covariance of the means of one setting over its repeats, ``runs`` of them."""
        part = self.own - self.shared
        return _Pooled(self.own / runs, self.own_chance / runs, self.shared / runs, part / runs, self)

    def of_pair(self, runs: tuple[int, int], is_paired: bool) -> _Pooled:
        """Return the covariance of the means of two settings, first setting first."""
        one, other = runs
        nothing, part = np.zeros_like(self.own), self.own - self.shared
        scale = np.repeat([one**-0.5, other**-0.5], len(self.own))

        def joined(own: Array, across: Array) -> Array:
            between = across if is_paired else nothing
            return np.asarray(np.block([[own, between], [between, own]]) * scale * scale[:, None])

        return _Pooled(
            joined(self.own, self.shared),
            joined(self.own_chance, self.shared_chance),
            joined(self.shared, self.shared),
            joined(part, nothing),
            self,
        )


@dataclass(frozen=True)
class _Pooled:
    """Covariance of means, and of its parts: of seeds, common to all settings, and of single runs."""

    between: Array
    chance: Array
    of_seeds: Array
    of_runs: Array
    source: SpreadOfSeeds

    def degrees(self, weights: Array) -> Array:
        """Return [C]: degrees of freedom of the variance of weighted sums [C, K], by Satterthwaite's approximation.

        Runs of one seed are alike under all settings, so that more settings say little more about the seeds.
        """
        freedom, settings = self.source.freedom, self.source.settings
        seeds = np.maximum(_quadratic(weights, self.of_seeds), 0.0)
        runs = np.maximum(_quadratic(weights, self.of_runs), 0.0)
        spent = (seeds + runs / settings) ** 2 / freedom
        spent += (runs * (1.0 - 1.0 / settings)) ** 2 / (freedom * max(settings - 1, 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.where(spent > 0.0, (seeds + runs) ** 2 / spent, freedom)
        # a difference of one number is free of the seeds' part, and has only that of single runs
        only_runs = (seeds <= 1e-9 * (seeds + runs)) & (np.abs(weights.sum(1)) < 1e-9)
        found = np.where(only_runs, freedom * max(settings - 1, 1), found)
        return np.asarray(np.clip(found, freedom, freedom * settings))


@dataclass(frozen=True)
class Moments:
    """Means over runs of K numbers and the covariances of these means.

    `bias`: of the bootstrap.
    `examples`: by resampling test examples.
    `between`: between `repeats`;
    `chance`: its part that comes from single test examples, which ``examples`` contains.
    `freedom`: degrees of freedom of ``between``.
    `wider`: factor on variances between splits, for unequal numbers of seeds, and for splits that overlap, being of the
    same data (Nadeau and Bengio 2003, Section 3.2).
    `settings`: 2 where the second half of the numbers is of another setting.
    """

    value: Array
    bias: Array
    examples: Array
    between: Array
    chance: Array
    freedom: int
    wider: float
    units: Array
    reach: Array
    runs: int
    covers: Covers
    settings: int = 1
    pooled: _Pooled | None = None

    @property
    def repeats(self) -> int:
        """Return the number of `repeats` of a setting."""
        return self.freedom + 1


def moments(runs: RunValues, pool: SpreadOfSeeds | None = None) -> Moments:
    """Return moments of the means of one setting's runs."""
    own = _moments(runs)
    return _with(own, None if pool is None else pool.of_mean(own.repeats))


def _with(own: Moments, pooled: _Pooled | None) -> Moments:
    """Add the pooled spread; a single run cannot be compared with it."""
    return replace(own, pooled=pooled) if own.freedom else own


def joined_runs(one: RunValues, other: RunValues) -> RunValues:
    """Return the numbers of two settings, whose runs are paired one to one, as one setting; ``other`` comes second."""
    return RunValues(
        np.concatenate((one.values, other.values), axis=1),
        np.concatenate((one.resampled, other.resampled), axis=2),
        one.splits,
        np.concatenate((one.units, other.units)),
        np.concatenate((one.reach, other.reach)),
        max(one.overlap, other.overlap),
    )


def paired(one: RunValues, other: RunValues, pool: SpreadOfSeeds | None = None) -> Moments:
    """Return moments of two settings whose runs are paired one to one; the numbers of ``other`` come second.

    pool: over settings as both of them are.
    """
    own = replace(_moments(joined_runs(one, other)), settings=2)
    return _with(own, None if pool is None else pool.of_pair((own.repeats, own.repeats), is_paired=True))


def beside(one: RunValues, other: RunValues, pool: SpreadOfSeeds | None) -> Moments:
    """Return `paired` moments, where one is the baseline. pool: of each private setting `joined_runs` with it."""
    own = replace(_moments(joined_runs(one, other)), settings=2)
    return _with(own, None if pool is None else pool.of_mean(own.repeats))


def unpaired(one: RunValues, other: RunValues, pool: SpreadOfSeeds | None = None) -> Moments:
    """Return moments as `paired` does, for runs with the same test examples but without common seeds."""
    first, second = _moments(one), _moments(other)
    means = np.concatenate([_known(each).mean(0) for each in (one, other)], axis=1)
    least = min(first.runs, second.runs)
    found = Moments(
        np.concatenate((first.value, second.value)),
        np.concatenate((first.bias, second.bias)),
        _covariance(means - means.mean(0), len(means) - 1),
        _blocks(first.between, second.between),
        _blocks(first.chance, second.chance),
        min(first.freedom, second.freedom),
        1.0,
        np.concatenate((first.units, second.units)),
        np.concatenate((first.reach, second.reach)),
        least,
        first.covers if first.runs == least else second.covers,
        settings=2,
    )
    return _with(found, None if pool is None else pool.of_pair((first.repeats, second.repeats), is_paired=False))


def repeats(runs: RunValues) -> RunValues:
    """Return what is drawn anew for each repeat: the runs of one split, or of several splits the mean of each."""
    names = np.unique(runs.splits)
    if len(names) == 1:
        return replace(runs, resampled=_known(runs))
    means, resampled = (
        np.stack([each[runs.splits == name].mean(0) for name in names]) for each in (runs.values, _known(runs))
    )
    return replace(runs, values=means, resampled=resampled, splits=np.zeros(len(names), dtype=np.int64))


def _moments(runs: RunValues) -> Moments:
    each, (_, sizes) = repeats(runs), np.unique(runs.splits, return_counts=True)
    means, value, count = each.resampled.mean(0), runs.values.mean(0), len(each.values)
    freedom, size = count - 1, len(value)
    between, chance = np.zeros((size, size)), np.zeros((size, size))
    if freedom:
        between = _covariance(around_mean(each.values), freedom * count)
        chance = _covariance(apart_by_chance(each), freedom * count * each.resampled.shape[1])
    return Moments(
        value,
        means.mean(0) - each.values.mean(0),
        _covariance(means - means.mean(0), len(means) - 1),
        between,
        chance,
        freedom,
        float(count * ((sizes / sizes.sum()) ** 2).sum() + count * runs.overlap) if len(sizes) > 1 else 1.0,
        runs.units,
        runs.reach,
        len(runs.values),
        _covers(len(runs.values), len(sizes)),
    )


def _known(runs: RunValues) -> Array:
    """Resampled values, with the original one where a resample has no example that counts, and spread as far."""
    known = np.isfinite(runs.resampled)
    if known.all():
        return runs.resampled
    original = runs.values[:, None]
    share = np.maximum(known.mean(1, keepdims=True), 1.0 / known.shape[1])
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(known, original + (runs.resampled - original) / np.sqrt(share), original))


def _covariance(apart: Array, degrees: int) -> Array:
    return np.asarray(apart.T @ apart / max(degrees, 1))


def _blocks(first: Array, second: Array) -> Array:
    apart = np.zeros((len(first), len(second)))
    return np.asarray(np.block([[first, apart], [apart.T, second]]))


def around_mean(values: Array) -> Array:
    """Return deviations of values [R, ...] from their mean."""
    return np.asarray(values - values.mean(0))


def apart_by_chance(each: RunValues) -> Array:
    """Return [R B, K]: how far `repeats` move apart when test examples are resampled."""
    return around_mean(each.resampled - each.values[:, None]).reshape(-1, each.values.shape[1])


def with_variance_of_shares(found: Moments, which: npt.NDArray[np.bool_]) -> Moments:
    """Return the moments where the shares ``which`` [K] vary by the choice of units at least as one share of so many.

    For means over classes: where a few examples of a class all come out alike, no resample of them varies.
    """
    share = np.clip(found.value, 0.0, 1.0)
    least = np.where(which, share * (1.0 - share) / np.maximum(found.units, 1.0), 0.0)
    more = np.maximum(least - np.diag(found.examples), 0.0)
    return replace(found, examples=found.examples + np.diag(more))


def _covers(runs: int, splits: int) -> Covers:
    if splits > 1:
        return "splits, seeds and test examples"
    return "seeds and test examples" if runs > 1 else "test examples"


def _quadratic(weights: Array, matrix: Array) -> Array:
    return np.asarray(np.einsum("ck,ck->c", weights @ matrix, weights))


@dataclass(frozen=True)
class _Spread:
    """Variance of weighted sums [C] and its degrees of freedom; of_examples: its part that the bootstrap has."""

    variance: Array
    of_examples: Array
    degrees: Array

    def reach(self, tail: float) -> Array:
        """Return [C]: quantile of Student's t beyond which the truth lies with probability ``tail``."""
        return np.asarray(special.stdtrit(self.degrees, 1.0 - tail))


def unnoticed(freedom: int) -> float:
    """Return the factor on the pooled deviation of a difference, for a setting whose seeds spread more than the others'
    unnoticed.

    `freedom`: degrees of freedom of one setting, such as its seeds less one. By simulation, all verdicts hold in 95% of
    sweeps with one of six settings at up to eight times the spread of the others. Where all spread alike, bounds are
    narrower on average than with more rejections by the F test and no factor.

    >>> [round(unnoticed(seeds - 1), 2) for seeds in (2, 3, 5, 10)]
    [1.38, 1.25, 1.15, 1.07]
    """
    return 1.0 + 3.0 / (4.0 * (freedom + 1))


def _spread(found: Moments, weights: Array) -> _Spread:
    """Return the spread of weighted sums of means. weights: [C, K]."""
    of_examples = np.maximum(_quadratic(weights, found.examples), 0.0)
    chance, own = _quadratic(weights, found.chance), found.wider * _quadratic(weights, found.between)
    between, freedom = own, np.full(len(weights), float(found.freedom))
    if found.pooled is not None:
        pooled, known = found.pooled, found.pooled.degrees(weights)
        more = np.maximum(chance - _quadratic(weights, pooled.chance), 0.0)
        spread = found.wider * np.maximum(_quadratic(weights, pooled.between), 0.0) + more
        level, factor = (OTHER_SPREAD, 1.0) if found.settings == 1 else (_OTHER_DIFFERENCE, unnoticed(found.freedom))
        with np.errstate(divide="ignore", invalid="ignore"):
            other = special.fdtrc(np.maximum(freedom, 1.0), known, own / spread) < level
        stays = other & (freedom > 0)
        between = np.where(stays, own, np.maximum(own, spread * factor**2))
        freedom = np.where(stays, freedom, known)
    variance = np.maximum(of_examples - chance, 0.0) + between
    variance = np.where(freedom < _FEW, np.maximum(variance, of_examples), variance)
    spent = np.maximum(between, chance) ** 2 / np.maximum(freedom, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        degrees = np.where(spent > 0.0, np.maximum(freedom, variance**2 / spent), np.inf)
    return _Spread(variance, np.minimum(of_examples, variance), degrees)


def bounds(found: Moments, weights: Array, tail: float = TAIL) -> tuple[Array, Array]:
    """Return the lower and upper bounds [C] on weighted sums [C, K] of the true means, each wrong with probability
    ``tail``.

    Shares are treated as if two more units had been seen, with one counted (Agresti and Caffo 2000). In a pair of
    settings, each of the two units is right under one setting (Bonett and Price 2012).
    """
    centre, variance, spread = _adjusted(found, weights)
    half, plain = spread.reach(tail) * np.sqrt(variance), weights @ (found.value - found.bias)
    return np.minimum(centre - half, plain), np.maximum(centre + half, plain)


def deviations(found: Moments) -> Array:
    """Return [K]: standard deviation of each mean, which few examples that agree do not bring to 0."""
    return np.asarray(np.sqrt(_adjusted(found, np.eye(len(found.value)))[1]))


def _adjusted(found: Moments, weights: Array) -> tuple[Array, Array, _Spread]:
    """Return centre and variance [C] of weighted sums of means, with two more units of every share."""
    spread = _spread(found, weights)
    more = np.where(found.units > 0.0, _MORE_UNITS, 0.0)
    total = np.maximum(found.units + more, 1.0)
    kept, middle = np.where(more > 0.0, found.units / total, 1.0), found.reach.mean(1)
    span = found.reach[:, 1] - found.reach[:, 0]
    off = np.where(more > 0.0, found.value - middle, 0.0)
    centre = weights @ np.where(more > 0.0, middle + kept * off, found.value - found.bias)
    variance = np.maximum(_quadratic(weights * kept, found.examples), 0.0)
    unseen = np.sqrt(more) / 2.0 * span / total
    variance += _quadratic(weights, _same_units(found, -1.0) * unseen * unseen[:, None])
    # what recentring adds: the same units stand behind the number of one place in both settings of a pair
    drift = np.sqrt(found.units * more / total**3) * off
    variance += _quadratic(weights, _same_units(found, 1.0) * drift * drift[:, None])
    of_seeds: Array = np.maximum(spread.variance - spread.of_examples, 0.0)
    return np.asarray(centre, dtype=np.float64), np.asarray(variance + of_seeds, dtype=np.float64), spread


def _same_units(found: Moments, across: float) -> Array:
    """Return [K, K]: 1 for a number itself, ``across`` for the same units under the other setting of a pair."""
    size = len(found.value) // found.settings
    settings = np.full((found.settings, found.settings), across) + (1.0 - across) * np.eye(found.settings)
    return np.asarray(np.kron(settings, np.eye(size)), dtype=np.float64)


def singles(found: Moments, tail: float = TAIL) -> tuple[Array, Array]:
    """Return the lower and upper bounds [K] on each true mean, each wrong with probability ``tail``.

    A share has the interval of Clopper and Pearson at the effective number of examples, combined with Student's
    interval of the seeds (Zou and Donner 2008). A change of a share (a reach below 0) is treated as in `bounds`; if all
    resamples agree, unseen examples may have changed by anything possible.
    """
    weights = np.eye(len(found.value))
    spread = _spread(found, weights)
    reach = spread.reach(tail)
    value = found.value - found.bias
    half = reach * np.sqrt(spread.variance)
    low, high = value - half, value + half
    is_share, is_change = (
        (found.units > 0.0) & negative for negative in (found.reach[:, 0] >= 0.0, found.reach[:, 0] < 0.0)
    )
    if is_change.any():
        below, above = bounds(found, weights, tail)
        unseen = np.where(spread.of_examples > 0.0, 0.0, 1.0 - tail ** (1.0 / np.maximum(found.units, 1.0)))
        below = np.minimum(below, found.value - unseen * (found.value - found.reach[:, 0]))
        above = np.maximum(above, found.value + unseen * (found.reach[:, 1] - found.value))
        low, high = np.where(is_change, below, low), np.where(is_change, above, high)
    if is_share.any():
        exact_low, exact_high = _clopper_pearson(found, spread, special.ndtr(-reach))
        of_seeds = reach * np.sqrt(np.maximum(spread.variance - spread.of_examples, 0.0))
        low = np.where(is_share, found.value - np.hypot(found.value - exact_low, of_seeds), low)
        high = np.where(is_share, found.value + np.hypot(exact_high - found.value, of_seeds), high)
    return np.minimum(low, found.value), np.maximum(high, found.value)


def _clopper_pearson(found: Moments, spread: _Spread, tails: Array) -> tuple[Array, Array]:
    """Return the bounds [K] on shares, at the number of independent examples that would vary as much (Korn and Graubard
    1998).

    Where few examples show the rarer outcome, runs are taken to agree on each example, which is the worst that they
    can do.
    """
    share = np.clip(found.value, 0.0, 1.0)
    units = np.maximum(found.units, 1.0)
    of_one = share * (1.0 - share)
    events = units * np.minimum(share, 1.0 - share)
    variance = (events * spread.of_examples + _FEW_EVENTS * of_one / units) / (events + _FEW_EVENTS)
    with np.errstate(divide="ignore", invalid="ignore"):
        effective = np.where(variance > 0.0, of_one / variance, units)
    right = share * effective
    wrong = effective - right
    with np.errstate(invalid="ignore"):
        low = np.where(right > 1e-9, special.betaincinv(np.maximum(right, 1e-9), wrong + 1.0, tails), 0.0)
        high = np.where(wrong > 1e-9, special.betaincinv(right + 1.0, np.maximum(wrong, 1e-9), 1.0 - tails), 1.0)
    return np.asarray(low), np.asarray(high)


def difference_bounds(found: Moments, tail: float = TAIL) -> tuple[float, float]:
    """Return the lower and upper bounds on the first of two numbers minus the second, each wrong with probability
    ``tail``.

    Of shares, 0 is within them unless the exact test of McNemar excludes it. If all resamples agree, examples that were
    not drawn, a share that the bound of Clopper and Pearson limits, may differ by anything possible.
    """
    weights = np.array([[1.0, -1.0]])
    low, high = (float(each[0]) for each in bounds(found, weights, tail))
    units = float(found.units.min())
    if not units:
        return low, high
    value, varies = float((weights @ found.value)[0]), float(_quadratic(weights, found.examples)[0])
    if _is_due_to_chance(value, varies, units, tail):
        low, high = min(low, 0.0), max(high, 0.0)
    if varies <= 0.0:
        reach = 1.0 - tail ** (1.0 / units)
        least = float(found.reach[0, 0] - found.reach[1, 1])
        low, high = min(low, value - reach * (value - least)), max(high, value + reach * (-least - value))
    return low, high


def _is_due_to_chance(value: float, varies: float, units: float, tail: float) -> bool:
    """Return whether two shares of the same units may be equal by the exact test of McNemar.

    `varies`: variance of the difference by the choice of units.

    Of several runs, the mean difference of each unit counts, by its square. Small differences of many units with one
    sign say more. A sum of terms a_i whose signs are fair coins reaches s with a probability of at most
    exp(-s^2 / (2 sum a_i^2)) (Hoeffding 1963, Theorem 2).
    """
    unlike = units * (units * max(varies, 0.0) + value**2)
    if unlike <= 0.0:
        return True
    sum_of_all = units * abs(value)
    if math.exp(-(sum_of_all**2) / (2.0 * unlike)) <= tail:
        return False
    ahead = min((unlike + sum_of_all) / 2.0, unlike)
    # P(at least `ahead` of `unlike` fair coins), for numbers that need not be whole
    return float(special.betainc(ahead, unlike - ahead + 1.0, 0.5)) > tail
