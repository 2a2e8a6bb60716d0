"""Releases stay close to the truth, and every one moves by at most its sensitivity when one example changes."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
import pytest
from scipy.stats import kstest, norm

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.jobs.release import (
    OwnerReport,
    ReleaseSpec,
    SecretDraws,
    owner_report,
    release_statistics,
)
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.records.epsilon_files import Epsilons
from dpsweep.accounting.records.keystream import KEY_BYTES, KeyedStream

BOUND = 8.0


class _Silent(np.random.Generator):
    """A generator whose normal draws are zero, so that a release shows its exact query."""

    def normal(self, loc=0.0, scale=1.0, size=None):  # type: ignore[no-untyped-def]
        return np.zeros(size)


def _silent() -> np.random.Generator:
    return _Silent(np.random.PCG64(0))


def _population(examples: int = 60_000) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 4, examples)
    return np.minimum(rng.lognormal(np.log(0.4) + 0.2 * groups, 0.8), BOUND), groups


def test_released_statistics_are_within_their_standard_errors() -> None:
    epsilons, groups = _population()
    spec = ReleaseSpec(quantiles=(0.1, 0.5, 0.9))
    released = release_statistics(epsilons, groups, 4, BOUND, spec, np.random.default_rng(1))
    histogram, _ = np.histogram(epsilons, np.array(released.edges))
    assert np.abs(np.array(released.histogram) - histogram).max() < 5 * spec.histogram_noise_multiplier
    for statistics in released.groups:
        own = epsilons[groups == statistics.group]
        assert abs(statistics.mean_epsilon - own.mean()) < 5 * statistics.mean_standard_error
        assert abs(statistics.examples - len(own)) < 5 * spec.group_count_noise_multiplier
    errors = [group.mean_standard_error * group.examples for group in released.groups]
    assert abs(released.mean_epsilon - epsilons.mean()) < 5 * np.hypot.reduce(errors) / len(epsilons)
    for quantile, value in released.quantiles.items():
        assert value == pytest.approx(np.quantile(epsilons, quantile), rel=0.03)


def test_standard_errors_match_repeated_releases() -> None:
    epsilons, groups = _population(5_000)
    runs = [
        release_statistics(epsilons, groups, 4, BOUND, ReleaseSpec(), np.random.default_rng(seed))
        for seed in range(400)
    ]
    means = np.array([run.groups[2].mean_epsilon for run in runs])
    assert means.std() == pytest.approx(runs[0].groups[2].mean_standard_error, rel=0.15)


def test_released_values_lie_on_the_public_grid() -> None:
    """2^-12 of the power of two above the noise: finer bits would depend on the value."""
    epsilons, groups = _population(1000)
    released = release_statistics(epsilons, groups, 4, BOUND, ReleaseSpec(), np.random.default_rng(0))
    values = np.array([*released.histogram, *(group.examples for group in released.groups)])
    assert (values * 4096 / 32 == np.round(values * 4096 / 32)).all()


def test_the_standard_error_of_a_mean_has_the_noise_of_sum_and_count() -> None:
    """By the delta method, where every epsilon is the bound: d(sum / count) = (d sum - mean d count) / count."""
    spec = ReleaseSpec(group_count_noise_multiplier=30.0, group_sum_noise_multiplier=40.0)
    released = release_statistics(np.full(1000, BOUND), np.zeros(1000), 1, BOUND, spec, _silent())
    assert released.groups[0].mean_epsilon == BOUND
    assert released.groups[0].mean_standard_error == pytest.approx(BOUND * 50.0 / 1000.0)


@pytest.mark.parametrize("value", [0.0, 1.3, BOUND, 3 * BOUND])
def test_one_example_moves_every_query_by_at_most_one(value: float) -> None:
    epsilons, groups = _population(500)
    spec = ReleaseSpec()

    def queries(epsilons: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        released = release_statistics(epsilons, groups, 4, BOUND, spec, _silent())
        counts = np.array([group.examples for group in released.groups])
        means = np.array([group.mean_epsilon for group in released.groups])
        return np.array(released.histogram), counts, means * counts / BOUND

    without = queries(epsilons, groups)
    added = queries(np.append(epsilons, value), np.append(groups, 1))
    for before, after in zip(without, added, strict=True):
        assert np.linalg.norm(after - before) <= 1.0 + 1e-9


def test_the_spec_announces_every_release() -> None:
    spec = ReleaseSpec(quantiles=(0.1, 0.5), quantile_steps=20, quantile_noise_multiplier=200.0)
    precisions = sum(release.noise_multiplier**-2 for release in spec.releases())
    assert precisions == pytest.approx(3 / 20.0**2 + 2 * 20 / 200.0**2)
    trace = Trace(60_000, (Segment(0, 100, PoissonSampling(0.01), 1.0),))
    paid = account(dataclasses.replace(trace, releases=spec.releases()), 1e-5, "rdp")
    assert paid.epsilon > account(trace, 1e-5, "rdp").epsilon


def test_mean_and_quantiles_of_paper_a_under_a_small_budget() -> None:
    """Table 2: under (0.1, 1e-5)-DP the average error is about 1 %."""
    epsilons, _ = _population()
    quantiles = (0.1, 0.3, 0.5, 0.7, 0.9)
    steps = 20 * len(quantiles)
    multiplier = 40.0 * (steps + 3) ** 0.5
    spec = ReleaseSpec(20, multiplier, multiplier, multiplier, quantiles, quantile_noise_multiplier=multiplier)
    assert account(Trace(60_000, releases=spec.releases()), 1e-5, "gdp").epsilon <= 0.1
    released = release_statistics(epsilons, np.zeros(60_000), 1, BOUND, spec, np.random.default_rng(3))
    errors = [abs(released.mean_epsilon / epsilons.mean() - 1)]
    errors += [abs(value / np.quantile(epsilons, quantile) - 1) for quantile, value in released.quantiles.items()]
    assert np.mean(errors) < 0.03


def test_real_releases_differ_and_seeded_ones_repeat() -> None:
    epsilons, groups = _population(100)

    def release(rng: np.random.Generator | None) -> Any:
        return release_statistics(epsilons, groups, 4, BOUND, ReleaseSpec(), rng).histogram

    assert release(None) != release(None)
    assert release(np.random.default_rng(5)) == release(np.random.default_rng(5))


def test_real_releases_draw_from_the_cryptographic_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the key of the operating system known, an independent SHAKE-256 gives the noise of the histogram away."""
    key = bytes(range(KEY_BYTES))
    monkeypatch.setattr("os.urandom", lambda count: key[:count])
    monkeypatch.setattr(np.random, "default_rng", None)
    bins = 200
    spec = ReleaseSpec(bins=bins, histogram_noise_multiplier=30.0)
    released = release_statistics(np.zeros(0), np.zeros(0, np.int64), 1, BOUND, spec)
    stream = hashlib.shake_256(key + (0).to_bytes(8, "little")).digest(8 * bins)
    uniform = [(int.from_bytes(stream[i : i + 8], "little") + 0.5) / 2**64 for i in range(0, 8 * bins, 8)]
    np.testing.assert_allclose(released.histogram, 30.0 * norm.ppf(uniform), atol=30.0 * 2.0**-12)


def test_secret_draws_are_gaussian_and_no_two_calls_share_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", bytes)
    secret = SecretDraws()
    first, second = secret.normal(1.0, 2.5, (400, 500)), secret.normal(1.0, 2.5, (400, 500))
    for draws in (first, second):
        assert draws.shape == (400, 500)
        assert kstest((draws.ravel() - 1.0) / 2.5, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 5.0 / np.sqrt(first.size)
    assert len(np.unique([first, second])) == 2 * first.size


@pytest.mark.parametrize("words", [0, 2**64 - 1])
def test_the_outermost_words_are_finite(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyedStream, "words", lambda self, count: np.full(count, words, np.uint64))
    assert abs(SecretDraws().normal(0.0, 1.0, (1,))[0]) == pytest.approx(8.2095, abs=1e-4)


def test_empty_groups_and_empty_data_are_released_too() -> None:
    released = release_statistics(np.zeros(0), np.zeros(0, np.int64), 2, BOUND, ReleaseSpec(), np.random.default_rng(0))
    assert len(released.groups) == 2
    assert 0.0 <= released.mean_epsilon <= BOUND


def test_impossible_input_is_refused() -> None:
    good, groups = np.ones(3), np.zeros(3, np.int64)
    with pytest.raises(InvalidInput, match="NaN"):
        release_statistics(np.array([1.0, np.nan, 1.0]), groups, 1, BOUND, ReleaseSpec())
    with pytest.raises(InvalidInput, match="group"):
        release_statistics(good, groups + 1, 1, BOUND, ReleaseSpec())
    with pytest.raises(InvalidInput, match="epsilon_bound"):
        release_statistics(good, groups, 1, float("inf"), ReleaseSpec())
    with pytest.raises(InvalidInput, match="noise_multiplier"):
        ReleaseSpec(histogram_noise_multiplier=0.0)
    with pytest.raises(InvalidInput, match="quantile"):
        ReleaseSpec(quantiles=(1.0,))


def _owned(**fields: Any) -> Epsilons:
    epsilons = Epsilons(
        example_ids=np.array([7, 9]),
        groups=np.zeros(2, np.int32),
        upper=np.array([0.5, 1.5]),
        lower=np.array([0.4, 1.4]),
        losses=np.zeros(2, np.float32),
        delta=1e-5,
        method="rdp",
        kind="estimate",
    )
    return dataclasses.replace(epsilons, **fields)


def test_owner_report_tells_one_example_only() -> None:
    worst = PrivacyEstimate(3.0, 1e-5, "zero_out", "pld")
    report = owner_report(_owned(), 9, worst)
    assert report == OwnerReport(9, 1.5, 1e-5, "zero_out", "estimate", "rdp", 3.0)
    with pytest.raises(InvalidInput, match="example 8"):
        owner_report(_owned(), 8, worst)
    with pytest.raises(InvalidInput, match="worst case at 1e-06"):
        owner_report(_owned(), 9, dataclasses.replace(worst, delta=1e-6))


def test_an_owner_is_told_the_worst_case_where_it_is_lower() -> None:
    """The worst case is a guarantee for every example, also for one whose own bound by a looser method is higher."""
    report = owner_report(_owned(), 9, PrivacyEstimate(1.2, 1e-5, "add_remove", "pld"))
    assert report == OwnerReport(9, 1.2, 1e-5, "add_remove", "guarantee", "pld", 1.2)
