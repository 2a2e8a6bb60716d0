"""Groups over a chain of single examples: against quadrature, exact groups of Poisson batches, and one Gaussian."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from dpsweep.accounting import account, account_together, privacy_curve
from dpsweep.accounting.mechanism.noise_strategies import make_strategy
from dpsweep.accounting.mechanism.samplings import (
    CyclicPoissonSampling,
    PoissonSampling,
    RandomAllocationSampling,
    Sampling,
)
from dpsweep.accounting.mechanism.trace import PureRelease, Segment, Trace
from dpsweep.accounting.numerics.gaussian import gaussian_delta, gaussian_epsilon
from dpsweep.accounting.pld import (
    Chain,
    delta_pld,
    epsilon_of_chain,
    epsilon_pld,
    group_epsilons,
    rounds_of_group,
    vadhan_epsilon,
)
from tests.known import known as present


def run_of(sampling: Sampling, sigma: float, steps: int) -> Trace:
    return Trace(10_000, (Segment(0, steps, sampling, sigma),))


def delta_of_pair_in_two_steps(sigma: float, epsilon: float) -> float:
    """Delta of two members in an epoch of two steps: a double integral over both sums, the worse direction."""
    x = np.linspace(-9.0, 9.0 + 2.0 / sigma, 1501)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    both, each = (np.exp(x * shift - shift**2 / 2) for shift in (2.0 / sigma, 1.0 / sigma))
    ratio = both[:, None] / 4 + both[None, :] / 4 + np.outer(each, each) / 2
    weight = np.outer(density, density)
    removed = float((np.maximum(ratio - math.exp(epsilon), 0.0) * weight).sum())
    return max(removed, float((np.maximum(1.0 - math.exp(epsilon) * ratio, 0.0) * weight).sum()))


@pytest.mark.parametrize(("sigma", "epsilon"), [(1.0, 2.0), (2.0, 0.5), (4.0, 0.0)])
def test_two_members_in_two_steps_cost_at_most_what_is_claimed(sigma: float, epsilon: float) -> None:
    trace = run_of(RandomAllocationSampling(2), sigma, 2)
    exact, found = delta_of_pair_in_two_steps(sigma, epsilon), delta_pld(trace, epsilon, 2)
    assert present(found.lower) <= exact * 1.001 <= found.upper * 1.002
    assert found.upper < 2.0 * exact
    again = epsilon_pld(trace, found.upper, 2)
    assert again.upper == pytest.approx(epsilon, rel=1e-2, abs=1e-3)
    curve = privacy_curve(trace, 2)
    assert exact <= curve.delta(epsilon).upper * 1.001
    assert curve.delta(epsilon).upper < 2.2 * exact


@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "size"),
    [(0.01, 1.0, 2000, 2), (0.01, 1.0, 2000, 6), (0.1, 3.0, 100, 3), (0.5, 0.8, 2, 2), (0.001, 0.6, 30, 4)],
)
def test_a_chain_is_above_groups_that_are_known_exactly(rate: float, sigma: float, steps: int, size: int) -> None:
    trace = run_of(PoissonSampling(rate), sigma, steps)
    chained = epsilon_of_chain(Chain(rounds_of_group(trace), size), 1e-5)
    exact = epsilon_pld(trace, 1e-5, size)
    assert chained.lower <= present(exact.lower) <= chained.upper <= vadhan_epsilon(trace, 1e-5, size) * 1.001


@pytest.mark.parametrize(("sigma", "size"), [(1.0, 3), (8.0, 16), (0.2, 2)])
def test_a_chain_of_gaussians_is_one_gaussian(sigma: float, size: int) -> None:
    chained = epsilon_of_chain(Chain(rounds_of_group(run_of(PoissonSampling(1.0), sigma, 1)), size), 1e-6)
    exact, _ = gaussian_epsilon(size / sigma, 1e-6)
    assert exact <= chained.upper * (1 + 1e-9) <= exact * 1.001


def test_a_million_links_are_composed_at_once() -> None:
    """k members with k times the noise cost nearly the same; before, every link took a step."""
    few, many = (epsilon_pld(run_of(RandomAllocationSampling(1000), 3e-3 * k, 1000), 1e-6, k) for k in (10**5, 10**6))
    assert many.upper == pytest.approx(few.upper, rel=1e-4)
    assert few.method == "pld"


def test_many_epochs_cost_groups_what_poisson_batches_cost_them() -> None:
    allocated = run_of(RandomAllocationSampling(100), 6.0, 40_000)
    poisson = run_of(PoissonSampling(0.01), 6.0, 40_000)
    for ours, known in zip(group_epsilons(allocated, 1e-5, (2, 8)), group_epsilons(poisson, 1e-5, (2, 8)), strict=True):
        assert ours.lower is not None
        assert 0.99 * known.upper < ours.upper < 1.001 * known.upper
        assert ours.kind == "guarantee"


def test_members_who_take_turns_together_are_covered() -> None:
    strategy = make_strategy("banded", {"bands": 4}, 400, 400)
    cyclic = replace(run_of(CyclicPoissonSampling(4, 0.04), 1.0, 400), strategy=strategy)
    together = epsilon_pld(run_of(PoissonSampling(0.04), 1.0, 100), 1e-6, 2)
    found = account(cyclic, 1e-6, group_size=2)
    assert found.group_size == 2
    assert present(together.lower) <= found.epsilon < 1.25 * together.upper


def test_pure_releases_and_other_runs_are_links_too() -> None:
    trace = run_of(RandomAllocationSampling(5), 2.0, 10)
    released = replace(trace, releases=(PureRelease("choice", 0.3),))
    alone, with_it = account(trace, 1e-5, group_size=2), account(released, 1e-5, group_size=2)
    assert alone.epsilon < with_it.epsilon <= (alone.epsilon + 0.6) * (1 + 1e-9)
    twice = account_together([trace, trace], 1e-5, 2)
    assert twice.epsilon == pytest.approx(epsilon_pld(run_of(RandomAllocationSampling(5), 2.0, 20), 1e-5, 2).upper)
    beside = account_together([trace, run_of(PoissonSampling(0.1), 2.0, 10)], 1e-5, 2)
    assert alone.epsilon < beside.epsilon


@pytest.mark.parametrize(("sigma", "size"), [(0.01, 3), (1e3, 5), (0.7, 20)])
def test_extreme_groups_have_finite_bounds(sigma: float, size: int) -> None:
    trace = run_of(RandomAllocationSampling(20), sigma, 40)
    found = epsilon_pld(trace, 1e-9, size)
    revealed, _ = gaussian_epsilon(size * math.sqrt(2.0) / sigma, 1e-9)
    assert (found.lower or 0.0) <= found.upper <= revealed * (1 + 1e-6)
    exact, _ = gaussian_delta(size * math.sqrt(2.0) / sigma, revealed)
    assert delta_pld(trace, revealed, size).upper <= exact * (1 + 1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 100.0])
def test_a_group_that_nothing_protects_has_a_delta_of_1(epsilon: float) -> None:
    trace = run_of(RandomAllocationSampling(3), 0.5, 300)
    assert delta_pld(trace, epsilon, 2).upper == 1.0


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("sigma", "sizes"), [(0.7, (6, 8, 12, 16)), (1.0, (6, 8, 12)), (1.5, (6, 12, 20))])
def test_larger_groups_and_longer_runs_cost_more(sigma: float, sizes: tuple[int, ...]) -> None:
    """Where the losses of one direction all lie below the epsilon, too, and where links have deltas below 1e-300."""
    short, long = (
        [account(run_of(RandomAllocationSampling(10), sigma, steps), 1e-5, group_size=size) for size in sizes]
        for steps in (20, 50)
    )
    for one, other in zip(short, long, strict=True):
        assert one.epsilon < other.epsilon
    for row in (short, long):
        assert sorted(each.epsilon for each in row) == [each.epsilon for each in row]
    assert {each.accountant for each in short} == {"pld"}
    assert np.all(np.diff([each.epsilon for each in short]) < 250.0)
