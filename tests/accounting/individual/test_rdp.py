"""The search for an example's best order finds what evaluating every order finds; it is above the cost."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from dpsweep.accounting.individual.contributions import RecordedContributions, StepLaw, StepWeights
from dpsweep.accounting.individual.rdp import FEW_ORDERS, classic_epsilons, rdp_epsilons, renyi_costs
from dpsweep.accounting.individual.spreading import spread_linearly
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, SideQuery, Trace
from dpsweep.accounting.numerics.renyi import (
    ORDERS,
    Array,
    classic_terms,
    epsilon_improved,
    improved_terms,
    pure_rdp,
    sampled_gaussian_rdp,
)

STEPS = (0, 40, 80)
TRACES = {
    "side queries": Trace(
        60_000,
        (Segment(0, 120, PoissonSampling(0.05), 1.0, (SideQuery("counts", 6.0),)),),
        (PureRelease("size", 0.01),),
    ),
    "phase transition": Trace(60_000, (Segment(0, 3000, PoissonSampling(0.001), 0.6),)),
    "two rates": Trace(
        60_000, (Segment(0, 60, PoissonSampling(0.01), 4.0), Segment(60, 60, PoissonSampling(0.1), 6.0))
    ),
    "full batches after": Trace(
        60_000,
        (Segment(0, 100, PoissonSampling(0.01), 2.0), Segment(100, 20, PoissonSampling(1.0), 30.0)),
        (GaussianRelease("histogram", 20.0),),
    ),
    "nearly no noise": Trace(60_000, (Segment(0, 90, PoissonSampling(0.3), 0.09),)),
}


def weights_of(costs: StepWeights) -> list[NDArray[np.float64]]:
    """Of each sampling rate the weights [rows, nodes]."""
    dense = np.zeros((len(costs.precision), costs.starts[-1]))
    for row, (start, stop) in enumerate(pairwise(costs.steps.ends.tolist())):
        assert (np.diff(costs.steps.nodes[start:stop]) > 0).all()
        dense[row, costs.steps.nodes[start:stop]] = costs.steps.weights[start:stop]
    return np.split(dense, costs.starts[1:-1], axis=1)


def at_every_order(recorded: RecordedContributions) -> NDArray[np.float64]:
    """RDP [rows, orders] of the spread steps, releases and full batches."""
    costs = recorded.costs(spread_linearly)
    total = costs.precision[:, None] * (0.5 * ORDERS) + sum(pure_rdp(epsilon, ORDERS) for epsilon in costs.pure)
    for part, weights in zip(costs.sampled, weights_of(costs), strict=True):
        assert isinstance(part.law, StepLaw)
        reached = weights.any(axis=0)
        noise = (np.inf if u == 0.0 else u**-0.5 for u in part.precisions[reached])
        table = [0.0 * ORDERS if np.isinf(each) else sampled_gaussian_rdp(part.law.sample_rate, each) for each in noise]
        total = total + weights[:, reached] @ np.array(table)
    return np.asarray(total)


def contributions(rows: int = 16) -> NDArray[np.float64]:
    """Of examples that hardly contribute and of such that always contribute most, too."""
    rng = np.random.default_rng(0)
    values = np.minimum(rng.lognormal(-1.0, 1.5, (rows, 1)) * rng.lognormal(0.0, 0.3, (rows, len(STEPS))), 1.0)
    values[0], values[1], values[2], values[3:6, 1:] = 0.0, 1.0, 1e-6, 0.0
    return values


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-12])
@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_few_orders_find_what_all_orders_find(trace: Trace, delta: float) -> None:
    recorded = RecordedContributions.checked(STEPS, contributions(), trace)
    upper = rdp_epsilons(recorded, delta)
    everywhere = at_every_order(recorded)
    expected = epsilon_improved(everywhere, delta)
    np.testing.assert_allclose(upper, expected, rtol=1e-12)
    found = renyi_costs(recorded.costs(spread_linearly), delta)
    np.testing.assert_allclose(found.epsilons, expected, rtol=1e-12)
    rows, places = np.arange(3, len(upper)), np.arange(10, len(FEW_ORDERS))
    some = everywhere[3:, np.isin(ORDERS, FEW_ORDERS)][:, 10:]
    np.testing.assert_allclose(found.rdp(rows, places), some, rtol=1e-12)


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-12])
@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_the_classic_conversion_of_an_example(trace: Trace, delta: float) -> None:
    """rho + log(1 / delta) / (alpha - 1) at the best of all orders, and 0 for one that nothing is learnt of."""
    recorded = RecordedContributions.checked(STEPS, contributions(), trace)
    upper = classic_epsilons(recorded, delta)
    everywhere = at_every_order(recorded)
    expected = np.min(everywhere + np.log(1.0 / delta) / (ORDERS - 1.0), axis=1)
    free = -np.expm1(-everywhere.min(axis=1)) < delta**2
    np.testing.assert_allclose(upper, np.where(free, 0.0, expected), rtol=1e-12)
    assert (upper >= rdp_epsilons(recorded, delta)).all()


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_an_epsilon_is_barely_above_what_the_steps_cost_unspread(trace: Trace) -> None:
    recorded = RecordedContributions.checked(STEPS, contributions(20), trace)
    upper = rdp_epsilons(recorded, 1e-5)
    for row, values in enumerate(recorded.values):
        costs = recorded.of(np.array([row])).costs(spread_linearly)
        exact = costs.precision[0] * 0.5 * ORDERS + sum(pure_rdp(epsilon, ORDERS) for epsilon in costs.pure)
        for segment in trace.segments:
            if segment.sampling.sample_rate < 1.0:
                side = sum(query.noise_multiplier**-2 for query in segment.side_queries)
                for step in range(segment.start_step, segment.stop_step):
                    own = values[np.searchsorted(STEPS, step, side="right") - 1]
                    u = (own / segment.noise_multiplier) ** 2 + side
                    exact = exact + (sampled_gaussian_rdp(segment.sampling.sample_rate, u**-0.5) if u > 0.0 else 0.0)
        unspread = epsilon_improved(exact, 1e-5)
        assert unspread <= upper[row] * (1 + 1e-9)
        assert upper[row] <= unspread * 1.04 + 1e-4  # 1.032 across a phase transition between two nodes


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_spreading_keeps_the_steps_and_what_they_cost_together(trace: Trace) -> None:
    recorded = RecordedContributions.checked(STEPS, contributions(), trace)
    spread = recorded.costs(spread_linearly)
    assert (spread.steps.weights > 0.0).all()
    for part, weights in zip(spread.sampled, weights_of(spread), strict=True):
        assert isinstance(part.law, StepLaw)
        steps, precision = 0, np.zeros(len(recorded.values))
        for segment in (segment for segment in trace.segments if segment.sampling.sample_rate == part.law.sample_rate):
            side = sum(query.noise_multiplier**-2 for query in segment.side_queries)
            for step in range(segment.start_step, segment.stop_step):
                own = recorded.values[:, np.searchsorted(STEPS, step, side="right") - 1]
                precision += (own / segment.noise_multiplier) ** 2 + side
            steps += segment.steps
        np.testing.assert_allclose(weights.sum(axis=1), steps, rtol=1e-13)
        np.testing.assert_allclose(weights @ part.precisions, precision, rtol=1e-12)


@pytest.mark.parametrize("terms", [improved_terms, classic_terms])
@pytest.mark.parametrize("delta", [1e-2, 1e-12])
@pytest.mark.parametrize(("sample_rate", "sigma"), [(0.001, 0.6), (0.1, 1.0), (0.02, 8.0), (0.5, 0.3)])
def test_over_orders_the_sum_falls_then_rises(
    sample_rate: float, sigma: float, delta: float, terms: Callable[[float], Array]
) -> None:
    for steps in (1, 100, 100_000):
        values = steps * sampled_gaussian_rdp(sample_rate, sigma) + terms(delta)
        rises = np.diff(values) > 1e-8 * np.abs(values[:-1])
        falls = np.diff(values) < -1e-8 * np.abs(values[:-1])
        assert not falls[np.argmax(rises) :].any() or not rises.any()
