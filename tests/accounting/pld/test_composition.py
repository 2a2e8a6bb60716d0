"""Composition against dp-accounting, closed forms, published numbers and its own invariants."""

import math
from collections.abc import Sequence
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant, common, privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.errors import InvalidInput, UnsupportedMechanism
from dpsweep.accounting.individual.epsilons import individual_epsilons
from dpsweep.accounting.mechanism.samplings import (
    FixedBatchSampling,
    FixedOrderSampling,
    PoissonSampling,
    RandomAllocationSampling,
    Sampling,
    ShuffledSampling,
)
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, SideQuery, Trace
from dpsweep.accounting.pld import (
    CertifiedEpsilon,
    delta_pld,
    epsilon_of_rounds,
    epsilon_pld,
    rounds_of_examples,
    upper_epsilon_of_rounds,
)
from dpsweep.accounting.pld.composition import delta_of_rounds
from dpsweep.accounting.pld.group_rounds import GroupRounds, rounds_of_group
from dpsweep.accounting.pld.groups import epsilon_of_examples
from tests.known import known


def trace_of(levels: Sequence[tuple[Sampling, float, int]], releases=(), **fields) -> Trace:  # type: ignore[no-untyped-def]
    segments, start = [], 0
    for sampling, sigma, steps in levels:
        segments.append(Segment(start, steps, sampling, sigma))
        start += steps
    return Trace(50_000, tuple(segments), tuple(releases), **fields)


def poisson(q: float, sigma: float, steps: int) -> Trace:
    return trace_of([(PoissonSampling(q), sigma, steps)])


def reference(levels: Sequence[tuple[float, float, int]], delta: float, interval: float = 1e-4) -> float:
    """dp-accounting's PLDAccountant for (q, sigma, steps) levels."""
    accountant = PLDAccountant(value_discretization_interval=interval)
    for q, sigma, steps in levels:
        event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
        accountant.compose(event, steps)
    return float(accountant.get_epsilon(delta))


def assert_bracket(claimed: CertifiedEpsilon, gap: float = 1e-3) -> None:
    assert 0.0 <= known(claimed.lower) <= claimed.upper < math.inf
    assert claimed.upper - known(claimed.lower) <= gap * claimed.upper


@pytest.mark.parametrize(
    ("size", "expected"), [(1, 2.9553), (2, 6.4326), (4, 14.5350), (8, 34.8907), (16, 90.9012), (32, 259.136)]
)
def test_published_group_table(size: int, expected: float) -> None:
    claimed = epsilon_pld(poisson(0.01, 1.0, 2000), 1e-6, size)
    assert_bracket(claimed)
    assert claimed.upper == pytest.approx(expected, rel=1e-3)
    assert known(claimed.lower) <= expected * (1 + 1e-4)


@given(
    levels=st.lists(st.tuples(st.floats(0.002, 0.4), st.floats(0.7, 4.0), st.integers(1, 60)), min_size=1, max_size=3),
    delta=st.sampled_from([1e-4, 1e-6, 1e-8]),
)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_random_traces_agree_with_dp_accounting(levels: list[tuple[float, float, int]], delta: float) -> None:
    claimed = epsilon_pld(trace_of([(PoissonSampling(q), sigma, steps) for q, sigma, steps in levels]), delta)
    peer = reference(levels, delta, 1e-3)
    assert known(claimed.lower) <= peer * (1 + 1e-6)
    assert claimed.upper == pytest.approx(peer, rel=2e-3, abs=2e-3)


@pytest.mark.parametrize(("sigma", "steps", "delta"), [(1.0, 1, 1e-5), (6.0, 400, 1e-5), (0.3, 3, 1e-9), (50, 1, 1e-3)])
def test_full_batches_are_one_gaussian(sigma: float, steps: int, delta: float) -> None:
    mean = math.sqrt(steps) / sigma

    def excess(epsilon: float) -> float:
        first = stats.norm.cdf(mean / 2 - epsilon / mean)
        return float(first - math.exp(epsilon) * stats.norm.cdf(-mean / 2 - epsilon / mean) - delta)

    claimed = epsilon_pld(poisson(1.0, sigma, steps), delta)
    assert known(claimed.lower) <= claimed.upper * (1 + 1e-12)
    assert claimed.upper == pytest.approx(optimize.brentq(excess, 0.0, 500.0, xtol=1e-12), rel=1e-6)


def test_numerical_composition_meets_the_closed_form() -> None:
    """A sample rate just below 1 goes through lattice and transform and must land on the Gaussian."""
    exact = epsilon_pld(poisson(1.0, 2.0, 50), 1e-6)
    claimed = epsilon_pld(poisson(1.0 - 1e-12, 2.0, 50), 1e-6)
    assert_bracket(claimed)
    assert known(claimed.lower) <= exact.upper
    assert claimed.upper >= known(exact.lower) * (1 - 1e-9)


def test_another_sampling_of_as_many_steps_begins_another_epoch() -> None:
    """An example may be in one of the first five steps, and again in the only epoch in order."""
    trace = trace_of([(ShuffledSampling(10), 1.0, 5), (FixedOrderSampling(10), 1.0, 5)], adjacency="zero_out")
    twice = trace_of([(ShuffledSampling(1), 1.0, 2)], adjacency="zero_out")
    assert epsilon_pld(trace, 1e-5).upper == pytest.approx(epsilon_pld(twice, 1e-5).upper, rel=1e-9)


def test_shuffled_epochs_cost_one_gaussian_each() -> None:
    trace = trace_of([(ShuffledSampling(10), 6.0, 4000)], adjacency="zero_out")
    assert epsilon_pld(trace, 1e-5).upper == pytest.approx(19.1308, abs=1e-3)
    assert epsilon_pld(trace, 1e-5, 3).upper == pytest.approx(epsilon_pld(poisson(1.0, 2.0, 400), 1e-5).upper, rel=1e-9)


def test_an_epoch_cut_by_a_change_of_noise_counts_once_at_its_lowest_noise() -> None:
    sampling = ShuffledSampling(10)
    cut = trace_of([(sampling, 5.0, 15), (sampling, 4.0, 15)], adjacency="zero_out")
    assert rounds_of_group(cut).gaussian ** 2 == pytest.approx(1 / 25 + 1 / 16 + 1 / 16)
    unfinished = trace_of([(sampling, 5.0, 23)], adjacency="zero_out")
    assert rounds_of_group(unfinished).gaussian ** 2 == pytest.approx(3 / 25)


@pytest.mark.parametrize("seed", range(4))
def test_a_bound_from_above_alone_is_that_of_both(seed: int) -> None:
    """For a group of members whose contributions differ at every snapshot, in either direction."""
    draws = np.random.default_rng(seed)
    sampling = PoissonSampling(0.05) if seed % 2 else FixedBatchSampling(100, 5)
    trace = Trace(
        100,
        (Segment(0, 300, sampling, float(draws.uniform(0.7, 3.0))),),
        releases=(GaussianRelease("statistics", 8.0),),
    )
    rounds = rounds_of_examples(trace, [0, 100, 200], 10.0 ** draws.uniform(-3.0, 0.0, (6, 3)))
    both, alone = epsilon_of_rounds(rounds, 1e-6), upper_epsilon_of_rounds(rounds, 1e-6)
    assert both.lower <= alone.upper <= both.upper * (1 + 1e-4)


def test_fixed_batches_double_the_sensitivity() -> None:
    doubled = epsilon_pld(trace_of([(FixedBatchSampling(50_000, 500), 2.0, 500)]), 1e-6)
    assert doubled.upper == pytest.approx(epsilon_pld(poisson(0.01, 1.0, 500), 1e-6).upper, rel=1e-6)


def test_side_queries_and_releases_compose() -> None:
    plain = trace_of([(PoissonSampling(0.02), 1.5, 200)])
    sided = Trace(50_000, (Segment(0, 200, PoissonSampling(0.02), 1.5, (SideQuery("counts", 2.0),)),))
    joint = (1.5**-2 + 2.0**-2) ** -0.5
    assert epsilon_pld(sided, 1e-5).upper == pytest.approx(epsilon_pld(poisson(0.02, joint, 200), 1e-5).upper, rel=1e-9)
    released = Trace(50_000, plain.segments, (GaussianRelease("pca", 4.0), PureRelease("choice", 0.3)))
    claimed = epsilon_pld(released, 1e-5)
    peer = privacy_loss_distribution.from_gaussian_mechanism(1.5, sampling_prob=0.02).self_compose(200)
    peer = peer.compose(privacy_loss_distribution.from_gaussian_mechanism(4.0))
    pure = common.DifferentialPrivacyParameters(0.3, 0.0)
    peer = peer.compose(privacy_loss_distribution.from_privacy_parameters(pure))
    assert_bracket(claimed)
    assert claimed.upper == pytest.approx(peer.get_epsilon_for_delta(1e-5), rel=1e-3)


def test_pure_releases_alone_are_randomised_response() -> None:
    claimed = epsilon_pld(trace_of([], [PureRelease("a", 0.7)]), 1e-9)
    assert claimed.upper == pytest.approx(0.7, rel=1e-3)
    assert epsilon_pld(trace_of([], [PureRelease("a", 0.7)]), 1e-9, 2).upper == pytest.approx(1.4, rel=1e-3)


def test_order_of_segments_and_cutting_them_changes_nothing() -> None:
    q = PoissonSampling(0.03)
    whole = epsilon_pld(trace_of([(q, 1.0, 60), (q, 2.0, 40)]), 1e-6)
    cut = epsilon_pld(trace_of([(q, 2.0, 40), (q, 1.0, 25), (q, 1.0, 35)]), 1e-6)
    one_by_one = epsilon_pld(trace_of([(q, 1.0 + i * 1e-13, 1) for i in range(60)] + [(q, 2.0, 40)]), 1e-6)
    assert cut.upper == pytest.approx(whole.upper, rel=1e-6)
    assert one_by_one.upper == pytest.approx(whole.upper, rel=1e-6)


BASE = (0.02, 1.1, 300, 2)  # sample rate, noise multiplier, steps, group size


@pytest.mark.parametrize(
    ("position", "worse"), [(0, 0.021), (1, 1.08), (2, 310), (3, 3)], ids=["rate", "noise", "steps", "size"]
)
def test_monotone(position: int, worse: float) -> None:
    changed: list[Any] = list(BASE)
    changed[position] = worse
    before, after = (epsilon_pld(poisson(q, s, t), 1e-6, k) for q, s, t, k in (BASE, changed))
    assert known(after.lower) > before.upper


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("q", "sigma", "steps", "size", "delta"),
    [
        (0.01, 0.3, 2000, 256, 1e-6),
        (0.01, 0.3, 2000, 1, 1e-9),
        (0.01, 1.0, 2000, 256, 1e-6),
        (0.01, 50.0, 10_000, 1, 1e-6),
        (0.01, 50.0, 1, 4, 1e-9),
        (1e-6, 1.0, 100_000, 1, 1e-6),
        (0.01, 1.0, 100_000, 1, 1e-3),
        (0.999, 2.0, 100, 1, 1e-6),
        (0.5, 1.0, 1, 64, 1e-6),
        (0.01, 1.0, 1, 1, 1e-6),
        (0.05, 0.7, 500, 1, 1e-30),
        (0.01, 1.0, 2000, 1, 0.3),
    ],
)
def test_extreme_parameters_stay_finite_and_tight(q: float, sigma: float, steps: int, size: int, delta: float) -> None:
    with np.errstate(over="raise", invalid="raise"):
        assert_bracket(epsilon_pld(poisson(q, sigma, steps), delta, size))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("sampling", [PoissonSampling(0.09), FixedBatchSampling(50_000, 4500)], ids=type)
@pytest.mark.parametrize("size", [1, 4])
def test_noise_too_weak_or_too_strong_for_a_lattice_is_bounded_by_the_unsampled_gaussian(
    sampling: Sampling, size: int
) -> None:
    """At most that of ten unsampled Gaussians, at least that of one step in which the group takes part."""
    last = math.inf
    for sigma in (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 1e7, 1e9):
        shift = size * (2.0 if sampling.displaced else 1.0) / sigma
        claimed = epsilon_pld(trace_of([(sampling, sigma, 10)]), 1e-5, size)
        whole = 10 * shift**2 / 2 + math.sqrt(10) * shift * math.sqrt(2 * math.log(1e5))
        assert 0.0 <= known(claimed.lower) <= claimed.upper <= whole * (1 + 1e-6)
        assert claimed.upper <= last
        last = claimed.upper
        if shift > 1.0:  # all members join a batch with probability 0.09^4 > delta, and are then plain to see
            assert claimed.upper >= 0.4 * shift**2
        else:
            assert claimed.upper == 0.0
            assert 0.4 * math.sqrt(10) * shift < 1e-5, "delta covers all that the run tells"


@pytest.mark.parametrize(
    ("steps", "releases"),
    [
        ([], [GaussianRelease("statistics", 2.0)]),
        ([], [PureRelease("counts", 0.3)] * 2),
        ([], [GaussianRelease("statistics", 2.0), PureRelease("counts", 0.3)]),
        ([(PoissonSampling(0.1), 2.0, 300)], [PureRelease("counts", 1e-5)] * 20),
    ],
)
@pytest.mark.parametrize("delta", [1e-4, 1e-9])
def test_steps_that_hardly_add_leave_the_bounds_close(
    steps: list[tuple[Sampling, float, int]], releases: list[Any], delta: float
) -> None:
    """Rounded down to a lattice that suits the rest, each such step would be worth less than no step."""

    def rounds_with(*weak: tuple[Sampling, float, int]) -> GroupRounds:
        return rounds_of_group(trace_of([*steps, *weak], releases), 4)

    alone = epsilon_of_rounds(rounds_with(), delta)
    weak, weaker = (epsilon_of_rounds(rounds_with((PoissonSampling(0.1), sigma, 300)), delta) for sigma in (1e5, 1e6))
    assert alone.lower <= weaker.upper <= weaker.lower * 1.001
    assert weaker.lower <= weak.upper
    composed = delta_of_rounds(rounds_with((PoissonSampling(0.1), 1e6, 300)), 0.9 * weaker.upper)
    assert composed.upper <= 1.1 * composed.lower


def test_a_strong_side_query_or_release_is_accounted_for() -> None:
    queries = tuple(SideQuery(f"count {sigma}", sigma) for sigma in (1e-3, 1e-4, 1e-6))
    for query in queries:
        trace = Trace(1400, (Segment(0, 10, PoissonSampling(0.09), 1.0, (query,)),))
        assert 0.4 / query.noise_multiplier**2 <= epsilon_pld(trace, 1e-5).upper < 10 / query.noise_multiplier**2


@pytest.mark.parametrize("sigma", [1e-300, 1e-7, 1e10, 1e300, math.nan])
def test_noise_beyond_all_use_is_refused(sigma: float) -> None:
    makers = (SideQuery, GaussianRelease, lambda name, value: Segment(0, 1, PoissonSampling(0.1), value))
    for make in makers:
        with pytest.raises(InvalidInput, match=r"noise_multiplier.* is .*, but must be"):
            make("count", sigma)


@pytest.mark.parametrize("epsilon", [0.0, 0.7, 2.9552, 9.0, 30.0])
def test_delta_inverts_epsilon(epsilon: float) -> None:
    trace = poisson(0.01, 1.0, 2000)
    claimed = delta_pld(trace, epsilon)
    assert 0.0 < known(claimed.lower) <= claimed.upper <= known(claimed.lower) * 1.1
    back = epsilon_pld(trace, claimed.upper)
    assert known(back.lower) <= epsilon * (1 + 1e-3) + 1e-3
    assert back.upper >= epsilon * (1 - 1e-3) - 1e-3


@pytest.mark.parametrize(
    ("sampling", "sigma", "steps", "epsilon"),
    [
        (PoissonSampling(0.1), 2.0, 10, 2.0),
        (PoissonSampling(0.1), 2.0, 20, 12.0),
        (RandomAllocationSampling(10), 1.0, 20, 12.0),
        (RandomAllocationSampling(10), 1.0, 10, 8.0),
    ],
)
def test_delta_is_tight_where_all_losses_of_one_direction_lie_below(
    sampling: Sampling, sigma: float, steps: int, epsilon: float
) -> None:
    trace = Trace(1000, (Segment(0, steps, sampling, sigma),))
    claimed = delta_pld(trace, epsilon)
    assert 0.0 < known(claimed.lower) <= claimed.upper <= known(claimed.lower) * 1.05
    assert epsilon_pld(trace, claimed.upper).upper == pytest.approx(epsilon, rel=5e-3)


def test_single_step_against_the_exact_curve() -> None:
    """One round in closed form: delta(eps) = P(x > c) - e^eps Q(x > c) with L(c) = eps."""
    q, sigma, epsilon = 0.2, 0.9, 0.8
    cut = (math.log((math.exp(epsilon) - 1 + q) / q) * sigma**2 * 2 + 1) / 2
    norm = stats.norm(0, sigma)
    exact = q * norm.sf(cut - 1) + (1 - q) * norm.sf(cut) - math.exp(epsilon) * norm.sf(cut)
    claimed = delta_pld(poisson(q, sigma, 1), epsilon)
    assert known(claimed.lower) <= exact <= claimed.upper
    assert claimed.upper == pytest.approx(exact, rel=1e-2)


def test_without_noise_privacy_is_explicitly_infinite() -> None:
    trace = poisson(0.01, 0.0, 10)
    assert epsilon_pld(trace, 1e-6) == CertifiedEpsilon(math.inf, math.inf, 1e-6)
    assert delta_pld(trace, 3.0).upper == 1.0


def test_nothing_run_costs_nothing() -> None:
    assert epsilon_pld(Trace(10), 1e-6).upper == 0.0
    assert delta_pld(Trace(10), 0.0).upper == 0.0


@pytest.mark.parametrize("delta", [0.0, -1e-6, 1.0, float("nan")])
def test_impossible_deltas_are_refused(delta: float) -> None:
    with pytest.raises(InvalidInput, match="delta"):
        epsilon_pld(poisson(0.01, 1.0, 10), delta)


def test_a_delta_too_small_for_pld_is_refused_with_accountants_that_take_it() -> None:
    trace = poisson(0.01, 1.0, 10)
    with pytest.raises(InvalidInput, match=r"delta is 1e-300, .* from 1e-250 on; rdp, gdp and auto take smaller ones"):
        epsilon_pld(trace, 1e-300)
    assert 0.0 < account(trace, 1e-300, "auto").epsilon == account(trace, 1e-300, "rdp").epsilon


def test_refuses_what_its_theorems_do_not_cover() -> None:
    with pytest.raises(UnsupportedMechanism, match="ShuffledSampling"):
        epsilon_pld(trace_of([(ShuffledSampling(5), 1.0, 10)]), 1e-6)
    with pytest.raises(UnsupportedMechanism, match="FixedBatchSampling"):
        epsilon_pld(trace_of([(FixedBatchSampling(50, 5), 1.0, 10)], adjacency="zero_out"), 1e-6)
    with pytest.raises(InvalidInput, match="group_size"):
        epsilon_pld(poisson(0.01, 1.0, 10), 1e-6, 0)


@pytest.mark.parametrize("contribution", [0.0, 0.3, 1.0])
def test_fixed_batches_with_side_queries_displace_in_quadrature(contribution: float) -> None:
    """One given record costs the same by the mixtures of groups and by individual accounting."""
    side = (SideQuery("counts", 9.0),)
    trace = Trace(1000, (Segment(0, 200, FixedBatchSampling(1000, 20), 3.0, side),))
    moved = np.sqrt(((1 + contribution) / 3) ** 2 + (2 / 9) ** 2)
    assert trace.segments[0].amplitude(contribution) == pytest.approx(moved, rel=1e-12)
    together = epsilon_of_examples(trace, [0], [[contribution]], 1e-5)
    alone = individual_epsilons([0], np.array([[contribution]]), trace, 1e-5, "pld")
    assert together.upper == pytest.approx(alone.upper[0], rel=5e-4)
