"""Summaries of parts merge to what the whole data set gives, and hold nothing per example."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.jobs.examples import AccountingJob, PartResult, gathered
from dpsweep.accounting.jobs.release import ReleaseSpec, release_counted
from dpsweep.accounting.jobs.summaries import (
    BitHistogram,
    CountedEpsilons,
    Counting,
    EpsilonSummary,
    PointMoments,
    order_statistics,
    summarise,
)
from dpsweep.accounting.records.epsilon_files import Epsilons, StoredEpsilons, write_epsilons

LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)
BOUND = 4.0
MEBIBYTE = 2**20


def epsilons(examples: int, seed: int = 0, start: int = 0) -> Epsilons:
    """A tenth of them above the bound, in groups 0 to 2 and 4, some with a loss that has no logarithm."""
    rng = np.random.default_rng(seed)
    losses = rng.exponential(1.0, examples).astype(np.float32)
    upper = np.exp(rng.normal(0.3, 0.8, examples)) + 0.1 * losses
    losses[::17] = np.array([0.0, np.inf, np.nan], np.float32)[rng.integers(0, 3, len(losses[::17]))]
    groups = rng.choice([0, 1, 2, 4], examples).astype(np.int32)
    return Epsilons(np.arange(start, start + examples), groups, upper, upper / 2, losses, 1e-5, "rdp", "estimate")


def merged(parts: Sequence[Epsilons], counting: Counting) -> EpsilonSummary:
    first, *rest = (summarise(part, counting) for part in parts)
    for each in rest:
        first = first.merged(each)
    return first


def test_merged_parts_give_the_statistics_of_the_whole() -> None:
    parts = [epsilons(examples, seed) for seed, examples in enumerate((700, 1, 0, 1300))]
    whole, counted = Epsilons.concatenate(parts), CountedEpsilons(merged(parts, Counting(BOUND)), parts)
    values, summary = np.minimum(whole.upper, BOUND), counted.summary
    assert summary.examples == 2001
    assert summary.everyone.epsilons.mean[0] == pytest.approx(values.mean(), rel=1e-13)
    for label in (0, 1, 2, 4):
        at = whole.groups == label
        own, usable = summary.groups[label], at & (whole.losses > 0.0) & np.isfinite(whole.losses)
        assert own.epsilons.count == at.sum()
        assert own.epsilons.mean[0] == pytest.approx(values[at].mean(), rel=1e-13)
        assert own.epsilons.deviation == pytest.approx(values[at].std(ddof=1), rel=1e-12)
        expected = np.corrcoef(values[usable], np.log(whole.losses[usable].astype(np.float64)))[0, 1]
        assert own.with_loss.correlation == pytest.approx(expected, rel=1e-11)
    np.testing.assert_array_equal(summary.shown, np.histogram(values, 30, (0.0, BOUND))[0])
    assert counted.quantiles(LEVELS) == [float(np.quantile(values, level)) for level in LEVELS], "exact"
    assert set(summary.groups) == {0, 1, 2, 4}


def digest() -> str:
    """Of the moments of many random points."""
    points = np.random.default_rng(0).lognormal(size=(2, 300_000))
    moments = [PointMoments.of(points), PointMoments.of(points[:1])]
    return hashlib.sha256(b"".join(each.mean.tobytes() + each.scatter.tobytes() for each in moments)).hexdigest()


@pytest.mark.long
def test_threads_change_no_bit_of_the_moments() -> None:
    code = "from tests.accounting.jobs.test_summaries import digest; print(digest())"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            check=True,
        ).stdout
        for threads in ("1", "2")
    }
    assert len(found) == 1


def test_a_mean_far_from_zero_loses_no_digits() -> None:
    """Sums of squares would leave no digit of this deviation."""
    rng = np.random.default_rng(0)
    values = 1e7 + rng.normal(0.0, 1e-3, 4000)
    own = replace(epsilons(4000), upper=values)
    parts = [own.of(own.example_ids // 500 == part) for part in range(8)]
    found = merged(parts, Counting(1e9)).everyone.epsilons
    assert found.deviation == pytest.approx(values.std(ddof=1), rel=1e-6)


def released_at_once(own: Epsilons, num_groups: int, spec: ReleaseSpec, seed: int) -> tuple[NDArray[np.float64], ...]:
    """Histogram, counts, sums and quantiles as they were released from all epsilons in one array."""
    rng, shares = np.random.default_rng(seed), np.minimum(own.upper, BOUND) / BOUND

    def noisy(exact: NDArray[np.float64], noise: float) -> NDArray[np.float64]:
        grid = 2.0**-12 * 2.0 ** np.ceil(np.log2(noise))
        rounded: NDArray[np.float64] = np.round((exact + rng.normal(0.0, noise, exact.shape)) / grid) * grid
        return rounded

    bins = np.minimum((shares * spec.bins).astype(int), spec.bins - 1)
    histogram = noisy(np.bincount(bins, minlength=spec.bins).astype(float), spec.histogram_noise_multiplier)
    counts = noisy(np.bincount(own.groups, minlength=num_groups).astype(float), spec.group_count_noise_multiplier)
    sums = noisy(np.bincount(own.groups, shares, num_groups).astype(float), spec.group_sum_noise_multiplier)
    quantiles = []
    for level in spec.quantiles:
        estimate, step, last = 0.5, 0.25, 0.0
        for _ in range(spec.quantile_steps):
            below = noisy((shares <= estimate).sum(keepdims=True).astype(float), spec.quantile_noise_multiplier)
            gap = float(np.sign(level - below[0] / max(counts.sum(), 1.0)))
            step = step / 2.0 if gap * last < 0.0 else step
            estimate, last = float(np.clip(estimate + step * gap, 0.0, 1.0)), gap
        quantiles.append(BOUND * estimate)
    means = BOUND * np.clip(sums / np.maximum(counts, 1.0), 0.0, 1.0)
    return histogram, counts, means, np.array(quantiles)


def test_a_release_draws_the_same_noise_for_the_same_numbers_as_from_one_array() -> None:
    parts = [epsilons(900, 1), epsilons(300, 2)]
    spec = ReleaseSpec(bins=7, quantiles=(0.25, 0.5, 0.9), quantile_noise_multiplier=5.0)
    for seed in range(5):
        histogram, counts, means, quantiles = released_at_once(Epsilons.concatenate(parts), 6, spec, seed)
        counted = CountedEpsilons(merged(parts, Counting(BOUND, released_bins=7)), parts)
        found = release_counted(counted, 6, spec, np.random.default_rng(seed))
        assert found.histogram == tuple(histogram)
        assert tuple(group.examples for group in found.groups) == tuple(counts)
        assert [group.mean_epsilon for group in found.groups] == pytest.approx(means.tolist(), rel=1e-12)
        assert list(found.quantiles.values()) == quantiles.tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-310, 1e-9, 0.5, 0.5 + 1e-12, 0.5 + 1e-15, 1.0, 3.0, 1e300]), min_size=1),
    st.integers(1, 5),
    st.sampled_from([0, 3, 10**6]),
)
def test_order_statistics_are_exact_however_many_values_share_a_bin(
    values: list[float], pieces: int, at_once: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpsweep.accounting.jobs.summaries.GATHERED", at_once)
        found = order_statistics(
            np.arange(len(values)), BitHistogram.of(np.array(values)), lambda: np.array_split(np.array(values), pieces)
        )
    assert found.tolist() == sorted(values)


def test_values_in_one_bin_differ_by_less_than_the_stated_share() -> None:
    values = np.sort(np.random.default_rng(0).lognormal(0.0, 3.0, 5000))
    histogram = BitHistogram.of(values)
    starts = np.cumsum(histogram.counts) - histogram.counts
    for start, count in zip(starts.tolist(), histogram.counts.tolist(), strict=True):
        assert values[start + count - 1] <= values[start] * (1.0 + 2.0**-7)


def test_what_is_no_epsilon_and_parts_of_other_claims_are_refused() -> None:
    own = epsilons(3)
    with pytest.raises(InvalidInput, match="negative or NaN"):
        summarise(replace(own, upper=-own.upper), Counting(1.0))
    with pytest.raises(InvalidInput, match="parts claim different"):
        summarise(own, Counting(1.0)).merged(summarise(own, Counting(2.0)))
    with pytest.raises(InvalidInput, match="bound of individual epsilons"):
        Counting(float("inf"))


def driver_peak(folder: Path, examples: int, rows: int) -> tuple[int, list[float]]:
    """Peak bytes that the driver allocates to commit and to summarise a trial, and quantiles that it finds."""
    job = AccountingJob("", 1e-5, counting=Counting(BOUND), folder=str(folder))
    results = []
    for part, start in enumerate(range(0, examples, rows)):
        own = epsilons(min(rows, examples - start), part, start)
        record = write_epsilons(job.folder, part, own, "")
        results.append(pickle.dumps(PartResult(part, record, summarise(own, job.counting))))

    def arriving() -> Iterator[PartResult]:
        for result in results:
            yield pickle.loads(result)

    tracemalloc.start()
    try:
        counted = CountedEpsilons(gathered(job, arriving()), StoredEpsilons(job.folder))
        quantiles = counted.quantiles(LEVELS)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(map(len, results)) < 64 * 1024, "what a part returns does not grow with its examples"
    return peak, quantiles


def test_memory_of_the_driver_does_not_grow_with_the_examples(tmp_path: Path) -> None:
    """An epsilon per example is 15 MiB at two million, before anything is computed from it; all columns are 69 MiB."""
    small, _ = driver_peak(tmp_path / "small", 2**17, 2**16)
    large, quantiles = driver_peak(tmp_path / "large", 2_000_000, 2**16)
    print(f"\ndriver peak: {small / MEBIBYTE:.1f} MiB at 131,072 examples, {large / MEBIBYTE:.1f} MiB at 2,000,000")
    assert large - small < 4 * MEBIBYTE
    values = np.concatenate([np.minimum(part.upper, BOUND) for part in StoredEpsilons(str(tmp_path / "large"))])
    assert quantiles == [float(np.quantile(values, level)) for level in LEVELS]
