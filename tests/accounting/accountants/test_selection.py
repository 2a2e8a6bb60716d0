"""Private selection: against dp-accounting, exact integrals over the winner's law, and closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise, product

import numpy as np
import pytest
from dp_accounting import (
    GaussianDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.special import gammaln
from scipy.stats import binom, norm

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.joint_cost import account_together
from dpsweep.accounting.accountants.selection import account_selection
from dpsweep.accounting.calibration.budgets import EpsilonBudget
from dpsweep.accounting.calibration.parameter_search import noise_multiplier_within_budget
from dpsweep.accounting.errors import InvalidInput, UnsupportedMechanism
from dpsweep.accounting.mechanism.noise_strategies import BandedNoise
from dpsweep.accounting.mechanism.random_trials import RandomTrials
from dpsweep.accounting.mechanism.samplings import PoissonSampling, ShuffledSampling
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, Trace
from dpsweep.accounting.numerics.renyi import ORDERS

DELTA = 1e-5
SHAPES = (0.0, 0.5, 1.0, 3.0)


def poisson(sigma: float = 1.0, steps: int = 2000) -> Trace:
    return Trace(60_000, (Segment(0, steps, PoissonSampling(0.01), sigma),))


def gaussian(sigma: float) -> Trace:
    return Trace(60_000, releases=(GaussianRelease("sum", sigma),))


class TestLaw:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("mean", [1.0, 1.5, 14.0, 100.0])
    def test_the_numbers_have_the_mean_and_the_probabilities(self, mean: float, shape: float) -> None:
        trials = RandomTrials(mean, shape)
        numbers = np.array([trials.number_at(u) for u in (np.arange(8_000) + 0.5) / 8_000])
        assert numbers.mean() == pytest.approx(mean, rel=1e-2)
        assert trials.largest_mean == pytest.approx(mean, rel=1e-6)
        for k in (1, 2, 5):
            assert np.mean(numbers == k) == pytest.approx(probability(trials, k), abs=3e-4)

    def test_bad_numbers_are_refused(self) -> None:
        for mean, shape in ((0.5, 1.0), (math.nan, 1.0), (1e9, 1.0), (14.0, -0.5), (14.0, math.inf)):
            with pytest.raises(InvalidInput, match=r"number of trials is .*, but must be"):
                RandomTrials(mean, shape)
        with pytest.raises(InvalidInput, match=r"below|less"):
            RandomTrials(2.0).number_at(1.0)


def probability(trials: RandomTrials, k: int) -> float:
    """P(K = k) from the definition."""
    gamma, shape = trials.gamma, trials.shape
    if gamma == 1.0:
        return float(k == 1)
    if shape == 0.0:
        return (1.0 - gamma) ** k / (k * math.log(1.0 / gamma))
    weight = math.exp(gammaln(k + shape) - gammaln(shape) - gammaln(k + 1.0)) * (1.0 - gamma) ** k
    return float(weight / (gamma**-shape - 1.0))


class TestAgainstDpAccounting:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("mean", [2.0, 14.0, 100.0])
    def test_renyi_bound_of_full_batches_is_equal(self, mean: float, shape: float) -> None:
        trace = Trace(100, (Segment(0, 50, PoissonSampling(1.0), 5.0),))
        found = account_selection(trace, RandomTrials(mean, shape), DELTA, "rdp").epsilon
        event = SelfComposedDpEvent(GaussianDpEvent(5.0), 50)
        assert found == pytest.approx(oracle(RepeatAndSelectDpEvent(event, mean, shape)), rel=1e-6)

    @pytest.mark.parametrize("mean", [2.0, 14.0])
    def test_renyi_bound_of_sampled_batches_is_at_most_theirs(self, mean: float) -> None:
        """Their RDP is up to 20 % above ours at fractional orders."""
        found = account_selection(poisson(), RandomTrials(mean), DELTA, "rdp").epsilon
        event = SelfComposedDpEvent(PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0)), 2000)
        theirs = oracle(RepeatAndSelectDpEvent(event, mean, 1.0))
        assert 0.97 * theirs <= found <= theirs * (1.0 + 1e-6)
        assert account_selection(poisson(), RandomTrials(mean), DELTA).epsilon < found


def oracle(event: RepeatAndSelectDpEvent) -> float:
    accountant = RdpAccountant(ORDERS, NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(event)
    return float(accountant.get_epsilon(DELTA))


class TestExactly:
    """The winner's law, where one run is a single Gaussian and its score a function of the output."""

    @pytest.mark.thinned(2)
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize(("mean", "mu"), [(1.2, 0.3), (1.2, 3.0), (14.0, 1.0), (200.0, 0.3), (200.0, 3.0)])
    def test_no_claim_is_below_the_exact_epsilon(self, mean: float, mu: float, shape: float) -> None:
        trials = RandomTrials(mean, shape)
        exact = exact_epsilon(trials, {0.0: 1.0}, {mu: 1.0})
        for accountant in ("pld", "rdp", "auto"):
            claimed = account_selection(gaussian(1.0 / mu), trials, DELTA, accountant).epsilon
            assert claimed >= exact > 0.0
        assert account_selection(gaussian(1.0 / mu), trials, DELTA).epsilon <= 2.5 * exact

    @pytest.mark.thinned(3)
    @pytest.mark.parametrize("size", [1, 2, 5])
    @pytest.mark.parametrize(("mean", "rate", "sigma"), [(2.0, 0.3, 1.0), (14.0, 0.05, 0.7), (14.0, 0.01, 0.4)])
    def test_groups_in_sampled_batches_cost_no_less_than_the_exact_epsilon(
        self, mean: float, rate: float, sigma: float, size: int
    ) -> None:
        """The batch of one step holds a random number of the group's records: a mixture of Gaussians."""
        trials = RandomTrials(mean)
        drawn = {j / sigma: float(binom.pmf(j, size, rate)) for j in range(size + 1)}
        exact = exact_epsilon(trials, drawn, {0.0: 1.0})
        trace = Trace(60_000, (Segment(0, 1, PoissonSampling(rate), sigma),))
        claimed = account_selection(trace, trials, DELTA, group_size=size)
        assert (claimed.unit, claimed.kind) == ("example" if size == 1 else f"group of {size}", "guarantee")
        assert exact <= claimed.epsilon <= 3.0 * exact

    @pytest.mark.parametrize("shape", SHAPES)
    def test_a_pure_run_costs_at_most_two_and_the_shape_times_its_epsilon(self, shape: float) -> None:
        """Papernot and Steinke 2022, Corollary 3; Liu and Talwar 2019, Theorem 3.2, at shape 1. Exact below it."""
        trials, epsilon = RandomTrials(14.0, shape), 1.0
        claimed = account_selection(Trace(100, releases=(PureRelease("q", epsilon),)), trials, 1e-12).epsilon
        assert claimed <= (2.0 + shape) * epsilon * (1.0 + 1e-6)
        right, wrong = math.exp(epsilon) / (1.0 + math.exp(epsilon)), 1.0 / (1.0 + math.exp(epsilon))
        best_is_one = [
            1.0 - sum(probability(trials, k) * (1.0 - p) ** k for k in range(1, 5000)) for p in (right, wrong)
        ]
        assert claimed >= abs(math.log(best_is_one[0] / best_is_one[1]))
        assert claimed >= abs(math.log((1.0 - best_is_one[0]) / (1.0 - best_is_one[1])))


def exact_epsilon(trials: RandomTrials, first: Mapping[float, float], second: Mapping[float, float]) -> float:
    """Epsilon at DELTA of the best of K draws from two mixtures of N(mean, 1), {mean: weight}: the worst of all ways.

    Either may be the neighbour, and the score may rise or fall with the draw.
    """
    ways = product(((first, second), (second, first)), (norm.sf, norm.cdf))
    return max(_exact_epsilon(trials, one, other, worse) for (one, other), worse in ways)


def _exact_epsilon(
    trials: RandomTrials, one: Mapping[float, float], other: Mapping[float, float], worse: Callable[..., object]
) -> float:
    """By summation over a fine grid. The winner's density is a draw's, weighted by E[K worse^(K-1)].

    worse(y - mean): probability that a draw around the mean is worse than y.
    """
    points, spacing = np.linspace(-14.0, 24.0, 200_001, retstep=True)

    def density(law: Mapping[float, float]) -> np.ndarray:
        share = np.sum([weight * np.asarray(worse(points - mean)) for mean, weight in law.items()], axis=0)
        weight = (1.0 - (1.0 - trials.gamma) * share) ** -(trials.shape + 1.0)
        weight *= trials.mean * trials.gamma ** (trials.shape + 1.0)
        return np.asarray(np.sum([p * norm.pdf(points - mean) * weight for mean, p in law.items()], axis=0))

    first, second = density(one), density(other)
    assert first.sum() * spacing == pytest.approx(1.0, rel=1e-6)

    def excess(epsilon: float) -> float:
        return float(np.maximum(first - math.exp(epsilon) * second, 0.0).sum() * spacing) - DELTA

    return float(brentq(excess, 0.0, 60.0)) if excess(0.0) > 0.0 else 0.0


class TestProperties:
    def test_one_trial_costs_one_trial(self) -> None:
        one = account(poisson(), DELTA)
        assert account_selection(poisson(), RandomTrials(1.0), DELTA) == one
        nearly = account_selection(poisson(), RandomTrials(1.0 + 1e-6), DELTA)
        assert nearly.epsilon == pytest.approx(one.epsilon, rel=1e-3)

    @pytest.mark.thinned(2)
    @pytest.mark.parametrize("accountant", ["pld", "rdp", "auto"])
    def test_the_cost_rises_with_the_trials_and_the_shape(self, accountant: str) -> None:
        by_mean = [account_selection(poisson(), RandomTrials(m), DELTA, accountant).epsilon for m in (1, 2, 5, 14, 99)]
        by_shape = [account_selection(poisson(), RandomTrials(14.0, s), DELTA, accountant).epsilon for s in SHAPES]
        for lower, higher in (*pairwise(by_mean), *pairwise(by_shape)):
            assert lower < higher

    def test_a_selection_among_14_costs_a_third_of_releasing_14(self) -> None:
        naive = account_together([poisson()] * 14, DELTA).epsilon
        selected = account_selection(poisson(), RandomTrials(14.0), DELTA).epsilon
        one = account(poisson(), DELTA).epsilon
        assert (round(one, 2), round(selected, 2), round(naive, 2)) == (2.58, 4.2, 11.35)

    def test_groups_and_adjacency(self) -> None:
        shuffled = Trace(1000, (Segment(0, 40, ShuffledSampling(10), 8.0),), adjacency="zero_out")
        single, pair = (account_selection(shuffled, RandomTrials(5.0), DELTA, group_size=size) for size in (1, 2))
        assert (single.adjacency, single.kind, pair.unit) == ("zero_out", "guarantee", "group of 2")
        assert pair.epsilon > 1.5 * single.epsilon
        assert account_selection(poisson(), RandomTrials(5.0), DELTA, group_size=2).accountant == "selection-pld"

    def test_without_noise_nothing_is_claimed(self) -> None:
        found = account_selection(poisson(0.0), RandomTrials(5.0), DELTA)
        assert (found.is_private, found.kind) == (False, "none")

    def test_a_reason_that_methods_share_is_given_once(self) -> None:
        steps = (Segment(0, 40, PoissonSampling(0.05), 1.0),)
        correlated = Trace(600, steps, strategy=BandedNoise(4, 40))
        with pytest.raises(UnsupportedMechanism) as refused:
            account_selection(correlated, RandomTrials(3.0), DELTA)
        assert str(refused.value).count("no bound for banded noise with Poisson batches is proven") == 1

    def test_other_accountants_are_refused(self) -> None:
        with pytest.raises(InvalidInput, match="'gdp' covers no selection"):
            account_selection(poisson(), RandomTrials(5.0), DELTA, "gdp")

    def test_calibration_meets_the_target_with_the_selection_inside(self) -> None:
        trials = RandomTrials(14.0)
        sigma = noise_multiplier_within_budget(poisson, EpsilonBudget(3.0, DELTA, trials=trials))
        assert 2.99 < account_selection(poisson(sigma), trials, DELTA).epsilon <= 3.0
        assert account(poisson(sigma), DELTA).epsilon < 2.0
