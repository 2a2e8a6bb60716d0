"""Exposure of secrets: what guessing has, and the largest that epsilon allows, against a linear program."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from dpsweep.accounting.attacks import exposure_limit, mean_exposure


@pytest.mark.parametrize("candidates", [2, 256])
def test_guessing_has_the_exposure_that_no_epsilon_allows(candidates: int) -> None:
    ranks = np.arange(1, candidates + 1)
    assert exposure_limit(0.0, 0.0, candidates) == pytest.approx(np.mean(np.log2(candidates / ranks)), rel=1e-12)
    assert exposure_limit(40.0, 0.0, candidates) == pytest.approx(np.log2(candidates), rel=1e-9)


def test_no_law_of_ranks_that_epsilon_allows_passes_the_limit() -> None:
    """A linear program over all laws of a rank whose probabilities are within epsilon and delta of the uniform law."""
    candidates, epsilon, delta = 12, 0.8, 0.01
    bits = np.log2(candidates / np.arange(1, candidates + 1))
    uniform = np.full(candidates, 1.0 / candidates)
    # p = law with the secret. Excess over e^eps q is at most delta in sum, and that of q over e^eps p too.
    n = candidates
    objective = np.concatenate([-bits, np.zeros(2 * n)])
    above = np.hstack([np.eye(n), -np.eye(n), np.zeros((n, n))])
    below = np.hstack([-np.exp(epsilon) * np.eye(n), np.zeros((n, n)), -np.eye(n)])
    sums = np.vstack(
        [np.concatenate([np.zeros(n), np.ones(n), np.zeros(n)]), np.concatenate([np.zeros(2 * n), np.ones(n)])]
    )
    solved = linprog(
        objective,
        A_ub=np.vstack([above, below, sums]),
        b_ub=np.concatenate([np.exp(epsilon) * uniform, -uniform, [delta, delta]]),
        A_eq=[np.concatenate([np.ones(n), np.zeros(2 * n)])],
        b_eq=[1.0],
    )
    limit = exposure_limit(epsilon, delta, candidates)
    assert solved.fun is not None
    most = -solved.fun
    assert most <= limit + 1e-9
    assert most >= 0.9 * limit, "so that the limit is not idle"


def test_the_interval_covers_the_mean() -> None:
    """Of secrets that are guessed, within the bits that there are."""
    draw = np.random.default_rng(0)
    truth, candidates = exposure_limit(0.0, 0.0, 64), 64
    intervals = [mean_exposure(draw.integers(1, candidates + 1, 50), candidates) for _ in range(400)]
    assert np.mean([lower <= truth <= upper for _, lower, upper in intervals]) > 0.9
    assert all(0.0 <= lower <= mean <= upper <= 6.0 for mean, lower, upper in intervals)


@pytest.mark.parametrize(("secrets", "share"), [(2, 0.5), (5, 0.9), (20, 0.0), (20, 0.5), (20, 0.97), (50, 0.995)])
def test_the_interval_covers_the_mean_where_most_secrets_are_extracted(secrets: int, share: float) -> None:
    """The others are guessed. Where all have rank 1, the next one need not."""
    draw, candidates, runs = np.random.default_rng(0), 1024, 1000
    truth = share * 10.0 + (1.0 - share) * exposure_limit(0.0, 0.0, candidates)
    is_first = draw.random((runs, secrets)) < share
    ranks = np.where(is_first, 1, draw.integers(1, candidates + 1, (runs, secrets)))
    intervals = [mean_exposure(each, candidates)[1:] for each in ranks]
    covered = np.mean([lower <= truth <= upper for lower, upper in intervals])
    assert covered > 0.95 - 2.0 * (0.05 * 0.95 / runs) ** 0.5
    assert all(lower < upper for lower, upper in intervals)
