"""Certified bounds of single examples: errors widen them, and aliases never raise the lower one."""

from __future__ import annotations

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from numpy.typing import NDArray

from accounting.individual import inversion
from accounting.individual.contour import Contour
from accounting.individual.contributions import StepWeights
from accounting.individual.inversion import certified_bounds, unsampled_exponent, upper_kernel
from accounting.individual.rdp import FEW_ORDERS, RenyiCosts
from accounting.renyi import ORDERS, epsilon_improved

DELTA = 1e-5
COSTS = StepWeights((), np.ones(1), ())
"""One example that paid a Gaussian of noise multiplier 1."""


def bounds(
    period: float,
    size: int,
    share_above: float = 0.0,
    share_below: float = 0.0,
    known: tuple[float, float] = (0.0, 0.0),
) -> tuple[float, float]:
    """Upper and lower epsilon from a contour of this period, with errors that are shares of the sum of terms.

    known: bounds of the other direction.
    """
    contour = Contour(4.4, 2.0 * np.pi / period, size)
    terms = np.ascontiguousarray((upper_kernel(contour) * np.exp(unsampled_exponent(COSTS, contour, 0.0))).T)
    size_of_sum = np.abs(terms).sum(axis=0)
    epsilons = epsilon_improved(0.5 * ORDERS[None, :], DELTA)
    renyi = RenyiCosts(0.5 * FEW_ORDERS[None, :], epsilons, np.array([5.0]))
    above, below = (terms, share_above * size_of_sum), (terms, share_below * size_of_sum)
    others = np.array([known[0]]), np.array([known[1]])
    upper, lower = certified_bounds(contour, 0.0, above, below, renyi, DELTA, others)
    return float(upper[0]), float(lower[0])


def test_without_errors_they_meet_at_the_exact_epsilon() -> None:
    upper, lower = bounds(30.0, 64)
    exact = get_epsilon_gaussian(1.0, DELTA)
    assert lower <= exact <= upper
    assert upper == pytest.approx(exact, rel=1e-5)
    assert lower == pytest.approx(exact, rel=1e-3)


def test_few_evaluations_find_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the time of accounting by pld is spent in these."""
    curve, evaluated = inversion._Curve.__call__, []

    def counted(self: inversion._Curve, epsilons: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
        evaluated.append(len(epsilons))
        return curve(self, epsilons)

    monkeypatch.setattr(inversion._Curve, "__call__", counted)
    bounds(30.0, 64)
    assert 2 < len(evaluated) <= 7


def test_errors_widen_them() -> None:
    upper, lower = bounds(30.0, 64)
    assert bounds(30.0, 64, share_above=1e-3)[0] > upper * (1 + 1e-5)
    assert bounds(30.0, 64, share_below=1e-3)[1] < lower * (1 - 1e-5)


@pytest.mark.parametrize("period", [2.0, 3.0, 4.0, 6.0])
def test_aliases_of_a_short_period_raise_the_upper_bound_alone(period: float) -> None:
    upper, lower = bounds(period, 64)
    exact = get_epsilon_gaussian(1.0, DELTA)
    assert lower <= exact <= upper


def test_the_worse_direction_counts() -> None:
    """Whether its bounds are known already, or those of the other one are lower, loose, or missing."""
    own = bounds(30.0, 64)
    higher, lower = (own[0] * 1.01, own[1] * 1.01), (own[0] * 0.99, own[1] * 0.99)
    assert bounds(30.0, 64, known=higher) == higher
    assert bounds(30.0, 64, known=lower) == own
    assert bounds(30.0, 64, known=(higher[0], 0.0)) == (higher[0], own[1])
    assert bounds(30.0, 64, known=(np.inf, 0.0)) == (np.inf, own[1])
    assert bounds(30.0, 64, share_above=10.0, known=higher)[0] == np.inf
