"""Individual epsilons against independent oracles, and the properties that make them safe."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.paper_only import algorithm_2
from dpsweep.accounting.errors import InvalidInput, UnsupportedMechanism
from dpsweep.accounting.individual.epsilons import INDIVIDUAL_ACCOUNTANTS, IndividualEpsilons, individual_epsilons
from dpsweep.accounting.mechanism.samplings import (
    Adjacency,
    FixedBatchSampling,
    PoissonSampling,
    Sampling,
    ShuffledSampling,
)
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, SideQuery, Trace
from dpsweep.accounting.numerics.renyi import ORDERS
from tests.known import known

DELTA = 1e-5
STEPS = [0, 100, 200, 300]


def _trace(sampling: Sampling | None = None, sigma: float = 1.0, steps: int = 400, **fields: Any) -> Trace:
    adjacency: Adjacency = "zero_out" if isinstance(sampling, ShuffledSampling) else "add_remove"
    segment = Segment(0, steps, sampling or PoissonSampling(0.02), sigma)
    return replace(Trace(5_000, (segment,), adjacency=adjacency), **fields)


def _gaussian_epsilon(sigma: float) -> float:
    return account(Trace(5_000, releases=(GaussianRelease("all", sigma),)), DELTA, "gdp").epsilon


def _contributions(rows: int = 12, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = np.minimum(rng.lognormal(-1.0, 0.8, (rows, 1)) * rng.lognormal(0.0, 0.3, (rows, 4)), 1.0)
    values[0] = 1.0
    return values


def _account(contributions: np.ndarray, trace: Trace, method: str = "pld") -> IndividualEpsilons:
    return individual_epsilons(STEPS, contributions, trace, DELTA, method)


@pytest.fixture(params=sorted(INDIVIDUAL_ACCOUNTANTS))
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _of_dp_accounting(accountant: RdpAccountant) -> float:
    return float(accountant.get_epsilon(DELTA))


def _classic(accountant: RdpAccountant) -> float:
    return float(np.min(np.asarray(accountant._rdp) + math.log(1 / DELTA) / (ORDERS - 1)))


@pytest.mark.parametrize(("name", "epsilon"), [("rdp", _of_dp_accounting), ("rdp-classic", _classic)])
def test_rdp_is_within_a_thousandth_above_dp_accounting(name: str, epsilon: Callable[[RdpAccountant], float]) -> None:
    contributions = _contributions(4)
    result = _account(contributions, _trace(), name)
    assert result.lower is None, "a bound on Renyi's bound is none on epsilon"
    for row, upper in zip(contributions, result.upper, strict=True):
        accountant = RdpAccountant(ORDERS.tolist())
        for value in row:
            gaussian = dp_accounting.GaussianDpEvent(1.0 / value)
            accountant.compose(dp_accounting.PoissonSampledDpEvent(0.02, gaussian), 100)
        exact = epsilon(accountant)
        assert exact * (1 - 1e-5) <= upper <= exact * 1.001


def test_pld_brackets_and_matches_dp_accounting() -> None:
    contributions = np.round(_contributions(4), 2)
    result = _account(contributions, _trace())
    for row, upper, lower in zip(contributions, result.upper, known(result.lower), strict=True):
        composed = [
            privacy_loss_distribution.from_gaussian_mechanism(
                1.0 / value, sampling_prob=0.02, value_discretization_interval=2e-4
            ).self_compose(100)
            for value in row
        ]
        theirs = composed[0].compose(composed[1]).compose(composed[2]).compose(composed[3])
        pessimistic = theirs.get_epsilon_for_delta(DELTA)
        assert lower <= pessimistic
        assert upper == pytest.approx(pessimistic, rel=1e-3)
        assert (upper - lower) <= 1e-3 * upper


def test_contribution_one_is_the_worst_case(method: str) -> None:
    for sampling in (PoissonSampling(0.02), FixedBatchSampling(5_000, 100), ShuffledSampling(50)):
        trace = _trace(sampling)
        upper = _account(np.ones((2, 4)), trace, method).upper
        worst = account(trace, DELTA, method).epsilon
        assert upper[0] == upper[1] == pytest.approx(worst, rel=1e-3)


@given(
    sigma=st.floats(0.4, 6.0),
    sample_rate=st.floats(0.001, 0.2),
    low=st.floats(0.0, 0.9),
    width=st.floats(0.01, 0.1),
)
@settings(max_examples=10, deadline=None)
def test_epsilon_grows_with_the_contribution(sigma: float, sample_rate: float, low: float, width: float) -> None:
    trace = _trace(PoissonSampling(sample_rate), sigma)
    contributions = np.array([[low] * 4, [low, low, low + width, low]])
    smaller, larger = _account(contributions, trace, "rdp").upper
    assert smaller <= larger * (1 + 1e-9)


def test_permuting_examples_permutes_results(method: str) -> None:
    contributions = _contributions(40)
    order = np.random.default_rng(1).permutation(40)
    straight = _account(contributions, _trace(), method)
    permuted = _account(contributions[order], _trace(), method)
    np.testing.assert_allclose(permuted.upper, straight.upper[order], rtol=1e-7)
    if straight.lower is not None:
        np.testing.assert_allclose(known(permuted.lower), straight.lower[order], rtol=1e-7)


def test_segments_and_snapshots_may_be_cut_anywhere(method: str) -> None:
    contributions = _contributions()
    whole = _account(contributions, _trace(), method)
    sampling = PoissonSampling(0.02)
    cut = replace(_trace(), segments=(Segment(0, 130, sampling, 1.0), Segment(130, 270, sampling, 1.0)))
    halves = individual_epsilons([*STEPS, 350], np.hstack([contributions, contributions[:, 3:]]), cut, DELTA, method)
    np.testing.assert_allclose(halves.upper, whole.upper, rtol=1e-9)


def test_schedules_share_nodes_and_lie_between_their_extremes(method: str) -> None:
    contributions = _contributions()
    sampling = PoissonSampling(0.02)
    segments = tuple(Segment(10 * epoch, 10, sampling, 2.0 - epoch / 40) for epoch in range(40))
    mixed = _account(contributions, replace(_trace(), segments=segments), method).upper
    assert (mixed >= _account(contributions, _trace(sigma=2.0), method).upper).all()
    assert (mixed <= _account(contributions, _trace(sigma=1.0), method).upper).all()


def test_side_queries_and_releases_count_in_full(method: str) -> None:
    nothing, some = np.zeros((1, 4)), _contributions(1)
    plain = _trace()
    queries = (SideQuery("counts", 3.0),)
    with_queries = replace(plain, segments=(replace(plain.segments[0], side_queries=queries),))
    only_queries = _account(nothing, with_queries, method).upper[0]
    assert only_queries == pytest.approx(account(_trace(sigma=3.0), DELTA, method).epsilon, rel=1e-3)
    assert _account(some, with_queries, method).upper[0] > _account(some, plain, method).upper[0]
    released = replace(plain, releases=(GaussianRelease("pca", 4.0), GaussianRelease("histogram", 4.0)))
    expected = _gaussian_epsilon(4.0 / math.sqrt(2.0))
    assert _account(nothing, released, "pld").upper[0] == pytest.approx(expected, rel=1e-4)
    selected = replace(plain, releases=(PureRelease("selection", 0.5),))
    assert 0.49 < _account(nothing, selected, method).upper[0] <= 0.6
    increase = _account(some, selected, method).upper[0] - _account(some, plain, method).upper[0]
    assert 0.0 < increase <= 0.5


def test_unsampled_gaussians_are_exact() -> None:
    contributions = _contributions()
    full_batch = _account(contributions, _trace(PoissonSampling(1.0), sigma=40.0))
    shuffled = _account(contributions, _trace(ShuffledSampling(50), sigma=4.0))
    for row, full, epochs in zip(contributions, full_batch.upper, shuffled.upper, strict=True):
        assert full == pytest.approx(_gaussian_epsilon(40.0 / math.sqrt(100 * (row**2).sum())), rel=1e-4)
        assert epochs == pytest.approx(_gaussian_epsilon(4.0 / math.sqrt(2 * (row**2).sum())), rel=1e-4)


def test_a_shuffled_epoch_counts_its_worst_step_and_an_unfinished_one_counts() -> None:
    contributions = np.array([[0.2, 0.9, 0.4, 0.1]])
    trace = _trace(ShuffledSampling(250), sigma=2.0)
    found = _account(contributions, trace).upper[0]
    assert found == pytest.approx(_gaussian_epsilon(2.0 / math.hypot(0.9, 0.4)), rel=1e-4)


def test_fixed_batches_charge_the_displaced_example() -> None:
    """An example without contribution still displaces one that may have moved the sum by the whole sensitivity."""
    displaced = _account(np.zeros((1, 4)), _trace(FixedBatchSampling(5_000, 100)), "rdp").upper[0]
    assert displaced == pytest.approx(account(_trace(), DELTA, "rdp").epsilon, rel=1e-4)


@pytest.mark.parametrize(("sample_rate", "sigma", "steps"), [(0.3, 1.0, 1), (0.02, 0.8, 1), (0.9, 2.0, 1)])
def test_one_step_is_never_understated(sample_rate: float, sigma: float, steps: int) -> None:
    contributions = np.array([[0.3], [0.7], [1.0]])
    trace = _trace(PoissonSampling(sample_rate), sigma, steps)
    result = individual_epsilons([0], contributions, trace, DELTA, "pld")
    for value, upper, lower in zip(contributions[:, 0], result.upper, known(result.lower), strict=True):
        assert _one_step_delta(sample_rate, sigma / value, upper) <= DELTA * (1 + 1e-6)
        assert lower == 0.0 or _one_step_delta(sample_rate, sigma / value, lower) >= DELTA * (1 - 1e-6)


def _one_step_delta(sample_rate: float, sigma: float, epsilon: float) -> float:
    """max of both hockey-stick divergences between N(0, s^2) and (1-q) N(0, s^2) + q N(1, s^2), in closed form."""

    def threshold(ratio: float) -> float:
        return sigma**2 * math.log((ratio - (1.0 - sample_rate)) / sample_rate) + 0.5

    def mixture_tail(x: float) -> float:
        return float((1.0 - sample_rate) * norm.sf(x / sigma) + sample_rate * norm.sf((x - 1.0) / sigma))

    up = threshold(math.exp(epsilon))
    remove = mixture_tail(up) - math.exp(epsilon) * norm.sf(up / sigma)
    if math.exp(-epsilon) <= 1.0 - sample_rate:
        return float(remove)
    down = threshold(math.exp(-epsilon))
    add = norm.cdf(down / sigma) - math.exp(epsilon) * (1.0 - mixture_tail(down))
    return float(max(remove, add))


def test_no_noise_is_infinite_unless_the_example_never_contributed(method: str) -> None:
    result = _account(np.array([[0.0, 0.0, 0.5, 0.0], [0.0] * 4]), _trace(sigma=0.0), method)
    np.testing.assert_array_equal(result.upper, [np.inf, 0.0])
    if result.lower is not None:
        np.testing.assert_array_equal(result.lower, [np.inf, 0.0])


@pytest.mark.parametrize("method", INDIVIDUAL_ACCOUNTANTS)
@pytest.mark.parametrize("multiplier", [1e-6, 1e-5, 1e-3, 1e-2])
def test_next_to_no_noise_costs_next_to_infinity(method: str, multiplier: float) -> None:
    """Finite, ordered, and no less than the worst of the steps alone, whether it comes from steps or side queries."""
    sampling = PoissonSampling(0.1)
    steps = Trace(100, (Segment(0, 10, sampling, multiplier),))
    queries = Trace(100, (Segment(0, 10, sampling, 1.0, (SideQuery("count", multiplier),)),))
    least = 0.5 * multiplier**-2
    idle, busy = individual_epsilons([0], np.array([[0.0], [1.0]]), steps, 1e-5, method).upper
    assert idle == 0.0
    assert least < busy < math.inf
    both = individual_epsilons([0], np.array([[0.0], [1.0]]), queries, 1e-5, method).upper
    assert ((least < both) & (both < math.inf)).all()


def test_kind_follows_the_trace() -> None:
    assert _account(_contributions(1), _trace(), "rdp").kind == "estimate"
    assert _account(_contributions(1), _trace(contributions="guarantee"), "rdp").kind == "guarantee"


def test_empty_data_is_accounted(method: str) -> None:
    assert _account(np.zeros((0, 4)), _trace(), method).upper.shape == (0,)


def test_impossible_input_is_refused() -> None:
    good = _contributions(2)
    for wrong in (np.nan, -0.1, 1.5):
        with pytest.raises(InvalidInput, match=r"lie outside \[0, 1\]"):
            _account(np.where(good == good[1, 2], wrong, good), _trace(), "rdp")
    with pytest.raises(InvalidInput, match="must start at 0"):
        individual_epsilons([5, 100, 200, 300], good, _trace(), DELTA)
    with pytest.raises(InvalidInput, match="one column per snapshot"):
        individual_epsilons([0, 100], good, _trace(), DELTA)
    with pytest.raises(InvalidInput, match="delta"):
        individual_epsilons(STEPS, good, _trace(), float("nan"))
    with pytest.raises(UnsupportedMechanism, match="zero_out"):
        _account(good, _trace(ShuffledSampling(50), adjacency="add_remove"), "rdp")
    with pytest.raises(UnsupportedMechanism, match="add_remove"):
        _account(good, _trace(FixedBatchSampling(5_000, 100), adjacency="zero_out"), "rdp")


def test_algorithm_2_rounds_to_the_nearest_and_can_understate() -> None:
    levels = np.array([[0.5] * 4, [0.504] * 4, [0.496] * 4, [0.0] * 4])
    published = algorithm_2(STEPS, levels, _trace(), DELTA)
    assert published[0] == published[1] == published[2]
    assert 0.0 < published[3] < published[0]
    accountant = RdpAccountant(ORDERS.tolist())
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(2.0)), 400)
    rdp = np.asarray(accountant._rdp)
    assert published[0] == pytest.approx(np.min(rdp + math.log(1 / DELTA) / (ORDERS - 1)), rel=1e-5)
    with pytest.raises(UnsupportedMechanism):
        algorithm_2(STEPS, levels, _trace(FixedBatchSampling(5_000, 100)), DELTA)


@pytest.mark.filterwarnings("error")
def test_algorithm_2_without_noise_costs_infinity() -> None:
    noise = (Segment(0, 200, PoissonSampling(0.02), 1.0), Segment(200, 200, PoissonSampling(0.02), 0.0))
    assert np.isinf(algorithm_2(STEPS, [[1.0] * 4, [0.0] * 4], Trace(5_000, noise), DELTA)).all()
    assert np.isfinite(algorithm_2([0], [[1.0], [0.0]], Trace(5_000, noise[:1]), DELTA)).all()


@pytest.mark.parametrize("rounding", [0.3, 0.4, 0.7, 2 / 3, 0.0123])
def test_algorithm_2_takes_no_rounding_that_moves_a_contribution_of_1(rounding: float) -> None:
    full = [[1.0] * 4]
    with pytest.raises(InvalidInput, match=r"rounding is 0\.\d+, but must be 1 over a whole number.*; give") as refusal:
        algorithm_2(STEPS, full, _trace(), DELTA, rounding)
    advised = float(str(refusal.value).rsplit(" ", 1)[1])
    for accepted in (advised, 1.0, 1 / 3, 1e-6):
        assert algorithm_2(STEPS, full, _trace(), DELTA, accepted) == algorithm_2(STEPS, full, _trace(), DELTA)


@pytest.mark.parametrize(("sample_rate", "sigma", "steps"), [(0.001, 0.6, 200), (0.05, 1.0, 20), (0.5, 3.0, 30)])
def test_few_or_wide_steps_are_never_understated(sample_rate: float, sigma: float, steps: int) -> None:
    """Where the spectrum decays slowly the loss is smoothed: still above the truth, and better than Renyi's bound."""
    trace = _trace(PoissonSampling(sample_rate), sigma, steps)
    result = individual_epsilons([0], np.ones((1, 1)), trace, DELTA, "pld")
    optimistic, pessimistic = (
        privacy_loss_distribution.from_gaussian_mechanism(
            sigma, pessimistic_estimate=side, sampling_prob=sample_rate, value_discretization_interval=1e-3
        )
        .self_compose(steps)
        .get_epsilon_for_delta(DELTA)
        for side in (False, True)
    )
    assert optimistic <= result.upper[0] <= 1.05 * pessimistic
    assert known(result.lower)[0] <= pessimistic
    assert result.upper[0] < individual_epsilons([0], np.ones((1, 1)), trace, DELTA, "rdp").upper[0]


@pytest.mark.parametrize(("sample_rate", "sigma"), [(0.1, 0.7), (0.1, 1.0), (0.001, 0.6)])
def test_two_steps_are_bracketed_within_a_hundredth(sample_rate: float, sigma: float) -> None:
    trace = _trace(PoissonSampling(sample_rate), sigma, 2)
    result = individual_epsilons([0], np.ones((1, 1)), trace, DELTA, "pld")
    exact = _two_step_epsilon(sample_rate, sigma)
    assert 0.985 * exact <= known(result.lower)[0] <= exact <= result.upper[0] <= 1.01 * exact


def _two_step_epsilon(sample_rate: float, sigma: float) -> float:
    """By quadrature over the outputs of the first step, and the closed form of the second one's divergence."""
    x = np.linspace(-12.0 * sigma, 1.0 + 12.0 * sigma, 40_001)
    log_ratio = np.log1p(sample_rate * np.expm1((2.0 * x - 1.0) / (2.0 * sigma**2)))
    absent = norm.pdf(x, scale=sigma) * (x[1] - x[0])
    present = absent * np.exp(log_ratio)

    def delta(epsilon: float) -> float:
        removed = float(np.sum(present * _one_step_remove(sample_rate, sigma, epsilon - log_ratio)))
        added = float(np.sum(absent * _one_step_add(sample_rate, sigma, epsilon + log_ratio)))
        return max(removed, added)

    return float(brentq(lambda epsilon: delta(epsilon) - DELTA, 1e-6, 20.0, xtol=1e-9))


def _output_at(sample_rate: float, sigma: float, log_ratio: np.ndarray) -> np.ndarray:
    """The output of one step with this log P/Q; minus infinity where the ratio is always larger."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        excess = np.exp(log_ratio) - (1.0 - sample_rate)
        return np.where(excess > 0.0, sigma**2 * np.log(np.maximum(excess, 0.0) / sample_rate) + 0.5, -np.inf)


def _one_step_remove(sample_rate: float, sigma: float, epsilon: np.ndarray) -> np.ndarray:
    """E_Q[(P/Q - e^eps)_+] over E_P of the whole, for any real epsilon."""
    x = _output_at(sample_rate, sigma, epsilon)
    present = (1.0 - sample_rate) * norm.sf(x / sigma) + sample_rate * norm.sf((x - 1.0) / sigma)
    return np.asarray(present - np.exp(epsilon) * norm.sf(x / sigma))


def _one_step_add(sample_rate: float, sigma: float, epsilon: np.ndarray) -> np.ndarray:
    """E_P[(Q/P - e^eps)_+] for any real epsilon."""
    x = _output_at(sample_rate, sigma, -epsilon)
    present = (1.0 - sample_rate) * norm.cdf(x / sigma) + sample_rate * norm.cdf((x - 1.0) / sigma)
    return np.asarray(norm.cdf(x / sigma) - np.where(np.isfinite(x), np.exp(epsilon) * present, 0.0))


@pytest.mark.long
def test_pld_agrees_with_dp_accounting_on_a_random_sample() -> None:
    """Typical and tiny epsilons: within 0.1 % of one-by-one composition, and certified below it, which is above too."""
    rng = np.random.default_rng(7)
    steps, levels = np.arange(0, 600, 30), np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0])
    contributions = rng.choice(levels, (400, len(steps)), p=rng.dirichlet(np.ones(len(levels))))
    contributions[:100] = rng.choice(levels[:3], (100, len(steps)))
    trace = _trace(PoissonSampling(0.04), sigma=1.5, steps=600)
    ours = individual_epsilons(steps, contributions, trace, DELTA, "pld")
    sample = np.concatenate([rng.choice(100, 2, replace=False), rng.choice(np.arange(100, 400), 3, replace=False)])
    shared = {level: _level_pld(1.5 / level, 0.04) for level in np.unique(contributions[sample]).tolist()}
    for row in sample:
        values, counts = np.unique(contributions[row], return_counts=True)
        parts = [shared[v].self_compose(30 * int(n)) for v, n in zip(values.tolist(), counts, strict=True)]
        total = functools.reduce(lambda one, other: one.compose(other), parts)
        peer = float(total.get_epsilon_for_delta(DELTA))
        assert ours.upper[row] == pytest.approx(peer, rel=1e-3)
        assert known(ours.lower)[row] <= peer * (1 + 1e-9)


def _level_pld(sigma: float, sample_rate: float) -> privacy_loss_distribution.PrivacyLossDistribution:
    """A privacy loss on a lattice fine enough for tiny epsilons."""
    return privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=sample_rate, value_discretization_interval=5e-5
    )


@pytest.mark.parametrize("epochs", [1, 2, 3, 8])
def test_every_shuffled_epoch_between_two_snapshots_costs(epochs: int) -> None:
    trace = _trace(ShuffledSampling(50), sigma=4.0, steps=50 * epochs)
    upper = individual_epsilons([0], np.ones((1, 1)), trace, DELTA).upper[0]
    assert upper == pytest.approx(_gaussian_epsilon(4.0 / math.sqrt(epochs)), rel=1e-3)
