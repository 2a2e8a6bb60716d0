"""Accountants against formulas that are written out here: zero-concentrated DP, pure releases, and one round."""

from __future__ import annotations

import math

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from dpsweep.accounting.accountants.methods import total_rho
from dpsweep.accounting.mechanism.samplings import PoissonSampling, ShuffledSampling
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, Trace
from tests.accounting.accountants.test_one_run import DELTA, epsilon, poisson, shuffled


class TestZeroConcentrated:
    """Against formulas written out here."""

    def test_a_pure_release_costs_a_group_the_square_of_its_size(self) -> None:
        """(epsilon, 0)-DP is (k epsilon, 0)-DP for a group of k, and epsilon^2 / 2 in rho."""
        trace = Trace(100, releases=(PureRelease("a", 0.4), PureRelease("b", 0.1)), adjacency="zero_out")
        assert total_rho(trace, 3) == pytest.approx((1.2**2 + 0.3**2) / 2.0, rel=1e-12)
        assert total_rho(shuffled(2.0, 5), 3) == pytest.approx(5 * 9.0 / 8.0, rel=1e-12)

    def test_equal_releases_each_cost(self) -> None:
        released = tuple(GaussianRelease(name, 4.0) for name in ("mean", "count", "sum"))
        trace = Trace(100, (Segment(0, 1, ShuffledSampling(1), 4.0),), released, "zero_out")
        assert total_rho(trace) == pytest.approx(4 / 32.0, rel=1e-12)
        assert epsilon(trace, "gdp") == pytest.approx(epsilon(shuffled(2.0, 1), "gdp"), rel=1e-12)

    def test_without_noise_rho_is_infinite(self) -> None:
        assert total_rho(shuffled(0.0, 3)) == math.inf
        assert total_rho(poisson(0.0, 0.1, 3)) == math.inf

    @pytest.mark.parametrize("sigmas", [(2.0, 6.0), (6.0, 2.0)])
    def test_sampled_rounds_are_converted_at_the_lowest_of_their_orders(self, sigmas: tuple[float, float]) -> None:
        """Paper C, Theorem 3: U = sigma^2 ln(1/(q sigma)) + 1 of every round bounds the order."""
        q, steps = 0.01, 1000
        segments = tuple(Segment(i * steps, steps, PoissonSampling(q), sigma) for i, sigma in enumerate(sigmas))
        rho = sum(steps * q**2 / sigma**2 for sigma in sigmas)
        order = 2.0**2 * math.log(1.0 / (q * 2.0)) + 1.0
        assert math.log(1.0 / DELTA) > rho * (order - 1.0) ** 2, "the bound on the order matters"
        expected = rho * order + math.log(1.0 / DELTA) / (order - 1.0)
        assert epsilon(Trace(1000, segments), "zcdp-sampled") == pytest.approx(expected, rel=1e-12)


def randomised_responses(epsilons: tuple[float, ...], delta: float) -> float:
    """Epsilon of randomised responses together, whose losses are sums of +-epsilon: what they cost at least."""
    law = {0.0: 1.0}
    for each in epsilons:
        truth, added = 1.0 / (1.0 + math.exp(-each)), dict[float, float]()
        for loss, mass in law.items():
            for more, share in ((each, truth), (-each, 1.0 - truth)):
                added[round(loss + more, 9)] = added.get(round(loss + more, 9), 0.0) + share * mass
        law = added

    def excess(epsilon: float) -> float:
        return sum(mass * -math.expm1(min(epsilon - loss, 0.0)) for loss, mass in law.items()) - delta

    return float(brentq(excess, 0.0, sum(epsilons)))


class TestPureReleases:
    @pytest.mark.parametrize("accountant", ["rdp", "rdp-classic", "pld", "gdp", "zcdp", "strong", "auto"])
    @pytest.mark.parametrize("epsilons", [(3.0, 2.0), (0.1,) * 40], ids=["two", "forty"])
    def test_no_accountant_is_below_what_randomised_responses_cost(
        self, epsilons: tuple[float, ...], accountant: str
    ) -> None:
        releases = tuple(PureRelease(f"choice {place}", each) for place, each in enumerate(epsilons))
        found = epsilon(Trace(100, releases=releases, adjacency="zero_out"), accountant)
        assert randomised_responses(epsilons, DELTA) * (1 - 1e-9) <= found <= sum(epsilons) * 1.001


def one_round(q: float, sigma: float, delta: float) -> float:
    """Epsilon of removing an example: P(x > c) - e^eps Q(x > c) = delta, with L(c) = eps."""

    def excess(epsilon: float) -> float:
        cut = sigma**2 * math.log((math.exp(epsilon) - 1.0 + q) / q) + 0.5
        present = q * norm.sf((cut - 1.0) / sigma) + (1.0 - q) * norm.sf(cut / sigma)
        return float(present - math.exp(epsilon) * norm.sf(cut / sigma) - delta)

    return float(brentq(excess, 1e-9, 50.0, xtol=1e-13))


class TestOneRound:
    @pytest.mark.parametrize(("q", "sigma"), [(0.01, 0.7), (0.1, 1.5), (0.6, 2.0)])
    def test_amplification_by_sampling_is_exact(self, q: float, sigma: float) -> None:
        """Of one round strong composition adds nothing."""
        exact = one_round(q, sigma, DELTA)
        assert epsilon(poisson(sigma, q, 1), "strong") == pytest.approx(exact, rel=1e-4)
        for accountant in ("rdp", "rdp-classic", "pld", "strong", "auto"):
            assert epsilon(poisson(sigma, q, 1), accountant) >= exact * (1 - 1e-9)

    @pytest.mark.parametrize("accountant", ["rdp", "pld", "strong", "auto"])
    def test_epsilon_is_0_only_where_delta_covers_all_that_a_round_tells(self, accountant: str) -> None:
        """Its total variation distance is 0.0197: between delta and twice delta, and far above the divergence."""
        assert epsilon(poisson(20.0, 0.99, 1), accountant, 0.0105) >= one_round(0.99, 20.0, 0.0105) > 0.02
        assert epsilon(poisson(20.0, 0.99, 1), "pld", 0.0198) == 0.0

    def test_strong_composition_covers_steps_that_cost_nothing_at_their_delta(self) -> None:
        """ln(1 - q + q e^0) is 0, which must not be rounded to less."""
        steps = (Segment(0, 6, PoissonSampling(5.848e-4), 1.849), Segment(6, 148, PoissonSampling(6.589658e-4), 2.4618))
        for rate in (6.589678622666510e-4, 1.0775779438943773e-4, 0.3, 0.7):
            assert epsilon(Trace(50_000, (*steps, Segment(154, 9, PoissonSampling(rate), 3.0))), "strong", 0.05) >= 0.0
