"""Bounds by the noise that scores and guesses contradict: close, and above the claim as rarely as they say."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from dpsweep.accounting import PoissonSampling, Segment, ShuffledSampling, Trace, account
from dpsweep.accounting.audits import StatedRun, random_scores, ranks_epsilon
from dpsweep.accounting.audits.scaled_noise import _RATES, _most_between

DELTA = 1e-5


def full_batches(sigma: float, steps: int = 1) -> StatedRun:
    trace = Trace(1000, (Segment(0, steps, PoissonSampling(1.0), sigma),))
    return StatedRun(trace, trace, DELTA)


def claim(run: StatedRun) -> float:
    return account(run.trace, DELTA).epsilon


def scores(mean: float, inside: int, outside: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return generator.normal(mean, 1.0, inside), generator.normal(0.0, 1.0, outside)


def test_ranks_prove_most_of_a_gaussian_and_notice_noise_that_is_too_small() -> None:
    run, generator = full_batches(1.0), np.random.default_rng(0)
    right, wrong = (scores(mean, 1000, 8000, generator) for mean in (1.0, 1.3))
    assert 0.8 * claim(run) < ranks_epsilon(*right, run, 0.95, 0) <= claim(run)
    assert ranks_epsilon(*wrong, run, 0.95, 0) > claim(run)
    noise = generator.normal(size=2000)
    assert ranks_epsilon(noise[:1000], noise[1000:], run, 0.95, 0) < 0.2 * claim(run)
    assert ranks_epsilon(right[0], np.empty(0), run, 0.95, 0) == 0.0


def test_only_the_order_of_scores_counts() -> None:
    run, generator = full_batches(1.0), np.random.default_rng(1)
    inside, outside = scores(1.0, 200, 800, generator)
    found = ranks_epsilon(inside, outside, run, 0.95, 0)
    assert ranks_epsilon(np.exp(inside), np.exp(outside), run, 0.95, 0) == found
    assert ranks_epsilon(np.ones(200), np.ones(800), run, 0.95, 0) == 0.0


def test_simulated_canaries_show_all_that_a_gaussian_does() -> None:
    """A test of rate alpha finds Phi(Phi^-1(alpha) + mean) of those that took part."""
    included = np.arange(200_000) % 2 == 0
    found = random_scores(full_batches(1.0), included, np.random.default_rng(0))
    for rate in (0.01, 0.1, 0.5):
        threshold = np.quantile(found[~included], 1.0 - rate)
        assert np.mean(found[included] > threshold) == pytest.approx(ndtr(ndtri(rate) + 1.0), abs=0.006)


def test_hardly_more_is_allowed_than_a_gaussian_shows() -> None:
    """Never less, and of its mean in normal deviates 0.1% more."""
    deviates = np.random.default_rng(0).uniform(-3.5, 3.5, 2000)
    exact = ndtr(ndtri(_RATES) + 0.25)
    shown = ndtri(_most_between(exact, ndtr(deviates))) - deviates
    allowed = ndtri(_most_between(full_batches(4.0).most_found(0), ndtr(deviates))) - deviates
    assert shown.min() > 0.25 - 1e-9
    assert shown.max() < allowed.max() < 0.25 * 1.001


@pytest.mark.long
@pytest.mark.parametrize("mean", [0.3, 1.0, 2.5])
def test_a_correct_run_is_accused_as_rarely_as_the_confidence_says(mean: float) -> None:
    """1,000 runs each; of a Gaussian run the bound attains its error."""
    run, generator = full_batches(1.0 / mean), np.random.default_rng(2)
    found = [ranks_epsilon(*scores(mean, 200, 800, generator), run, 0.9, seed) for seed in range(1000)]
    alarms = sum(bound > claim(run) for bound in found)
    assert 50 < alarms <= 130, "a tenth, less up to one factor of the noise"


@pytest.mark.long
def test_shuffled_epochs_are_covered() -> None:
    trace = Trace(1000, (Segment(0, 20, ShuffledSampling(10), 1.0),), adjacency="zero_out")
    run, generator = StatedRun(trace, trace, DELTA), np.random.default_rng(3)
    bound = ranks_epsilon(*scores(2.0**0.5, 1000, 4000, generator), run, 0.95, 0)
    assert 0.7 * claim(run) < bound <= claim(run)
