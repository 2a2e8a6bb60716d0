"""Curves and attack numbers against closed forms, quadrature, dp-accounting and simulation; their properties."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise, product

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import brentq

from dpsweep.accounting import (
    AdvantageBudget,
    GaussianRelease,
    InvalidInput,
    PoissonSampling,
    PrivacyCurve,
    PureRelease,
    ShuffledSampling,
    SideQuery,
    Trace,
    TruePositiveRateBudget,
    Unreachable,
    UnsupportedMechanism,
    User,
    account,
    attack_risk,
    curve_of_examples,
    epsilon_of_examples,
    noise_multiplier_within_budget,
    parse_schedule,
    planned_trace,
    privacy_curve,
)
from dpsweep.accounting.attacks import FALSE_POSITIVE_RATES, rate_name
from dpsweep.accounting.pld import delta_pld
from tests.known import known

Array = npt.NDArray[np.float64]
RATES = np.array([1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9])


def poisson(sample_rate: float, noise_multiplier: float, steps: int) -> Trace:
    schedule = parse_schedule("constant", noise_multiplier)
    return planned_trace(schedule, PoissonSampling(sample_rate), 1, steps, 60_000)


def gaussian(mean: float) -> Trace:
    return Trace(100, releases=(GaussianRelease("count", 1.0 / mean),))


def assert_brackets(curve: PrivacyCurve, rates: Array, exact: Array, upper: float, lower: float) -> None:
    """True positive rates: never below ``exact`` and at most ``upper`` above; achieved ones at most ``lower`` below."""
    false_negatives, achieved = curve.trade_off(rates)
    limit, found = 1.0 - false_negatives, 1.0 - known(achieved)
    assert (limit >= exact).all()
    assert (limit <= exact + upper).all(), limit - exact
    assert (found <= exact + 1e-12).all()
    assert (found >= exact - lower).all(), exact - found


class TestOfGaussians:
    @pytest.mark.parametrize("mean", [1e-3, 0.05, 0.3, 1.0, 3.0, 8.0])
    def test_the_trade_off_is_the_exact_one(self, mean: float) -> None:
        """Dong, Roth and Su 2019, equation (6): Phi(Phi^-1(1 - alpha) - mu)."""
        exact = 1.0 - stats.norm.cdf(stats.norm.isf(RATES) - mean)
        assert_brackets(privacy_curve(gaussian(mean)), RATES, exact, upper=1e-4, lower=1e-3)

    @pytest.mark.parametrize("mean", [0.05, 1.0, 8.0])
    def test_delta_is_that_of_balle_and_wang(self, mean: float) -> None:
        curve = privacy_curve(gaussian(mean), deltas=[1e-12])
        for epsilon in (0.0, 1e-3, 0.02 * mean, mean, 3.3 * mean):
            exact = stats.norm.cdf(mean / 2 - epsilon / mean) - math.exp(epsilon) * stats.norm.cdf(
                -mean / 2 - epsilon / mean
            )
            found = curve.delta(epsilon)
            assert known(found.lower) <= exact * (1 + 1e-9)
            assert exact * (1 - 1e-9) <= found.upper <= exact + 1e-3 * curve.advantage.upper

    def test_shuffled_epochs_side_queries_and_releases_are_one_gaussian(self) -> None:
        schedule, side = parse_schedule("constant", 3.0), SideQuery("counts", 12.0)
        release = (GaussianRelease("count", 5.0),)
        trace = planned_trace(schedule, ShuffledSampling(1), 4, 1, 1000, (side,), release)
        mean = math.sqrt(4 * (1 / 9 + 1 / 144) + 1 / 25)
        exact = 1.0 - stats.norm.cdf(stats.norm.isf(RATES) - 2 * mean)
        assert_brackets(privacy_curve(trace, 2), RATES, exact, upper=1e-4, lower=1e-3)


class TestOfOneSampledStep:
    @pytest.mark.parametrize(
        ("sample_rate", "sigma"), [(0.5, 1.0), (0.01, 0.8), (0.1, 0.5), (0.001, 0.3), (1e-4, 0.5), (0.9, 4.0)]
    )
    def test_the_trade_off_is_the_exact_one(self, sample_rate: float, sigma: float) -> None:
        """The likelihood ratio rises with the output, so every best test is a threshold, one for each direction."""

        def mixture(x: float) -> float:
            return float((1 - sample_rate) * stats.norm.cdf(x) + sample_rate * stats.norm.cdf(x - 1 / sigma))

        thresholds = stats.norm.isf(RATES)
        removed = np.array([1.0 - mixture(x) for x in thresholds])
        added = stats.norm.cdf([brentq(lambda x, r=rate: mixture(x) - r, -40.0, 60.0) for rate in RATES])
        curve = privacy_curve(poisson(sample_rate, sigma, 1))
        at_low_rates = RATES <= 0.1
        # between the tangents of both directions the published curve is their convex hull
        assert_brackets(curve, RATES, np.maximum(removed, added), upper=0.05, lower=0.01)
        assert_brackets(curve, RATES[at_low_rates], removed[at_low_rates], upper=1e-4, lower=1e-3)
        most = curve.most_found(RATES)  # of attacks on a record that took part, which add nothing to those removed
        assert (most >= removed).all()
        assert (most <= removed + 1e-4).all()

    @pytest.mark.parametrize("epsilon", [0.0, 0.01, 0.2, 1.0, 2.5])
    def test_delta_is_the_integral(self, epsilon: float) -> None:
        sample_rate, sigma = 0.2, 0.9

        def excess(x: mpmath.mpf) -> mpmath.mpf:
            ratio = 1 - sample_rate + sample_rate * mpmath.exp(x / sigma - 1 / (2 * sigma**2))
            return max(ratio - mpmath.exp(epsilon), 0) * mpmath.npdf(x)

        corner = sigma * (math.log((math.exp(epsilon) - 1 + sample_rate) / sample_rate) + 1 / (2 * sigma**2))
        exact = float(mpmath.quad(excess, [corner, corner + 4, corner + 40]))
        found = privacy_curve(poisson(sample_rate, sigma, 1)).delta(epsilon)
        assert known(found.lower) <= exact <= found.upper
        assert found.upper - known(found.lower) < 1e-4


class TestOfCompositions:
    @pytest.mark.thinned(2)
    @pytest.mark.parametrize(
        ("sample_rate", "sigma", "steps"), [(0.01, 1.0, 1000), (0.001, 0.7, 500), (0.2, 4.0, 200), (0.02, 0.8, 50)]
    )
    def test_agrees_with_dp_accounting(self, sample_rate: float, sigma: float, steps: int) -> None:
        peer = privacy_loss_distribution.from_gaussian_mechanism(
            sigma, sampling_prob=sample_rate, value_discretization_interval=1e-4
        ).self_compose(steps)
        curve = privacy_curve(poisson(sample_rate, sigma, steps))
        epsilons = np.linspace(0.0, 8.0, 400)
        deltas = np.array(peer.get_delta_for_epsilon(epsilons.tolist()))
        for epsilon, delta in zip(epsilons.tolist(), deltas.tolist(), strict=True):
            found = curve.delta(epsilon)
            assert known(found.lower) - 1e-6 <= delta <= found.upper + 1e-3
            assert found.upper <= delta + 1e-3
        steep = deltas + np.exp(epsilons) * RATES[:, None]
        flat = 1.0 - np.exp(-epsilons) * (1.0 - deltas - RATES[:, None])
        peer_rates = np.minimum(np.minimum(steep, flat).min(axis=1), 1.0)
        limit = 1.0 - curve.trade_off(RATES)[0]
        assert np.abs(limit - peer_rates).max() < 1e-3

    def test_simulated_attacks_are_within_the_bounds(self) -> None:
        """The likelihood-ratio attack on simulated runs, in the worse direction at low rates: no lattice."""
        sample_rate, sigma, steps, runs = 0.1, 1.0, 40, 100_000
        rng = np.random.default_rng(0)

        def losses(member: bool) -> Array:
            total = np.zeros(runs)
            for _ in range(steps):
                moved = (rng.random(runs) < sample_rate) if member else np.zeros(runs, dtype=bool)
                outputs = rng.standard_normal(runs) + moved / sigma
                total += np.log1p(sample_rate * np.expm1(outputs / sigma - 0.5 / sigma**2))
            return total

        outside, inside = np.sort(losses(False)), losses(True)
        curve = privacy_curve(poisson(sample_rate, sigma, steps))
        for rate in (0.01, 0.1, 0.3):
            simulated = float(np.mean(inside > np.quantile(outside, 1.0 - rate)))
            found = curve.true_positive_rate(rate)
            margin = 6.0 * math.sqrt(1.0 / runs) * (1.0 + math.sqrt(rate) * found.upper / rate)
            assert simulated - margin <= found.upper
            assert known(found.lower) - margin <= simulated
            assert found.upper - known(found.lower) < 2e-3

    def test_small_deltas_are_tight_where_asked_for(self) -> None:
        trace = poisson(0.01, 1.0, 1000)
        curve = privacy_curve(trace, deltas=[1e-5, 1e-10])
        for delta in (1e-5, 1e-10):
            epsilon = account(trace, delta, "pld").epsilon
            reference, found = delta_pld(trace, epsilon), curve.delta(epsilon)
            assert 0.95 * delta <= known(found.lower) <= reference.upper
            assert known(reference.lower) <= found.upper <= 1.05 * delta

    def test_a_pure_release_is_randomised_response(self) -> None:
        epsilon = 1.3
        curve = privacy_curve(Trace(10, releases=(PureRelease("choice", epsilon),)))
        exact = np.minimum(math.exp(epsilon) * RATES, 1.0 - math.exp(-epsilon) * (1.0 - RATES))
        assert_brackets(curve, RATES, exact, upper=1e-3, lower=5e-3)

    @pytest.mark.parametrize("epsilons", [(1.5, 1.5), (0.1, 0.2, 0.3), (1.5, 0.7, 0.01), (30.0, 400.0)])
    def test_pure_releases_together_are_exact_and_nothing_is_left_beyond_their_sum(
        self, epsilons: tuple[float, ...]
    ) -> None:
        """A lattice said delta(3.0) <= 9e-4 of two releases of 1.5, whose losses are at most 3."""
        curve = privacy_curve(Trace(10, releases=tuple(PureRelease(f"choice {e}", e) for e in epsilons)))
        total = math.fsum(epsilons)
        assert curve.delta(math.nextafter(total, math.inf)) == (0.0, 0.0)
        for epsilon in (0.0, 0.3 * total, 0.9 * total):
            with mpmath.workdps(50):
                exact = mpmath.fsum(
                    mpmath.fprod(1 / (1 + mpmath.exp(-sign * e)) for sign, e in zip(signs, epsilons, strict=True))
                    * max(0, -mpmath.expm1(epsilon - mpmath.fdot(signs, epsilons)))
                    for signs in product((1, -1), repeat=len(epsilons))
                )
            found = curve.delta(epsilon)
            assert known(found.lower) <= float(exact) * (1 + 1e-12)
            assert float(exact) * (1 - 1e-12) <= found.upper <= float(exact) * (1 + 1e-8)

    @pytest.mark.parametrize("sample_rate", [1e-10, 1e-8])
    def test_where_lattices_certify_little_closed_forms_do(self, sample_rate: float) -> None:
        assert privacy_curve(poisson(sample_rate, 1.0, 10**5)).advantage.upper < 50 * sample_rate * math.sqrt(1e5)


class TestProperties:
    @pytest.mark.long
    @settings(deadline=None, max_examples=9)
    @given(
        st.floats(-3.0, 0.0),
        st.floats(0.6, 4.0),
        st.integers(1, 400),
        st.integers(1, 4),
        st.sampled_from(["q", "T", "s"]),
    )
    def test_more_privacy_is_less_risk_and_curves_are_trade_offs(
        self, log_rate: float, sigma: float, steps: int, size: int, weakened: str
    ) -> None:
        rate = 10.0**log_rate
        curve = privacy_curve(poisson(rate, sigma, steps), size)
        safer = {"q": (rate / 2, sigma, steps), "T": (rate, sigma, (steps + 1) // 2), "s": (rate, 1.5 * sigma, steps)}
        other = privacy_curve(poisson(*safer[weakened]), size)
        rates = np.linspace(0.0, 1.0, 41)
        (lower, achieved), (safer_lower, of_safer) = curve.trade_off(rates), other.trade_off(rates)
        upper, safer_upper = known(achieved), known(of_safer)
        assert (lower <= upper).all()
        assert (lower <= safer_upper + 1e-9).all()
        assert (safer_lower >= lower - 1e-3).all()
        assert (np.diff(lower) <= 1e-12).all()
        assert (np.diff(lower, 2) >= -1e-9).all()
        assert (lower >= 0.0).all()
        assert (upper <= 1.0 - rates + 1e-12).all()
        assert known(curve.advantage.lower) <= np.max(1.0 - lower - rates) + 0.05
        assert np.max(1.0 - lower - rates) <= curve.advantage.upper + 1e-9

    def test_a_group_of_one_is_one_example_and_larger_ones_risk_more(self) -> None:
        trace = poisson(0.02, 1.2, 300)
        one = privacy_curve(trace)
        given_one = curve_of_examples(trace, [0], [[1.0]])
        assert np.array_equal(one.profile.upper, given_one.profile.upper)
        assert (one.kind, given_one.kind) == ("guarantee", "estimate")
        assert (one.of_given, given_one.of_given) == (False, True)
        risks = [attack_risk(privacy_curve(trace, size)) for size in (1, 2, 8)]
        for low, high in pairwise(risks):
            assert low.advantage.upper < known(high.advantage.lower)
            assert all(
                first.upper < known(second.lower)
                for first, second in zip(low.true_positive_rates, high.true_positive_rates, strict=True)
            )

    def test_smaller_contributions_risk_less(self) -> None:
        trace, steps = poisson(0.02, 1.2, 300), [0, 100]
        curve = curve_of_examples(trace, steps, [[0.2, 0.4], [0.1, 0.0]])
        assert 0.0 < curve.advantage.upper < known(privacy_curve(trace, 2).advantage.lower)
        epsilon = epsilon_of_examples(trace, steps, [[0.2, 0.4], [0.1, 0.0]], 1e-3).upper
        assert curve.delta(epsilon).upper == pytest.approx(1e-3, rel=0.01)
        assert curve.unit == "2 given examples"

    def test_without_noise_nothing_is_bounded_and_without_use_nothing_leaks(self) -> None:
        nothing = attack_risk(privacy_curve(poisson(0.01, 0.0, 10)))
        assert nothing.advantage == (1.0, 1.0)
        assert {found.upper for found in nothing.true_positive_rates} == {1.0}
        unused = attack_risk(privacy_curve(Trace(10)))
        assert unused.advantage == (0.0, 0.0)
        assert [found.upper for found in unused.true_positive_rates] == pytest.approx(FALSE_POSITIVE_RATES, abs=1e-9)

    def test_noise_that_followed_results_makes_it_an_estimate(self) -> None:
        trace = poisson(0.01, 1.0, 10)
        followed = Trace(trace.dataset_size, trace.segments, noise_follows_results=True)
        assert privacy_curve(followed).kind == attack_risk(privacy_curve(followed)).kind == "estimate"


class TestReconstruction:
    def test_is_one_minus_the_trade_off_at_the_prior(self) -> None:
        exact = float(stats.norm.sf(stats.norm.isf(1e-3) - 1.0))
        assert privacy_curve(gaussian(1.0)).reconstruction(1e-3) == pytest.approx(exact, abs=1e-4)
        assert privacy_curve(gaussian(1.0)).reconstruction(1e-3) >= exact

    def test_a_guess_among_ten_records_succeeds_less_often(self) -> None:
        """Randomised response on a 10-valued record reaches e^eps / (e^eps + 9), the most that pure DP allows."""
        for epsilon in (0.5, 2.0):
            curve = privacy_curve(Trace(10, releases=(PureRelease("answer", epsilon),)))
            reached = math.exp(epsilon) / (math.exp(epsilon) + 9)
            assert reached <= curve.reconstruction(0.1)

    def test_is_refused_for_given_records(self) -> None:
        curve = curve_of_examples(poisson(0.02, 1.2, 30), [0], [[0.5]])
        with pytest.raises(UnsupportedMechanism, match=r"averages over all records.*use the curve of any record"):
            curve.reconstruction(0.1)


class TestBudgets:
    def test_the_least_noise_meets_an_advantage(self) -> None:
        found = noise_multiplier_within_budget(lambda sigma: gaussian(1 / sigma), AdvantageBudget(0.05))
        mean = 2 * stats.norm.ppf(0.525)  # 2 Phi(mu / 2) - 1 = 0.05
        assert 1 / mean <= found <= 1.001 / mean

    def test_the_least_noise_meets_a_true_positive_rate(self) -> None:
        budget = TruePositiveRateBudget(0.05, 0.01)
        found = noise_multiplier_within_budget(lambda sigma: gaussian(1 / sigma), budget)
        mean = stats.norm.isf(0.01) - stats.norm.isf(0.05)
        assert 1 / mean <= found <= 1.001 / mean
        assert budget.unit == "tpr_at_fpr_1pct"

    def test_of_groups_needs_more_noise(self) -> None:
        def least(size: int) -> float:
            return noise_multiplier_within_budget(lambda s: poisson(0.02, s, 100), AdvantageBudget(0.2, size))

        single, group = least(1), least(3)
        assert single < group
        assert privacy_curve(poisson(0.02, group, 100), 3).advantage.upper <= 0.2
        assert privacy_curve(poisson(0.02, 0.998 * group, 100), 3).advantage.upper > 0.2

    def test_unreachable_names_what_can_be_had(self) -> None:
        def trace_of(sigma: float) -> Trace:
            return Trace(10, releases=(GaussianRelease("x", sigma), PureRelease("choice", 1.0)))

        with pytest.raises(Unreachable, match=r"advantage 0.3 is unreachable: even noise multiplier 1e.06 costs adv"):
            noise_multiplier_within_budget(trace_of, AdvantageBudget(0.3))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: AdvantageBudget(1.0), "target advantage is 1.0, but must be less than 1.0"),
        (lambda: AdvantageBudget(0.1, 0), "group_size is 0"),
        (
            lambda: TruePositiveRateBudget(0.01, 0.01),
            "target true positive rate is 0.01, but must be greater",
        ),
        (lambda: TruePositiveRateBudget(0.5, 0.0), "false positive rate is 0.0, but must be greater than 0"),
        (lambda: privacy_curve(Trace(10), deltas=[0.0]), "delta of a curve is 0.0"),
        (lambda: privacy_curve(Trace(10), deltas=0.1), "deltas of a curve has shape"),  # type: ignore[arg-type]
        (lambda: privacy_curve(Trace(10, unit=User(2)), 1.5), "group_size is 1.5"),  # type: ignore[arg-type]
        (lambda: privacy_curve(Trace(10)).delta(-1.0), "epsilon is -1.0"),
        (lambda: privacy_curve(Trace(10)).trade_off([0.5, 1.5]), "false positive rate is 1.5"),
        (lambda: privacy_curve(Trace(10)).reconstruction(0.0), "prior is 0.0"),
    ],
)
def test_bad_input_is_refused(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        wrong()


def test_numbers_for_json_are_named_by_their_rate() -> None:
    plain = attack_risk(privacy_curve(gaussian(1.0))).as_dict()
    assert [rate_name(rate) for rate in FALSE_POSITIVE_RATES] == [
        "tpr_at_fpr_0.1pct", "tpr_at_fpr_1pct", "tpr_at_fpr_10pct",
    ]  # fmt: skip
    assert plain["unit"] == "example"
    assert plain["advantage"] == pytest.approx(0.38292492, abs=1e-7)
    assert plain["tpr_at_fpr_1pct_at_least"] <= plain["tpr_at_fpr_1pct"] == pytest.approx(0.09242, abs=1e-4)


def test_agrees_with_riskcal() -> None:
    """Kulynych et al. 2024; a peer that reads f off dp-accounting's distributions."""
    peer = pytest.importorskip("riskcal.analysis", reason="riskcal is not installed")
    sample_rate, sigma, steps = 0.01, 1.0, 1000
    pld = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=sample_rate, value_discretization_interval=1e-4
    ).self_compose(steps)
    curve = privacy_curve(poisson(sample_rate, sigma, steps))
    expected = np.asarray(peer.get_beta_from_pld(pld, alpha=RATES))
    low = RATES <= 0.1
    lower, _ = curve.trade_off(RATES)
    assert (lower <= expected + 1e-3).all()
    assert np.abs(lower - expected)[low].max() < 1e-3
