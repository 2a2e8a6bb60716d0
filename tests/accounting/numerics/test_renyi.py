"""Renyi divergences against arbitrary-precision integration, and the conversions against the papers."""

import math
from typing import Any

import mpmath as mp
import numpy as np
import pytest
from dp_accounting.rdp import compute_epsilon
from scipy import stats

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.numerics.renyi import (
    ORDERS,
    epsilon_classic,
    epsilon_improved,
    gaussian_rdp,
    pure_rdp,
    sampled_gaussian_rdp,
)

SAMPLED = [(0.01, 6.0), (0.01, 1.0), (0.2, 0.3), (0.5, 3.0), (1e-5, 2.0), (0.9, 0.7)]


def exact_rdp(q: float, sigma: float, alpha: float, reverse: bool = False) -> float:
    """D_alpha of the sampled Gaussian pair by integration with 25 digits; ``reverse`` swaps the pair."""
    with mp.workdps(25):
        q, sigma, alpha = mp.mpf(q), mp.mpf(sigma), mp.mpf(alpha)
        power = 1 - alpha if reverse else alpha

        def integrand(x: Any) -> Any:
            return mp.npdf(x, 0, sigma) * (1 - q + q * mp.exp((2 * x - 1) / (2 * sigma**2))) ** power

        points = mp.linspace(-14 * sigma - 5 * alpha * reverse, alpha + 14 * sigma, 14)
        return float(mp.log(mp.quad(integrand, points)) / (alpha - 1))


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("q", "sigma"), SAMPLED)
def test_sampled_gaussian_is_exact_and_never_below(q: float, sigma: float) -> None:
    computed = sampled_gaussian_rdp(q, sigma)
    for index in (0, 110, int(np.flatnonzero(ORDERS == 2.0)[0]), int(np.flatnonzero(ORDERS == 20.0)[0])):
        exact = exact_rdp(q, sigma, ORDERS[index])
        assert exact <= computed[index] <= exact * (1.0 + 1e-7)


def exact_excess_rdp(q: float, sigma: float, alpha: float) -> float:
    """As `exact_rdp`, for any q: the trapezoidal rule on the excess of A_alpha over 1, with digits to spare."""
    with mp.workdps(40 + math.ceil(-2.0 * math.log10(q))):
        q, sigma, alpha = mp.mpf(q), mp.mpf(sigma), mp.mpf(alpha)
        step, start = min(sigma, sigma**2) / 6, -13 * sigma

        def excess(x: Any) -> Any:
            y = q * mp.expm1((2 * x - 1) / (2 * sigma**2))
            return mp.npdf(x, 0, sigma) * ((1 + y) ** alpha - 1 - alpha * y)

        points = int((max(alpha, 2) + 26 * sigma) / step) + 1
        return float(mp.log1p(step * mp.fsum(excess(start + i * step) for i in range(points))) / (alpha - 1))


@pytest.mark.thinned(15)
@pytest.mark.parametrize("sigma", [0.12, 0.3, 1.0, 10.0, 1e3, 1e6])
@pytest.mark.parametrize("q", [1e-60, 1e-10, 1e-6, 1e-3, 0.9])
def test_fractional_orders_are_exact_however_little_a_step_costs(q: float, sigma: float) -> None:
    computed = sampled_gaussian_rdp(q, sigma)
    fractional = np.flatnonzero(np.floor(ORDERS) != ORDERS)
    for index in fractional[[0, len(fractional) // 2, -1]]:
        exact = min(exact_excess_rdp(q, sigma, ORDERS[index]), ORDERS[index] / (2.0 * sigma**2))
        assert exact * (1.0 - 1e-13) <= computed[index] <= exact * (1.0 + 2e-9)


@pytest.mark.parametrize("sigma", [3.0, 30.0, 1e4, 1e8])
def test_rare_batches_cost_the_square_of_their_rate(sigma: float) -> None:
    limit = ORDERS * 1e-20 * math.expm1(sigma**-2.0) / 2.0
    few = ORDERS < 12.0  # of the largest, q e^(12 / sigma^2) is still small
    np.testing.assert_allclose(sampled_gaussian_rdp(1e-10, sigma)[few], limit[few], rtol=3e-9)


@pytest.mark.parametrize(("q", "sigma", "delta"), [(1e-10, 1e6, 1e-9), (1e-8, 1e4, 1e-5), (1e-10, 1e3, 1e-6)])
def test_the_longest_runs_are_not_free(q: float, sigma: float, delta: float) -> None:
    """Counting how often an example was drawn can only help: delta(0) >= E[Phi(K / (sigma sqrt(T)))] - 1/2."""
    steps = 9 * 10**15
    mean, spread = q * steps, 12.0 * math.sqrt(q * steps)
    draws = np.arange(int(mean - spread), int(mean + spread))
    shifts = draws / (sigma * math.sqrt(steps))
    advantage = stats.poisson.pmf(draws, mean) @ (stats.norm.cdf(shifts) - 0.5)
    assert advantage > 2.0 * delta  # and the law of K is within q of Poisson's
    assert account(Trace(10**6, (Segment(0, steps, PoissonSampling(q), sigma),)), delta, "rdp").epsilon > 0.0


@pytest.mark.parametrize(("q", "sigma"), SAMPLED)
def test_the_reverse_direction_is_dominated(q: float, sigma: float) -> None:
    index = int(np.flatnonzero(ORDERS == 3.0)[0])
    assert exact_rdp(q, sigma, 3.0, reverse=True) <= sampled_gaussian_rdp(q, sigma)[index]


@pytest.mark.parametrize(("q", "sigma"), [(0.01, 1.0), (0.3, 0.05), (1e-4, 20.0)])
def test_divergence_grows_with_the_order_and_sampling_never_costs(q: float, sigma: float) -> None:
    computed = sampled_gaussian_rdp(q, sigma)
    assert np.all(np.diff(computed) >= -1e-8 * computed[1:])
    assert np.all(computed <= gaussian_rdp(sigma))


def test_full_batches_are_plain_gaussians() -> None:
    np.testing.assert_array_equal(sampled_gaussian_rdp(1.0, 2.0), ORDERS / 8.0)


@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 1.0, 30.0])
def test_pure_release_is_randomised_response(epsilon: float) -> None:
    rdp = pure_rdp(epsilon)
    with mp.workdps(60):
        p = 1 / (1 + mp.exp(-mp.mpf(epsilon)))
        for index in (0, 100, 200, len(ORDERS) - 1):
            a = mp.mpf(float(ORDERS[index]))
            exact = mp.log(p**a * (1 - p) ** (1 - a) + (1 - p) ** a * p ** (1 - a)) / (a - 1)
            assert exact <= rdp[index] <= exact * (1.0 + 1e-4)
    assert np.all(rdp <= epsilon * (1.0 + 1e-12))
    assert np.all(rdp <= 0.5 * ORDERS * epsilon**2 * (1.0 + 1e-8))


@pytest.mark.parametrize("rho", [1e-9, 1e-3, 0.1, 3.0, 40.0])
def test_improved_conversion_agrees_with_dp_accounting(rho: float) -> None:
    rdp = rho * ORDERS
    assert epsilon_improved(rdp, 1e-5) == pytest.approx(compute_epsilon(ORDERS, rdp, 1e-5)[0], rel=1e-12)


def test_classic_conversion_is_that_of_concentrated_dp() -> None:
    assert epsilon_classic(0.3 * ORDERS, 1e-5) == pytest.approx(0.3 + 2.0 * math.sqrt(0.3 * math.log(1e5)), rel=1e-4)
