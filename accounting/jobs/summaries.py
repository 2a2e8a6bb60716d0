"""Sufficient statistics of the epsilons of many examples: what each part counts, how parts merge, exact quantiles.

A part of any size is summarised in a few kilobytes: counts, per-group moments of epsilon alone and with the log of the
loss, and histograms. Statistics of a trial are computed from the merged summary. Quantiles follow from its histogram up
to a relative error of 2^-7, and exactly by counting once more over the stored parts (`order_statistics`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsweep.accounting.errors import InvalidInput, keep_whole, require_finite
from dpsweep.accounting.mechanism.estimates import Claim
from dpsweep.accounting.records.epsilon_files import Epsilons

Array = NDArray[np.float64]
Counts = NDArray[np.int64]
Keys = NDArray[np.uint64]

_KEY_BITS = 7
"""Bits of the fraction that the histogram keeps: values in one of its bins differ by less than 2^-7 of the smaller."""
_FRACTION = 52
"""Bits of the fraction of a double."""
_REFINED_BITS = 13
"""By how many bits a further pass refines the bins that hold wanted values."""
GATHERED = 2**17
"""Largest number of values that a pass gathers; if more share the bins of the wanted ones, it counts finer bins."""


@dataclass(frozen=True)
class Counting:
    """How epsilons are counted: capped at ``bound``, in equal bins over [0, bound].

    bound: a finite epsilon that also holds for every example, such as the worst case. bins: number of bins that are
    shown. released_bins: number of bins of the histogram released with noise.
    """

    bound: float
    bins: int = 30
    released_bins: int = 20

    def __post_init__(self) -> None:
        require_finite("bound of individual epsilons", self.bound, at_least=0.0)
        keep_whole(self, "bins", "bins", at_least=1)
        keep_whole(self, "released_bins", "released_bins", at_least=1)

    def capped(self, epsilons: Array) -> Array:
        """Return the epsilons [examples], none above the bound. Raises: InvalidInput for one that is negative or
        NaN.
        """
        if not (epsilons >= 0.0).all():
            raise InvalidInput("an epsilon is negative or NaN; account for the trial again")
        return np.asarray(np.minimum(epsilons, self.bound) + 0.0)

    def shares(self, values: Array) -> Array:
        """Return capped epsilons [examples] over the bound."""
        return values / self.bound if self.bound > 0.0 else np.zeros_like(values)

    @property
    def edges(self) -> Array:
        """Edges [bins + 1] of the shown histogram."""
        return np.histogram(np.zeros(0), bins=self.bins, range=(0.0, self.bound))[1]


@dataclass(frozen=True, eq=False)
class PointMoments:
    """Moments of points [dimensions, count]: mean, low, high [dimensions], sum of (point - mean)(point - mean)^T.

    Parts merge by the formulas of Chan, Golub and LeVeque (1983), which lose no digits to cancellation.
    """

    count: int
    mean: Array
    scatter: Array
    low: Array
    high: Array

    @staticmethod
    def of(points: Array) -> PointMoments:
        """Return the moments of points [dimensions, count]."""
        size, count = points.shape
        mean = points.mean(axis=1) if count else np.zeros(size)
        centred = points - mean[:, None]
        low, high = points.min(axis=1, initial=np.inf), points.max(axis=1, initial=-np.inf)
        scatter = np.array(
            [[float((one * other).sum()) for other in centred] for one in centred]
        )  # rounding in BLAS depends on the number of threads
        return PointMoments(count, mean, np.array(scatter), low, high)

    def merged(self, other: PointMoments) -> PointMoments:
        """Return the moments of both sets of points."""
        count = self.count + other.count
        if 0 in (self.count, other.count):
            return self if other.count == 0 else other
        gap = other.mean - self.mean
        return PointMoments(
            count,
            self.mean + gap * (other.count / count),
            self.scatter + other.scatter + np.outer(gap, gap) * (self.count * other.count / count),
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
        )

    @property
    def deviation(self) -> float:
        """Sample standard deviation along the first dimension; 0 for a single point."""
        return float((self.scatter[0, 0] / (self.count - 1)) ** 0.5) if self.count > 1 else 0.0

    @property
    def correlation(self) -> float | None:
        """Pearson's r of the two dimensions; None if either is constant."""
        product = float(self.scatter[0, 0] * self.scatter[1, 1])
        if self.count == 0 or (self.high == self.low).any() or product == 0.0:
            return None
        return float(np.clip(self.scatter[0, 1] / product**0.5, -1.0, 1.0))


@dataclass(frozen=True, eq=False)
class Members:
    """Statistics of some examples.

    epsilons: moments of epsilon. with_loss: moments of epsilon and log loss, for examples with a loss. shares: sum of
    epsilons over the bound.
    """

    epsilons: PointMoments
    with_loss: PointMoments
    shares: float

    @staticmethod
    def of(values: Array, losses: NDArray[np.float32], shares: Array) -> Members:
        """Return the statistics of capped epsilons, losses and shares, all [examples]; a loss must be finite and
        above 0.
        """
        usable = (losses > 0.0) & np.isfinite(losses)
        pairs = np.stack([values[usable], np.log(losses[usable].astype(np.float64))])
        return Members(PointMoments.of(values[None, :]), PointMoments.of(pairs), float(shares.sum()))

    def merged(self, other: Members) -> Members:
        """Return the statistics of both sets of examples."""
        epsilons, with_loss = self.epsilons.merged(other.epsilons), self.with_loss.merged(other.with_loss)
        return Members(epsilons, with_loss, self.shares + other.shares)


@dataclass(frozen=True, eq=False)
class BitHistogram:
    """The number of values in each bin that is not empty: counts [bins], keys [bins] ascending.

    The key of a value is its bit pattern without the last ``shift`` bits; for values >= 0 patterns have the same order.
    """

    keys: Keys
    counts: Counts
    shift: int

    @staticmethod
    def of(values: Array, shift: int = _FRACTION - _KEY_BITS) -> BitHistogram:
        """Return the histogram of values [examples], none negative; few bins are counted without sorting, which is
        faster.
        """
        found = _patterns(values) >> np.uint64(shift)
        if shift >= _FRACTION - _KEY_BITS:
            first = found.min(initial=np.iinfo(np.uint64).max)
            counts = np.bincount((found - first).view(np.int64))
            keys = np.flatnonzero(counts)
            return BitHistogram(keys.astype(np.uint64) + first, counts[keys].astype(np.int64), shift)
        keys, counts = np.unique(found, return_counts=True)
        return BitHistogram(keys, counts.astype(np.int64), shift)

    def merged(self, other: BitHistogram) -> BitHistogram:
        """Return the histogram of both sets of values, which have the same shift."""
        keys, places = np.unique(np.concatenate([self.keys, other.keys]), return_inverse=True)
        counts = np.zeros(len(keys), np.int64)
        np.add.at(counts, places, np.concatenate([self.counts, other.counts]))
        return BitHistogram(keys, counts, self.shift)

    def holding(self, ranks: Counts) -> BitHistogram:
        """Return the bins that hold the values at the given ranks, from 0."""
        at = np.unique(self.places(ranks))
        return BitHistogram(self.keys[at], self.counts[at], self.shift)

    def above(self, ranks: Counts) -> Counts:
        """Return the given ranks, counted only among the values in the bins of `holding`."""
        places, skipped = self.places(ranks), self.counts.copy()
        skipped[places] = 0
        before = np.cumsum(skipped)
        return np.asarray(ranks - before[places])

    def places(self, ranks: Counts) -> NDArray[np.intp]:
        """Return which bins hold the values at the given ranks."""
        return np.asarray(np.searchsorted(np.cumsum(self.counts), ranks, side="right"))


@dataclass(frozen=True, eq=False)
class EpsilonSummary:
    """Sufficient statistics of the epsilons of a part, or of a trial. Private data of these examples.

    delta, method and kind are as in `Epsilons`. groups: statistics of each group that has examples, by label. shown
    [bins] and released [released_bins] count epsilons over [0, bound].
    """

    delta: float
    method: str
    kind: Claim
    counting: Counting
    everyone: Members
    groups: Mapping[int, Members]
    shown: Counts
    released: Counts
    histogram: BitHistogram

    @property
    def examples(self) -> int:
        """Number of examples."""
        return self.everyone.epsilons.count

    def merged(self, other: EpsilonSummary) -> EpsilonSummary:
        """Return the summary of both sets of examples. Raises: InvalidInput when they claim different things."""
        claims = {(each.delta, each.method, each.kind, each.counting) for each in (self, other)}
        if len(claims) != 1:
            raise InvalidInput("parts claim different (delta, method, kind) or bounds; account them again")
        groups = dict(self.groups)
        for label, members in other.groups.items():
            groups[label] = groups[label].merged(members) if label in groups else members
        return EpsilonSummary(
            self.delta,
            self.method,
            self.kind,
            self.counting,
            self.everyone.merged(other.everyone),
            groups,
            self.shown + other.shown,
            self.released + other.released,
            self.histogram.merged(other.histogram),
        )


def summarise(epsilons: Epsilons, counting: Counting) -> EpsilonSummary:
    """Return the summary of one part. Raises: InvalidInput for an epsilon that is negative or NaN."""
    values = counting.capped(epsilons.upper)
    shares = counting.shares(values)
    bins = np.minimum((shares * counting.released_bins).astype(np.int64), counting.released_bins - 1)
    columns = (values, epsilons.losses, shares)
    return EpsilonSummary(
        epsilons.delta,
        epsilons.method,
        epsilons.kind,
        counting,
        Members.of(*columns),
        {label: Members.of(*own) for label, own in _by_label(epsilons.groups, columns)},
        np.histogram(values, bins=counting.bins, range=(0.0, counting.bound))[0].astype(np.int64),
        np.bincount(bins, minlength=counting.released_bins).astype(np.int64),
        BitHistogram.of(values),
    )


def _by_label(groups: NDArray[np.int32], columns: Sequence[NDArray[Any]]) -> Iterator[tuple[int, list[NDArray[Any]]]]:
    """Yield each label of ``groups`` [examples], with the columns, each [examples], of only its examples, in order."""
    labels = np.unique(groups)
    codes = np.searchsorted(labels, groups).astype(np.min_scalar_type(len(labels)))  # short numbers are sorted fast
    order, ends = np.argsort(codes, kind="stable"), np.cumsum([0, *np.bincount(codes, minlength=len(labels))]).tolist()
    ordered = [column[order] for column in columns]
    for label, (start, stop) in zip(labels.tolist(), pairwise(ends), strict=True):
        yield label, [column[start:stop] for column in ordered]


@dataclass(frozen=True)
class CountedEpsilons:
    """A summary and the stored parts it summarises; every pass over the parts reads them again, one at a time."""

    summary: EpsilonSummary
    parts: Iterable[Epsilons]

    def values(self) -> Iterator[Array]:
        """Yield the capped epsilons of one part after the other."""
        return (self.summary.counting.capped(part.upper) for part in self.parts)

    def quantiles(self, levels: Sequence[float]) -> list[float]:
        """Return exact quantiles, interpolated between neighbouring values as by `numpy.quantile`."""
        places = [(self.summary.examples - 1) * level for level in levels]
        ranks = np.array([(int(place), min(int(place) + 1, self.summary.examples - 1)) for place in places])
        found = order_statistics(ranks.ravel(), self.summary.histogram, self.values).reshape(ranks.shape)
        return [float(np.quantile(pair, place % 1.0)) for pair, place in zip(found, places, strict=True)]

    def shares_up_to(self, thresholds: Array) -> Counts:
        """Return how many epsilons, over the bound, are at most each threshold [k]; shape [k]."""
        count = np.zeros(len(thresholds), np.int64)
        for values in self.values():
            shares = self.summary.counting.shares(values)
            count += np.array([(shares <= threshold).sum() for threshold in thresholds], np.int64)
        return count


def order_statistics(ranks: Counts, histogram: BitHistogram, values: Callable[[], Iterable[Array]]) -> Array:
    """Return the exact values at ``ranks`` (from 0, in ascending order) among those that ``histogram`` counted.

    values: yields them all again, in pieces. Each pass gathers the values that share a bin with a wanted one. If these
    are more than `GATHERED`, counts them in finer bins, so that memory does not grow with the number of values.
    """
    wanted, ranks = histogram.holding(ranks), histogram.above(ranks)
    while wanted.shift > 0 and wanted.counts.sum() > GATHERED:
        shift = max(0, wanted.shift - _REFINED_BITS)
        finer = BitHistogram(np.zeros(0, np.uint64), np.zeros(0, np.int64), shift)
        for piece in values():
            finer = finer.merged(BitHistogram.of(_within(piece, wanted), shift))
        wanted, ranks = finer.holding(ranks), finer.above(ranks)
    if wanted.shift == 0:
        return wanted.keys.view(np.float64)[wanted.places(ranks)]
    gathered = np.sort(np.concatenate([_within(piece, wanted) for piece in values()]))
    return gathered[ranks]


def _within(values: Array, wanted: BitHistogram) -> Array:
    """Return the values that lie in the bins of ``wanted``."""
    return values[np.isin(_patterns(values) >> np.uint64(wanted.shift), wanted.keys)]


def _patterns(values: Array) -> Keys:
    return np.ascontiguousarray(values).view(np.uint64)
