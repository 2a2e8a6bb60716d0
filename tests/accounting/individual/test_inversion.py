"""Certified bounds of single examples: errors widen them, and aliases never raise the lower one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian

from accounting.individual import inversion, spectrum_kernels
from accounting.individual.contour import Contour
from accounting.individual.inversion import Terms, raise_bounds, upper_kernel
from accounting.individual.rdp import FEW_ORDERS, RenyiCosts
from accounting.renyi import ORDERS, epsilon_improved
from tests.accounting.individual.test_kernels import python_of

DELTA = 1e-5


def bounds(
    period: float,
    size: int,
    share_above: float = 0.0,
    share_below: float = 0.0,
    known: tuple[float, float] = (0.0, 0.0),
) -> tuple[float, float]:
    """Upper and lower epsilon of an example that paid a Gaussian of noise multiplier 1.

    From a contour of this period, with errors that are shares of the sum of terms. known: bounds of the other
    direction.
    """
    contour = Contour(4.4, 2.0 * np.pi / period, size)
    z = contour.points
    terms = upper_kernel(contour) * np.exp(0.5 * z * (z - 1.0))
    values, size_of_sum = np.concatenate([terms.real, terms.imag])[None, :], float(np.abs(terms).sum())
    above, below = (
        Terms(values, np.array([[float(size)], [share * size_of_sum]])) for share in (share_above, share_below)
    )
    renyi = RenyiCosts(
        0.5 * FEW_ORDERS[None, :], epsilon_improved(0.5 * ORDERS[None, :], DELTA), np.array([5.0]), DELTA
    )
    found = np.array([[known[0]], [known[1]]])
    raise_bounds(found, np.array([0]), contour, 0.0, above, below, renyi)
    return float(found[0, 0]), float(found[1, 0])


def test_without_errors_they_meet_at_the_exact_epsilon() -> None:
    upper, lower = bounds(30.0, 64)
    exact = get_epsilon_gaussian(1.0, DELTA)
    assert lower <= exact <= upper
    assert upper == pytest.approx(exact, rel=1e-5)
    assert lower == pytest.approx(exact, rel=1e-3)


def test_few_evaluations_find_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the time of accounting by pld is spent in these."""
    curve, evaluated = python_of(spectrum_kernels._curve), []

    def counted(*arguments: Any) -> tuple[float, float]:
        evaluated.append(arguments[-1])
        found: tuple[float, float] = curve(*arguments)
        return found

    monkeypatch.setattr(spectrum_kernels, "_curve", counted)
    monkeypatch.setattr(spectrum_kernels, "_search", python_of(spectrum_kernels._search))
    monkeypatch.setattr(inversion, "certified_bounds", python_of(spectrum_kernels.certified_bounds))
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
