"""The search for an example's best order finds what evaluating every order finds; its lower bound holds for all."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from accounting.individual.contributions import RecordedContributions, spread_linearly
from accounting.individual.rdp import rdp_epsilons, renyi_costs
from accounting.mechanism import GaussianRelease, PureRelease, Segment, SideQuery, Trace
from accounting.renyi import ORDERS, epsilon_improved, improved_terms, sampled_gaussian_rdp
from accounting.samplings import PoissonSampling

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


def contributions(rows: int = 60) -> NDArray[np.float64]:
    """Of examples that hardly contribute and of such that always contribute most, too."""
    rng = np.random.default_rng(0)
    values = np.minimum(rng.lognormal(-1.0, 1.5, (rows, 1)) * rng.lognormal(0.0, 0.3, (rows, len(STEPS))), 1.0)
    values[0], values[1], values[2], values[3:6, 1:] = 0.0, 1.0, 1e-6, 0.0
    return values


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-12])
@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_few_orders_find_what_all_orders_find(trace: Trace, delta: float) -> None:
    recorded = RecordedContributions.checked(STEPS, contributions(), trace)
    upper, lower = rdp_epsilons(recorded, delta)
    everywhere = renyi_costs(recorded.costs(spread_linearly), delta)
    np.testing.assert_allclose(upper, everywhere.epsilons, rtol=1e-12)
    np.testing.assert_allclose(epsilon_improved(everywhere.rdp, delta), everywhere.epsilons, rtol=0)
    assert (upper >= everywhere.epsilons * (1 - 1e-12)).all()
    assert (lower <= upper).all()


@pytest.mark.parametrize("delta", [1e-2, 1e-12])
@pytest.mark.parametrize(("sample_rate", "sigma"), [(0.001, 0.6), (0.1, 1.0), (0.02, 8.0), (0.5, 0.3)])
def test_over_orders_the_sum_falls_then_rises(sample_rate: float, sigma: float, delta: float) -> None:
    for steps in (1, 100, 100_000):
        values = steps * sampled_gaussian_rdp(sample_rate, sigma) + improved_terms(ORDERS, delta)
        rises = np.diff(values) > 1e-8 * np.abs(values[:-1])
        falls = np.diff(values) < -1e-8 * np.abs(values[:-1])
        assert not falls[np.argmax(rises) :].any() or not rises.any()
