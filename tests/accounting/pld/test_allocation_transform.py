"""The mean of many ratios by a transform: against closed forms, sums without one, and powers in long doubles."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import special

from dpsweep.accounting.mechanism.samplings import RandomAllocationSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.pld import allocation, allocation_transform, epsilon_pld
from dpsweep.accounting.pld.allocation import COARSE, Fineness
from dpsweep.accounting.pld.allocation_transform import EvenLaw, law_of_mean, power_on_a_ring
from dpsweep.accounting.pld.loss import Bound
from tests.known import known

Array = NDArray[np.float64]


def calls(law: EvenLaw, strikes: Array) -> Array:
    """E[(M - k)+], infinite losses included."""
    return np.asarray(np.maximum(law.values - strikes[:, None], 0.0) @ law.masses + law.lost_of_p)


def puts(law: EvenLaw, strikes: Array) -> Array:
    """E[(1 - k M)+], infinite losses included."""
    return np.asarray(np.maximum(1.0 - strikes[:, None] * law.values, 0.0) @ law.masses + law.lost_of_q)


def law(shift: float, steps: int, tail: float, bound: Bound, order: float) -> EvenLaw:
    return known(law_of_mean(shift, steps, tail, bound, order))


@pytest.mark.parametrize("tail", [1e-2, 1e-14])
@pytest.mark.parametrize("shift", [0.01, 0.2, 0.4])
def test_one_ratio_is_bounded_on_both_sides_of_black_and_scholes(
    shift: float, tail: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocation_transform, "_MOST_LOST", np.inf)  # a bound with a large loss is one, too
    strikes = np.exp(shift * np.array([-1.5, -0.3, 0.0, 0.4, 1.0, 2.0]))
    at = shift / 2 - np.log(strikes) / shift
    exact = special.ndtr(at) - strikes * special.ndtr(at - shift)
    upper, lower = (calls(law(shift, 1, tail, bound, 2.0), strikes) for bound in ("upper", "lower"))
    assert (lower <= exact).all()
    assert (exact <= upper).all()
    at = shift / 2 - np.log(strikes) / shift  # Y is below 1 / k where z is below
    exact = special.ndtr(at) - strikes * special.ndtr(at - shift)
    upper, lower = (puts(law(shift, 1, tail, bound, -1.0), strikes) for bound in ("upper", "lower"))
    assert (lower <= exact).all()
    assert (exact <= upper).all()
    if tail < 1e-2:
        np.testing.assert_allclose(upper, lower, rtol=6e-3)


@pytest.mark.parametrize(("shift", "steps", "order"), [(0.5, 6, 9.0), (0.2, 100, 1.0), (0.2, 100, -8.0)])
def test_means_are_on_the_same_side_as_sums_without_a_transform(shift: float, steps: int, order: float) -> None:
    deviation = np.sqrt(np.expm1(shift**2) / steps)
    strikes = 1.0 + deviation * np.arange(0.0, 5.0)
    cost = calls if order > 0 else puts
    above, below = (cost(law(shift, steps, 1e-14, bound, order), strikes) for bound in ("upper", "lower"))
    summed = []
    for bound in ("upper", "lower"):
        other = allocation._mean_law(shift, steps, 1e-14, bound, Fineness(896, 3584, 160))
        summed.append(cost(EvenLaw(other.values, other.masses, other.lost, 0.0), strikes))
    assert (above >= summed[1]).all()
    assert (below <= summed[0]).all()
    np.testing.assert_allclose(above, below, rtol=1e-2)


@pytest.mark.parametrize(("size", "steps"), [(64, 1), (64, 37), (200, 1000)])
def test_a_power_errs_by_less_than_its_bound(size: int, steps: int) -> None:
    masses = np.random.default_rng(steps).random(size // 4)
    masses /= masses.sum()
    found, error = power_on_a_ring(masses, steps, size)
    frequencies = np.exp(-2j * np.pi * np.outer(np.arange(size), np.arange(size)).astype(np.longdouble) / size)
    spectrum = frequencies[:, : len(masses)] @ masses.astype(np.longdouble)
    exact = (frequencies.conj().T @ spectrum**steps).real / size
    assert float(np.abs(found - exact).max()) <= error < 1e-9


def test_grids_that_would_be_long_are_left_to_sums() -> None:
    assert law_of_mean(1.0, 100, 1e-14, "upper", 2.0) is None
    assert law_of_mean(1e-4, 1000, 1e-14, "lower", 2.0) is None


@pytest.mark.parametrize("order", [3.4, -2.4, 10.0])
@pytest.mark.parametrize("shift", [0.3, 0.6, 0.65, 0.68, 0.7])
def test_a_law_that_loses_more_than_the_tail_is_left_to_sums(shift: float, order: float) -> None:
    found = law_of_mean(shift, 6, 1e-14, "upper", order)
    assert found is None or (found.lost_of_p if order > 0 else found.lost_of_q) <= 1e-13
    assert found is not None or shift > 0.5


@pytest.mark.parametrize("order", [2.5, -3.0])
def test_windows_follow_the_tail_so_that_a_law_of_thousands_is_not_left_to_sums(order: float) -> None:
    found = law(1 / 2.2, 100, 1e-19, "upper", order)
    assert (found.lost_of_p if order > 0 else found.lost_of_q) <= 3e-19


def test_levels_on_both_sides_of_the_limit_of_transforms_have_close_bounds() -> None:
    levels = tuple(Segment(6 * at, 6, RandomAllocationSampling(6), each) for at, each in enumerate((2.0, 1.52, 1.47)))
    found = epsilon_pld(Trace(1000, levels), 1e-6)
    assert found.upper <= known(found.lower) * 1.001


def test_many_noise_levels_need_few_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels that hardly differ cost what equally many epochs of one level cost."""
    original = allocation._mean_law
    asked: set[tuple[float, Fineness]] = set()

    def counted(shift: float, steps: int, tail: float, bound: Bound, fineness: Fineness) -> allocation._Law:
        asked.add((shift, fineness))
        return original(shift, steps, tail, bound, fineness)

    monkeypatch.setattr(allocation, "_mean_law", counted)
    sampling = RandomAllocationSampling(50)
    levels = tuple(Segment(50 * each, 50, sampling, 4.0 * (1.0 + 1e-9 * each)) for each in range(60))
    found = epsilon_pld(Trace(1000, levels), 1e-6)
    assert {fineness for _, fineness in asked} == {COARSE}
    assert len(asked) < 2 * 32
    equal = epsilon_pld(Trace(1000, (Segment(0, 3000, sampling, 4.0),)), 1e-6)
    assert found.upper == pytest.approx(equal.upper, rel=2e-4)
    assert known(found.lower) <= equal.upper
    assert known(equal.lower) <= found.upper <= known(found.lower) * 1.0003
