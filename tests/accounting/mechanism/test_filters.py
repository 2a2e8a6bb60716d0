"""Filters: prices are never below the real cost of a step, and a trace with a filter claims its budget and no more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.calibration.parameter_search import calibrate_filter, calibrate_noise_multiplier
from dpsweep.accounting.errors import InvalidInput, Unreachable, UnsupportedMechanism
from dpsweep.accounting.individual import individual_epsilons
from dpsweep.accounting.mechanism.filters import GaussianFilter, IndividualFilter, RenyiFilter
from dpsweep.accounting.mechanism.samplings import FixedBatchSampling, PoissonSampling, ShuffledSampling
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Release, Segment, SideQuery, Trace
from dpsweep.accounting.pld import delta_pld, epsilon_pld
from dpsweep.accounting.pld.groups import epsilon_of_examples
from dpsweep.accounting.records.traces import read_trace, write_trace

DELTA = 1e-5


def trace_of(sample_rate: float, sigma: float, steps: int = 500, *releases: Release) -> Trace:
    return Trace(1000, (Segment(0, steps, PoissonSampling(sample_rate), sigma),), releases)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("order", [2, 7, 20, 64])
@pytest.mark.parametrize(("sample_rate", "sigma"), [(1e-6, 0.7), (0.01, 0.8), (0.3, 2.0), (1.0, 5.0), (0.05, 300.0)])
def test_prices_are_upper_bounds_of_the_divergence(order: int, sample_rate: float, sigma: float) -> None:
    prices = RenyiFilter(1.0, order).prices(sample_rate, sigma)
    for c in [1e-9, 1e-5, *np.random.default_rng(order).uniform(0.0, 1.0, 5), 1.0]:
        with mpmath.workdps(60):
            q, u = mpmath.mpf(sample_rate), (mpmath.mpf(c) / mpmath.mpf(sigma)) ** 2
            moment = mpmath.fsum(
                mpmath.binomial(order, k) * (1 - q) ** (order - k) * q**k * mpmath.expm1((k * k - k) * u / 2)
                for k in range(2, order + 1)
            )
            exact = float(mpmath.log1p(moment) / (order - 1))
        assert exact <= prices.cost(c) <= exact * (1.02 if order < 20 or sample_rate > 1e-6 else 3.0)


@pytest.mark.parametrize("limit", [RenyiFilter(0.2, 5), GaussianFilter(0.2)])
def test_what_is_affordable_costs_what_is_left(limit: IndividualFilter) -> None:
    prices = limit.prices(1.0, 0.5)
    left = np.random.default_rng(0).uniform(0.0, float(prices.cost(1.0)), 300)
    assert prices.cost(prices.affordable(left)) == pytest.approx(left, rel=1e-8)
    assert prices.affordable([0.0, -1.0, 1e9]).tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("rate", [0.01, 0.5])
def test_a_gaussian_budget_leaves_no_more_for_being_sampled(rate: float) -> None:
    """Why there is no residue filter (docs/accounting-proofs.md): a step of mean 1 takes 1 of mu^2, sampled or not.

    With a little more left than mu^2 - 1, what must be possible with step and remainder exceeds what mu allows. Proof:
    after a step with trade-off curve f, a budget G_mu leaves at most the largest r with f ⊗ G_r >= G_mu. With q = 1
    that is r^2 = mu^2 - (c/sigma)^2. With q < 1 it is no larger. Let s^2 = r^2 + (c/sigma)^2, and delta_s the curve of
    N(s, 1) against N(0, 1). As the mixture of the step is at least q N(c/sigma, 1), the delta of f ⊗ G_r at epsilon is
    at least q delta_s(epsilon - ln q). If s > mu, this is above delta_mu(epsilon) once epsilon is large.
    """

    def delta(mean: Any, epsilon: Any) -> Any:
        return mpmath.ncdf(mean / 2 - epsilon / mean) - mpmath.exp(epsilon) * mpmath.ncdf(-mean / 2 - epsilon / mean)

    def exceeds(left: float, epsilon: int) -> bool:
        together = mpmath.sqrt(1 + left)
        return bool(rate * delta(together, epsilon - mpmath.log(rate)) > delta(budget, epsilon))

    with mpmath.workdps(400):
        budget = mpmath.mpf("1.5")
        assert exceeds(1.02 * (1.5**2 - 1.0), 1000)
        assert not any(exceeds(1.5**2 - 1.0, epsilon) for epsilon in (1, 100, 1000))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("releases", [(), (GaussianRelease("pca", 16.0), PureRelease("count", 0.1))])
@pytest.mark.parametrize("epsilon", [0.5, 3.0, 10.0])
@pytest.mark.parametrize("sample_rate", [0.02, 1.0])
def test_a_calibrated_filter_spends_the_target_and_no_more(
    sample_rate: float, epsilon: float, releases: tuple[Release, ...]
) -> None:
    flat = calibrate_noise_multiplier(lambda sigma: trace_of(sample_rate, sigma, 500, *releases), epsilon, DELTA)
    lower = trace_of(sample_rate, 0.8 * flat, 500, *releases)
    filtered = replace(lower, filter=calibrate_filter(lower, epsilon, DELTA))
    found = account(filtered, DELTA)
    assert (found.accountant, found.kind, found.lower_epsilon) == ("filter", "guarantee", None)
    assert 0.9999 * epsilon < found.epsilon <= epsilon
    assert account(filtered.until(1), DELTA).accountant != "filter", "a step costs less than the whole budget"


def test_a_filter_is_a_guarantee_for_everyone_and_groups_are_as_without_it() -> None:
    plain = replace(trace_of(0.02, 0.8), contributions="output_specific")
    filtered = replace(plain, filter=calibrate_filter(plain, 2.0, DELTA))
    found = individual_epsilons([0], [[1.0], [0.1]], filtered, DELTA, "pld")
    assert (found.kind, found.method) == ("guarantee", "filter")
    assert found.upper == pytest.approx(2.0, rel=1e-6)
    assert found.lower is None
    assert individual_epsilons([0], [[0.1]], plain, DELTA, "pld").kind == "output_specific"
    assert epsilon_of_examples(filtered, [0], [[0.1], [0.1]], DELTA).kind == "output_specific"
    assert account(filtered, DELTA, "pld", 2).epsilon == account(plain, DELTA, "pld", 2).epsilon
    assert account(filtered, DELTA, "pld", 2).lower_epsilon is None
    assert epsilon_pld(filtered, DELTA).lower is delta_pld(filtered, 1.0).lower is None
    followed = replace(filtered, noise_follows_results=True, ended_by_results=True)
    assert account(replace(followed, filter=None), DELTA).kind == "estimate"
    assert account(followed, DELTA).kind == individual_epsilons([0], [[1.0]], followed, DELTA).kind == "guarantee"


@pytest.mark.parametrize("limit", [None, RenyiFilter(0.3, 6), GaussianFilter(0.3)])
def test_a_trace_is_stored_with_its_filter(limit: IndividualFilter | None, tmp_path: Path) -> None:
    trace = replace(trace_of(1.0, 2.0), filter=limit)
    write_trace(str(tmp_path / "trace.arrow"), trace)
    assert read_trace(str(tmp_path / "trace.arrow")) == trace


@pytest.mark.parametrize(
    ("segment", "limit", "words"),
    [
        ({"sampling": FixedBatchSampling(1000, 10)}, RenyiFilter(1.0, 4), "not fixed batches"),
        ({"sampling": ShuffledSampling(10)}, RenyiFilter(1.0, 4), "shuffled|reshuffled"),
        ({"side_queries": (SideQuery("counts", 10.0),)}, RenyiFilter(1.0, 4), "1 side queries"),
        ({"noise_multiplier": 0.0}, RenyiFilter(1.0, 4), "noise multiplier 0"),
        ({}, GaussianFilter(1.0), "full batches, but the sample rate is 0.1"),
    ],
)
def test_what_no_filter_covers_is_refused(segment: dict[str, Any], limit: IndividualFilter, words: str) -> None:
    plain = Segment(0, 100, PoissonSampling(0.1), 1.0)
    shuffled = isinstance(segment.get("sampling"), ShuffledSampling)
    with pytest.raises((UnsupportedMechanism, InvalidInput), match=words):
        Trace(1000, (replace(plain, **segment),), adjacency="zero_out" if shuffled else "add_remove", filter=limit)


def test_impossible_filters_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"order of a Renyi filter is 2\.5, but must be a whole number"):
        RenyiFilter(1.0, 2.5)  # type: ignore[arg-type]  # what a file may hold
    with pytest.raises(InvalidInput, match="budget of a filter is 0"):
        GaussianFilter(0.0)
    with pytest.raises(UnsupportedMechanism, match="noise multiplier 0"):
        calibrate_filter(trace_of(0.1, 0.0), 1.0, DELTA)
    for sample_rate in (0.1, 1.0):
        with pytest.raises(Unreachable, match=r"nothing is left of a budget of epsilon 0\.1"):
            calibrate_filter(trace_of(sample_rate, 1.0, 10, GaussianRelease("pca", 1.0)), 0.1, DELTA)
