"""Certified bounds against oracles that share no code with them, and what must hold of them whatever they are."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import logsumexp

from dpsweep.accounting.individual import exact_composition
from dpsweep.accounting.individual.contributions import StepWeights
from dpsweep.accounting.individual.epsilons import IndividualEpsilons, individual_epsilons
from dpsweep.accounting.individual.rdp import RenyiCosts
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.numerics.renyi import ORDERS
from tests.known import known

Array = NDArray[np.float64]
DELTA = 1e-6
SNAPSHOTS = (0, 60, 120, 180)
LEVELS = np.array([0.1, 0.25, 0.5, 0.8, 1.0])


def short_trace(sample_rate: float = 0.01, sigma: float = 1.2) -> Trace:
    """Of 240 steps, and of data too large for a lattice for each example."""
    return Trace(10**7, (Segment(0, 240, PoissonSampling(sample_rate), sigma),))


def account(rows: Array, delta: float = DELTA, method: str = "pld", trace: Trace | None = None) -> IndividualEpsilons:
    return individual_epsilons(SNAPSHOTS, rows, trace or short_trace(), delta, method)


def composed(row: Array, pessimistic: bool, sample_rate: float, sigma: float) -> float:
    """Epsilon by dp-accounting, whose lattice rounds every loss up, or down."""
    parts = [
        privacy_loss_distribution.from_gaussian_mechanism(
            sigma / value,
            pessimistic_estimate=pessimistic,
            sampling_prob=sample_rate,
            value_discretization_interval=5e-4,
        ).self_compose(60)
        for value in row.tolist()
    ]
    return float(functools.reduce(lambda one, other: one.compose(other), parts).get_epsilon_for_delta(DELTA))


@pytest.mark.long
def test_rows_of_short_runs_of_large_data_lie_where_dp_accounting_puts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every density of nodes: those of rows that stay loose, too."""
    tried: list[int] = []
    bounds = exact_composition.bounds_of_costs

    def noted(costs: StepWeights, renyi: RenyiCosts, gap: float) -> object:
        tried.append(len(costs.sampled[0].precisions))
        return bounds(costs, renyi, gap)

    monkeypatch.setattr(exact_composition, "bounds_of_costs", noted)
    rows = np.random.default_rng(0).choice(LEVELS, (40, 4))
    found = account(rows, trace=short_trace(0.003, 0.7))
    assert [exact_composition._DENSITIES[0] * nodes // tried[0] for nodes in tried] == list(
        exact_composition._DENSITIES
    )
    for row, upper, lower in zip(rows[:3], found.upper[:3], known(found.lower)[:3], strict=True):
        optimistic, pessimistic = (composed(row, side, 0.003, 0.7) for side in (False, True))
        assert lower <= pessimistic
        assert optimistic <= upper <= 1.1 * pessimistic


def renyi(sample_rate: float, sigma: float, order: float) -> float:
    """log E_Q[(P/Q)^order] / (order - 1) of one step by quadrature on a fine grid, as it is defined."""
    x = np.linspace(-14.0 * sigma, order + 14.0 * sigma, 20_001 + 200 * int(order))
    log_ratio = np.logaddexp(np.log1p(-sample_rate), np.log(sample_rate) + (2.0 * x - 1.0) / (2.0 * sigma**2))
    log_density = -0.5 * (x / sigma) ** 2 + np.log((x[1] - x[0]) / (sigma * np.sqrt(2.0 * np.pi)))
    return float(logsumexp(order * log_ratio + log_density) / (order - 1.0))


def improved(order: Array, delta: float) -> Array:
    """Canonne, Kamath and Steinke 2020, Proposition 12."""
    return np.asarray(np.log1p(-1.0 / order) - (np.log(delta) + np.log(order)) / (order - 1.0))


def classic(order: Array, delta: float) -> Array:
    """Mironov 2017, Proposition 3."""
    return np.asarray(np.log(1.0 / delta) / (order - 1.0))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("method", "conversion"), [("rdp", improved), ("rdp-classic", classic)])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
def test_the_best_order_is_that_of_all_orders_by_quadrature(
    method: str, conversion: Callable[[Array, float], Array], delta: float
) -> None:
    """Among them orders near a phase transition, where RDP bends sharply."""
    orders = ORDERS[ORDERS <= 128.0]
    costs = {level: np.array([renyi(0.01, 1.2 / level, order) for order in orders.tolist()]) for level in LEVELS}
    rows = np.random.default_rng(3).choice(LEVELS, (12, 4))
    found = account(rows, delta, method)
    for row, upper in zip(rows, found.upper, strict=True):
        exact = float(np.min(60.0 * sum(costs[level] for level in row) + conversion(orders, delta)))
        assert exact <= upper * (1.0 + 1e-8)
        assert upper <= 1.005 * exact


rows_of_levels = st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4)


@pytest.mark.long
@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["rdp", "rdp-classic", "pld"])
@given(row=rows_of_levels, sample_rate=st.floats(0.002, 0.1), sigma=st.floats(0.7, 4.0), delta=st.floats(1e-9, 1e-3))
@settings(max_examples=8, deadline=None)
def test_a_larger_delta_costs_no_more(
    method: str, row: list[float], sample_rate: float, sigma: float, delta: float
) -> None:
    trace = short_trace(sample_rate, sigma)
    small, large = (account(np.array([row]), each, method, trace) for each in (delta, 2.0 * delta))
    if method == "pld":
        assert (known(large.lower) <= small.upper).all()
    else:
        assert (large.upper <= small.upper).all()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["rdp", "rdp-classic", "pld"])
@given(row=rows_of_levels, growth=st.floats(0.0, 0.3), sample_rate=st.floats(0.002, 0.1), sigma=st.floats(0.7, 4.0))
@settings(max_examples=8, deadline=None)
def test_larger_norms_cost_no_less(
    method: str, row: list[float], growth: float, sample_rate: float, sigma: float
) -> None:
    smaller = np.array([row])
    rows = np.vstack([smaller, np.minimum(smaller + growth, 1.0)])
    found = account(rows, method=method, trace=short_trace(sample_rate, sigma))
    if method == "pld":
        assert known(found.lower)[0] <= found.upper[1]
    else:
        assert found.upper[0] <= found.upper[1] * (1.0 + 1e-9)
