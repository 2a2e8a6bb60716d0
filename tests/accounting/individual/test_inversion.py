"""Certified bounds of single examples: errors widen them, and aliases never raise the lower one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian

from dpsweep.accounting.individual import inversion, spectrum_kernels
from dpsweep.accounting.individual.contour import Contour
from dpsweep.accounting.individual.contributions import RecordedContributions
from dpsweep.accounting.individual.inversion import Bucket, raise_bounds, tail_places, truncation_bound
from dpsweep.accounting.individual.rdp import renyi_costs
from dpsweep.accounting.individual.spreading import spread_linearly
from dpsweep.accounting.mechanism.trace import GaussianRelease, Trace
from tests.accounting.individual.test_kernels import python_of

DELTA = 1e-5


COSTS = RecordedContributions.checked([0], [[1.0]], Trace(10, (), (GaussianRelease("mean", 1.0),))).costs(
    spread_linearly
)


def bounds(
    period: float, size: int, share: float = 0.0, known: tuple[float, float] = (0.0, 0.0)
) -> tuple[float, float]:
    """Upper and lower epsilon of an example that paid a Gaussian of noise multiplier 1.

    From a contour of this period, with an error that is a share of every term. known: bounds of the other direction.
    """
    contour = Contour(4.4, 2.0 * np.pi / period, size)
    exponent = 0.5 * contour.points * (contour.points - 1.0)
    sums = np.concatenate([exponent.real, exponent.imag, np.full(16, np.log1p(share)), [1e3]])
    cuts = np.array([[float(size)], [truncation_bound(contour, size, 0.0)]])
    renyi, rows = renyi_costs(COSTS, DELTA), np.array([0])
    bucket = Bucket(rows, contour.tilt, period, (), renyi.rdp(rows, tail_places(contour.tilt)))
    found = np.array([[known[0]], [known[1]]])
    raise_bounds(found, bucket, sums[None, :], cuts, contour, 0.0, renyi)
    return float(found[0, 0]), float(found[1, 0])


def test_without_errors_they_meet_at_the_exact_epsilon() -> None:
    upper, lower = bounds(30.0, 64)
    exact = get_epsilon_gaussian(1.0, DELTA)
    assert lower <= exact <= upper
    assert upper == pytest.approx(exact, rel=1e-5)
    assert lower == pytest.approx(exact, rel=1e-3)


@pytest.mark.long
def test_few_evaluations_find_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Much of the time of accounting by pld is spent in these."""
    evaluated: list[float] = []

    def counting(name: str) -> None:
        plain = python_of(getattr(spectrum_kernels, name))

        def counted(*arguments: Any) -> Any:
            evaluated.append(arguments[-1])
            return plain(*arguments)

        monkeypatch.setattr(spectrum_kernels, name, counted)

    counting("_curve")
    counting("_height")
    monkeypatch.setattr(spectrum_kernels, "_search", python_of(spectrum_kernels._search))
    monkeypatch.setattr(inversion, "certified_bounds", python_of(spectrum_kernels.certified_bounds))
    bounds(30.0, 64)
    assert 2 < len(evaluated) <= 6


def test_errors_widen_them() -> None:
    upper, lower = bounds(30.0, 64)
    wider = bounds(30.0, 64, share=1e-3)
    assert wider[0] > upper * (1 + 1e-5)
    assert wider[1] < lower * (1 - 1e-5)


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
    assert bounds(30.0, 64, share=10.0, known=higher)[0] == np.inf
