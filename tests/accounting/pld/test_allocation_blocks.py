"""Sums of ratios on grids of blocks: against exact sums of all pairs, and other ways to form the same sums."""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from dpsweep.accounting.mechanism.samplings import RandomAllocationSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.pld import allocation, epsilon_pld
from dpsweep.accounting.pld.allocation import FINE
from dpsweep.accounting.pld.allocation_blocks import Atoms, sum_of_ratios
from dpsweep.accounting.pld.allocation_transform import law_of_mean
from dpsweep.accounting.pld.block_kernels import add_blocks, add_to_itself, pool
from dpsweep.accounting.pld.loss import BOUNDS, Bound
from tests.known import known

Array = NDArray[np.float64]

HALF: Final = 4
"""Half the points of a block in tests of the kernels."""
SLACK: Final = 1.0 + 1e-12


def calls(values: Array, masses: Array, strikes: Array) -> Array:
    """E[(M - k)+]."""
    return np.asarray(np.maximum(values - strikes[:, None], 0.0) @ masses)


def law(shift: float, steps: int, bound: Bound) -> Atoms:
    return known(sum_of_ratios(shift, steps, 1e-18, bound))


def distances(levels: int) -> Array:
    """Points of a grid on both sides of its centre."""
    above = list(range(2 * HALF + 1))
    for level in range(1, levels):
        above += [2**level * (HALF + each) for each in range(1, HALF + 1)]
    return np.array([-each for each in above[:0:-1]] + above, dtype=np.float64)


@pytest.mark.parametrize("same", [True, False])
def test_tables_of_sums_hold_all_pairs_with_their_means(same: bool) -> None:
    levels, random = 4, np.random.default_rng(3)
    points = distances(levels)
    one, other = random.random((2, len(points)))
    other = one if same else other
    sums, moved = np.zeros((2, levels, 8 * HALF + 8))
    if same:
        add_to_itself(one, len(points) // 2, HALF, sums, moved)
    else:
        add_blocks(one, len(points) // 2, other, len(points) // 2, HALF, sums, moved)
    steps = 2.0 ** np.arange(levels)[:, None]
    places = (np.arange(8 * HALF + 8) - 4 * HALF) * steps
    pairs, weights = np.add.outer(points, points).ravel(), np.multiply.outer(one, other).ravel()
    strikes = np.linspace(-80.0, 80.0, 401)
    exact = calls(pairs, weights, strikes)
    assert sums.sum() == pytest.approx(weights.sum(), rel=1e-13)
    assert (sums * places).sum() == pytest.approx(pairs @ weights, abs=1e-9 * float(weights.sum()))
    assert moved.sum(axis=1) @ steps[:, 0] == pytest.approx(0.0, abs=1e-9 * float(weights.sum()))
    assert (calls(places.ravel(), sums.ravel(), strikes) >= exact * (1.0 - 1e-12)).all()
    there = sums > 0.0
    means = places[there] + (moved / np.where(there, sums, 1.0) * steps)[there]
    assert (calls(means, sums[there], strikes) <= exact * SLACK).all()


@pytest.mark.parametrize("seed", range(6))
def test_pools_lie_below_what_they_are_made_of_in_convex_order(seed: int) -> None:
    """Cells with any masses, also none, and means anywhere between the points beside them."""
    random = np.random.default_rng(seed)
    points = np.cumsum(random.choice([1.0, 2.0], 60))
    masses = np.exp(random.normal(0.0, 0.3 * seed, 60)) * (random.random(60) < 0.9)
    offsets = masses * random.uniform(-0.4, 0.4, 60)
    means = points + offsets / np.where(masses > 0.0, masses, 1.0)
    strikes = np.linspace(-1.0, points[-1] + 1.0, 500)
    pooled, left = masses.copy(), offsets.copy()
    pool(pooled, left, np.diff(points), False)
    assert not left.any()
    assert (pooled >= 0.0).all()
    assert (calls(points, pooled, strikes) <= calls(means, masses, strikes) * SLACK).all()
    assert (calls(-points, pooled, -strikes) <= calls(-means, masses, -strikes) * SLACK).all()
    smooth = np.exp(-0.5 * ((points - points[30]) / 8.0) ** 2)
    pooled, left = smooth.copy(), 0.2 * smooth * np.sign(points[30] - points)
    pool(pooled, left, np.diff(points), False)
    assert pooled.sum() == pytest.approx(smooth.sum(), rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_pools_of_mass_that_may_rise_are_at_most_what_they_are_made_of(seed: int) -> None:
    """Functions that are convex and fall are asked for."""
    random = np.random.default_rng(seed)
    points = np.cumsum(random.choice([1.0, 2.0, 20.0], 60))
    masses = np.exp(random.normal(0.0, seed, 60))
    offsets = masses * random.uniform(-0.4, 0.4, 60)
    strikes = np.linspace(-1.0, points[-1] + 1.0, 500)
    pooled, left = masses.copy(), offsets.copy()
    pool(pooled, left, np.diff(points), True)
    assert not left.any()
    assert (pooled >= 0.0).all()
    assert (calls(-points, pooled, -strikes) <= calls(-points - offsets / masses, masses, -strikes) * SLACK).all()
    assert pooled.sum() > 0.9 * masses.sum()


@pytest.mark.parametrize(("shift", "steps"), [(2.0, 40), (1.0, 100), (0.7, 1000)])
def test_bounds_lie_on_both_sides_of_sums_of_pairs(shift: float, steps: int) -> None:
    strikes = np.array([0.5, 1.0, 1.2, 1.5, 2.0])
    above, below = law(shift, steps, "upper"), law(shift, steps, "lower")
    assert above.masses.sum() == pytest.approx(1.0, abs=1e-12)
    assert 1.0 - 1e-6 < below.masses.sum() <= 1.0 + 1e-12
    assert 1.0 - 1e-12 <= (above.masses @ above.values + above.lost) / steps < 1.0 + 1e-9
    upper = calls(above.values / steps, above.masses, strikes) + above.lost / steps
    lower = calls(below.values / steps, below.masses, strikes)
    assert (lower <= upper * SLACK).all()
    for bound in BOUNDS:
        other = allocation._mean_law(shift, steps, 1e-14, bound, FINE)
        value = calls(other.values, other.masses, strikes) + other.lost
        assert ((lower <= value * SLACK) if bound == "upper" else (value <= upper * SLACK)).all()
    np.testing.assert_allclose(upper, lower, rtol=3e-3, atol=1e-9)


@pytest.mark.parametrize(("shift", "steps"), [(2e-4, 2467), (1e-3, 6376), (0.03, 777)])
def test_ratios_near_one_have_their_centre_in_the_middle(shift: float, steps: int) -> None:
    """Grids from 0 on had it aside, or there were none, but for numbers of steps that powers of 2 divide."""
    above, below = law(shift, steps, "upper"), law(shift, steps, "lower")
    width = np.sqrt(np.expm1(shift**2) / steps)
    strikes = 1.0 + width * np.arange(-4.0, 5.0)
    upper = calls(above.values / steps, above.masses, strikes) + above.lost / steps + above.left_out
    lower = calls(below.values / steps, below.masses, strikes)
    assert above.values[0] > 0.5 * steps
    assert 0.0 < above.left_out < 3e-18 * steps
    assert (lower <= upper * SLACK).all()
    np.testing.assert_allclose(upper, lower, rtol=2e-3, atol=1e-15)


@pytest.mark.parametrize("order", [3.0, -2.0])
def test_bounds_lie_on_both_sides_of_one_transform(order: float) -> None:
    strikes = np.array([0.9, 1.0, 1.1])
    for bound, opposite in zip(BOUNDS, BOUNDS[::-1], strict=True):
        blocks, other = law(0.5, 100, bound), known(law_of_mean(0.5, 100, 1e-14, opposite, order))
        found = calls(blocks.values / 100, blocks.masses, strikes) + blocks.lost / 100
        beside = calls(other.values, other.masses, strikes) + other.lost_of_p
        assert ((found >= beside) if bound == "upper" else (found <= beside)).all()
        np.testing.assert_allclose(found, beside, rtol=1e-3)


def test_a_shift_with_too_many_blocks_is_left_to_pairs() -> None:
    assert sum_of_ratios(3.3, 20, 1e-200, "upper") is None
    found = epsilon_pld(Trace(1000, (Segment(0, 20, RandomAllocationSampling(20), 1 / 3.3),)), 1e-190)
    assert found.upper < known(found.lower) * 1.001


def test_different_levels_of_heavy_ratios_have_close_bounds() -> None:
    noise = np.linspace(0.6, 2.4, 12).tolist()
    levels = tuple(Segment(200 * at, 200, RandomAllocationSampling(200), each) for at, each in enumerate(noise))
    found = epsilon_pld(Trace(1000, levels), 1e-6)
    assert known(found.lower) < found.upper < known(found.lower) * 1.0006
