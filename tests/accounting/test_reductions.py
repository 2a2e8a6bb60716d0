"""Truncated Poisson batches and replaced records, against oracles that share no code with the accounting."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent
from dp_accounting.pld import PLDAccountant
from scipy import stats

from accounting import (
    FixedBatchSampling,
    GaussianRelease,
    InvalidInput,
    PoissonSampling,
    PureRelease,
    Sampling,
    Segment,
    ShuffledSampling,
    SideQuery,
    Trace,
    TruncatedPoissonSampling,
    UnsupportedMechanism,
    account,
    calibrate_noise_multiplier,
    epsilon_of_examples,
    individual_epsilons,
    read_trace,
    write_trace,
)
from accounting.filters import GaussianFilter, RenyiFilter
from accounting.gaussian import gaussian_epsilon
from accounting.individual.algorithm_2 import algorithm_2
from accounting.samplings import sampling_of_sizes

DELTA = 1e-5


def run(sampling: Sampling, sigma: float = 1.0, steps: int = 1000, size: int = 10_000) -> Trace:
    return Trace(size, (Segment(0, steps, sampling, sigma),))


def truncated(size: int, batch: int, most: int, sigma: float = 1.0, steps: int = 1000) -> Trace:
    return run(TruncatedPoissonSampling.of_sizes(size, batch, most), sigma, steps, size)


def dp_accounting_epsilon(trace: Trace, delta: float) -> float:
    """By dp-accounting's own event for truncated batches."""
    (segment,) = trace.segments
    sampling = segment.sampling
    assert isinstance(sampling, TruncatedPoissonSampling)
    event = TruncatedSubsampledGaussianDpEvent(
        sampling.dataset_size, sampling.sample_rate, sampling.max_batch_size, segment.noise_multiplier
    )
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, segment.steps))
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize(
    ("trace", "gap"),
    [
        (truncated(10_000, 100, 200), 0.002),
        (truncated(10_000, 100, 130), 0.4),
        (truncated(10_000, 100, 100), 0.1),
        (truncated(1000, 50, 90, sigma=2.0, steps=500), 0.01),
    ],
)
def test_never_below_dp_accountings_event_and_close_where_cuts_are_rare(trace: Trace, gap: float) -> None:
    mine, oracle = account(trace, DELTA, "pld").epsilon, dp_accounting_epsilon(trace, DELTA)
    assert oracle * (1 - 1e-4) <= mine <= oracle * (1 + gap)


def test_a_maximum_never_costs_less_than_none_and_never_more_than_half_the_noise() -> None:
    plain, halved = (account(run(PoissonSampling(0.01), sigma), DELTA).epsilon for sigma in (1.0, 0.5))
    costs = [account(truncated(10_000, 100, most), DELTA).epsilon for most in (10_000, 200, 150, 130, 100)]
    assert plain <= costs[0] * (1 + 1e-9)
    assert (np.diff(costs) >= -1e-6).all()
    assert costs[-1] <= halved


def exact_delta(others: int, rate: float, most: int, sigma: float, epsilon: float) -> float:
    """Worst of both directions for one step on the line: the example is +1, all others are -1; by quadrature."""
    points = np.linspace(-others - 12.0 * sigma, 2.0 + 12.0 * sigma, 200_001)
    spacing = points[1] - points[0]

    def density(atoms: dict[int, float]) -> np.ndarray:
        return np.asarray(sum(weight * stats.norm.pdf(points, at, sigma) for at, weight in atoms.items()))

    without: dict[int, float] = {}
    with_it: dict[int, float] = {}
    for joined in range(others + 1):
        chance = float(stats.binom.pmf(joined, others, rate))
        kept = min(joined, most)
        without[-kept] = without.get(-kept, 0.0) + chance
        with_it[-kept] = with_it.get(-kept, 0.0) + chance * (1 - rate)
        stays = min(1.0, most / (joined + 1))
        held = min(joined + 1, most)
        for at, share in ((2 - held, stays), (-held, 1.0 - stays)):
            with_it[at] = with_it.get(at, 0.0) + chance * rate * share
    p, q = density(with_it), density(without)
    losses = [np.maximum(a - math.exp(epsilon) * b, 0.0).sum() * spacing for a, b in ((p, q), (q, p))]
    return float(max(losses))


@pytest.mark.parametrize(
    ("others", "most", "sigma", "batch"), list(product([3, 8], [2, 3], [0.5, 1.0], [1, 2])), ids=lambda v: str(v)
)
@pytest.mark.parametrize("counts_the_example", [False, True])
def test_a_step_is_never_cheaper_than_its_quadrature(
    others: int, most: int, sigma: float, batch: int, counts_the_example: bool
) -> None:
    """The dataset_size of a trace may be that of either neighbour."""
    size = others + counts_the_example
    trace = truncated(size, batch, most, sigma, steps=1)
    for delta in (1e-2, 1e-4):
        epsilon = account(trace, delta).epsilon
        assert exact_delta(others, batch / size, most, sigma, epsilon) <= delta * (1 + 1e-6)


def test_plain_poisson_accounting_of_truncated_batches_would_be_too_low() -> None:
    """The quadrature can fail: it is not met by the epsilon of the batches before they are cut."""
    uncut = account(run(PoissonSampling(0.25), 0.5, 1, 60), 1e-4).epsilon
    assert exact_delta(60, 0.25, 2, 0.5, uncut) > 5e-3
    cut = account(run(TruncatedPoissonSampling(60, 0.25, 2), 0.5, 1, 60), 1e-4).epsilon
    assert exact_delta(60, 0.25, 2, 0.5, cut) < 1e-4


def test_groups_of_truncated_batches_need_room_for_all_their_members() -> None:
    sampling = TruncatedPoissonSampling.of_sizes(10_000, 100, 150)
    assert sampling.cut_probability(1) == pytest.approx(stats.binom.sf(149, 10_000, 0.01), rel=1e-8)
    assert sampling.cut_probability(20) == pytest.approx(stats.binom.sf(130, 10_000, 0.01), rel=1e-8)
    assert sampling.cut_probability(151) == 1.0
    pair = account(truncated(10_000, 100, 200), DELTA, "pld", 2).epsilon
    assert pair == pytest.approx(account(run(PoissonSampling(0.01)), DELTA, "pld", 2).epsilon, rel=2e-3)
    assert account(truncated(10_000, 100, 150), DELTA, "pld", 2).epsilon > pair


@pytest.mark.parametrize("method", ["rdp", "pld"])
def test_single_examples_of_truncated_batches(method: str) -> None:
    """Close to plain Poisson batches while cuts are negligible; else, every batch counts as cut: a guarantee still."""
    rows = [[1.0], [0.2]]
    plain = individual_epsilons([0], rows, run(PoissonSampling(0.01)), DELTA, method).upper
    rare = individual_epsilons([0], rows, truncated(10_000, 100, 200), DELTA, method)
    np.testing.assert_allclose(rare.upper, plain, rtol=1e-3)
    assert (rare.upper >= plain * (1 - 1e-9)).all()
    assert rare.delta == DELTA
    often = individual_epsilons([0], rows, truncated(10_000, 100, 110), DELTA, method).upper
    assert often[0] >= account(truncated(10_000, 100, 110), DELTA).epsilon
    assert often[1] > individual_epsilons([0], [[0.2]], run(PoissonSampling(0.01), 1 / 1.2), DELTA, method).upper[0] / 2
    given = epsilon_of_examples(truncated(10_000, 100, 110), [0], [[1.0]] * 2, DELTA)
    assert given.upper >= account(truncated(10_000, 100, 110), DELTA, "pld", 2).epsilon
    assert given.delta == DELTA


def test_noise_is_calibrated_with_the_maximum() -> None:
    def trace_of(sigma: float) -> Trace:
        return truncated(1000, 50, 80, sigma, 100)

    sigma = calibrate_noise_multiplier(trace_of, 2.0, DELTA)
    assert account(trace_of(sigma), DELTA, "pld").epsilon <= 2.0
    assert dp_accounting_epsilon(trace_of(sigma), DELTA) <= 2.0
    plain = calibrate_noise_multiplier(lambda s: run(PoissonSampling(0.05), s, 100, 1000), 2.0, DELTA)
    assert sigma > plain


def test_what_a_trace_states_is_stored(tmp_path: Path) -> None:
    for stated in (truncated(1000, 50, 80), replace(run(PoissonSampling(1.0)), adjacency="replace_one")):
        write_trace(str(tmp_path / "trace.arrow"), stated)
        assert read_trace(str(tmp_path / "trace.arrow")) == stated


@pytest.mark.parametrize("most", [49, 1001])
def test_a_maximum_below_the_batch_or_above_the_data_is_refused(most: int) -> None:
    with pytest.raises(InvalidInput, match=f"max_batch_size is {most}, but must be between .* 50 and the 1000"):
        TruncatedPoissonSampling.of_sizes(1000, 50, most)


@pytest.mark.parametrize("method", ["fixed", "shuffle"])
def test_only_poisson_batches_have_a_maximum(method: str) -> None:
    with pytest.raises(InvalidInput, match=r"max_batch_size is 80, but .* leave it out, or choose the method poisson"):
        sampling_of_sizes(method, 1000, 50, 80)


@pytest.mark.parametrize(
    "sampling",
    [PoissonSampling(0.5), FixedBatchSampling(100, 50), TruncatedPoissonSampling.of_sizes(100, 50, 80)],
)
def test_sampled_batches_are_refused_under_replace_one(sampling: Sampling) -> None:
    with pytest.raises(
        UnsupportedMechanism, match="no accounting under 'replace_one', which is proven only where noth"
    ):
        Trace(100, (Segment(0, 10, sampling, 1.0),), adjacency="replace_one")


@pytest.mark.parametrize("sampling", [PoissonSampling(1.0), FixedBatchSampling(100, 100), ShuffledSampling(10)])
@pytest.mark.parametrize("accountant", ["auto", "gdp", "pld", "rdp", "zcdp", "dp-accounting-pld"])
def test_a_replaced_record_counts_twice(sampling: Sampling, accountant: str) -> None:
    """The exact curve of the Gaussian with shift 2 sqrt(rounds) / sigma + the releases at twice their shift."""
    rounds = 1 if isinstance(sampling, ShuffledSampling) else 10
    segment = Segment(0, 10, sampling, 20.0, (SideQuery("counts", 50.0),))
    trace = Trace(100, (segment,), (GaussianRelease("mean", 30.0),), adjacency="replace_one")
    mu = 2.0 * math.sqrt(rounds * (1 / 20.0**2 + 1 / 50.0**2) + 1 / 30.0**2)
    exact = gaussian_epsilon(mu, DELTA)[0]
    found = account(trace, DELTA, accountant)
    loose = 1.0 if accountant in ("rdp", "zcdp") else 1e-2
    assert exact * (1 - 1e-9) <= found.epsilon * (1 + (accountant.startswith("dp-")) * 1e-3) <= exact * (1 + loose)
    assert found.adjacency == "replace_one"
    pair = account(trace, DELTA, "pld", 2).epsilon
    assert pair == pytest.approx(gaussian_epsilon(2 * mu, DELTA)[0], rel=1e-3)


def test_a_pure_release_counts_twice_under_replace_one() -> None:
    trace = Trace(100, releases=(PureRelease("choice", 0.4),), adjacency="replace_one")
    assert account(trace, DELTA).epsilon == pytest.approx(0.8, rel=1e-3)


@pytest.mark.parametrize("method", ["rdp", "pld"])
@pytest.mark.parametrize("sampling", [PoissonSampling(1.0), ShuffledSampling(10)])
def test_a_replaced_example_costs_its_own_contribution_and_that_of_another(sampling: Sampling, method: str) -> None:
    """Not twice its own: a record that contributes nothing may be replaced by one that contributes in full."""
    trace = Trace(100, (Segment(0, 10, sampling, 20.0),), adjacency="replace_one")
    rounds = 1 if isinstance(sampling, ShuffledSampling) else 10
    upper = individual_epsilons([0], [[0.0], [0.5], [1.0]], trace, DELTA, method).upper
    exact = [gaussian_epsilon((1.0 + c) * math.sqrt(rounds) / 20.0, DELTA)[0] for c in (0.0, 0.5, 1.0)]
    assert (upper >= np.array(exact) * (1 - 1e-6)).all()
    if method == "pld":
        np.testing.assert_allclose(upper, exact, rtol=0.02)
    group = epsilon_of_examples(trace, [0], [[0.0], [0.5]], DELTA).upper
    assert group == pytest.approx(gaussian_epsilon(2.5 * math.sqrt(rounds) / 20.0, DELTA)[0], rel=0.01)


def test_filters_limit_neither_truncated_batches_nor_replaced_records() -> None:
    """An example that contributes nothing would cost something: it displaces others, or another takes its place."""
    with pytest.raises(UnsupportedMechanism, match=r"noisy Poisson batches .* not truncated Poisson batches"):
        replace(truncated(1000, 50, 80), filter=RenyiFilter(0.3, 6))
    with pytest.raises(UnsupportedMechanism, match="what takes its place under 'replace_one'"):
        replace(run(PoissonSampling(1.0)), adjacency="replace_one", filter=GaussianFilter(0.3))


def test_algorithm_2_is_not_for_replaced_records() -> None:
    trace = replace(run(PoissonSampling(1.0)), adjacency="replace_one")
    with pytest.raises(UnsupportedMechanism, match="not replace_one"):
        algorithm_2([0], [[0.5]], trace, DELTA)
