"""Areas under ROC curves that epsilon allows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import expit

from dpsweep.accounting.attacks import area_limit, epsilon_of_area


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0, 8.0])
def test_randomised_response_about_membership_stays_below_the_limit(epsilon: float) -> None:
    """Its answers order a member and another right with probability e^epsilon / (1 + e^epsilon), ties counting half."""
    assert expit(epsilon) <= area_limit(epsilon, 0.0)


def test_a_gaussian_answer_about_membership_stays_below_the_limit() -> None:
    from scipy.stats import norm

    from dpsweep.accounting.numerics.gaussian import gaussian_epsilon

    for mean in (0.1, 0.5, 1.0, 2.0):
        assert norm.cdf(mean / math.sqrt(2.0)) < area_limit(gaussian_epsilon(mean, 1e-5)[1], 1e-5)


def test_the_limit_of_the_mean_bounds_the_mean_of_the_limits() -> None:
    paid = np.random.default_rng(0).exponential(2.0, 1000)
    assert np.mean([area_limit(each, 1e-5) for each in paid]) <= area_limit(float(paid.mean()), 1e-5)
    assert epsilon_of_area(1.0, 1e-5) == math.inf


def test_a_delta_of_a_half_or_more_allows_any_area() -> None:
    assert area_limit(0.0, 0.7) == 1.0
    assert epsilon_of_area(0.9, 0.7) == 0.0
