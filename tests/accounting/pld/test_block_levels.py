"""Blocks of random allocation between nodes: bounds against quadrature, and against laws of each level."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from dpsweep.accounting.mechanism.samplings import RandomAllocationSampling
from dpsweep.accounting.mechanism.trace import Segment, SideQuery, Trace
from dpsweep.accounting.pld import AllocatedRound, block_laws, block_levels, epsilon_pld
from dpsweep.accounting.pld.allocation import ROUNDING, law_of_block, losses_of, on_lattice
from dpsweep.accounting.pld.allocation_transform import EvenLaw
from dpsweep.accounting.pld.block_kernels import absorb
from dpsweep.accounting.pld.block_levels import Beside, drawn
from dpsweep.accounting.pld.group_rounds import GroupRounds
from dpsweep.accounting.pld.levels import coordinate
from dpsweep.accounting.pld.loss import DIRECTIONS, Bound, Direction
from dpsweep.accounting.pld.saddlepoint import cumulants
from tests.accounting.pld.test_allocation import delta_of_two_steps
from tests.known import known

Array = NDArray[np.float64]


def hockey_sticks(losses: Array, masses: Array, epsilons: Array) -> Array:
    return np.asarray(-np.expm1(np.minimum(epsilons[:, None] - losses, 0.0)) @ masses)


@pytest.mark.parametrize("seed", range(8))
def test_what_absorbs_negative_masses_lowers_every_hockey_stick(seed: int) -> None:
    random, spacing = np.random.default_rng(seed), 0.1
    signed = random.normal(0.3, 1.0, 60) * (random.random(60) < 0.8)
    signed[-1] = -1.0 if seed % 2 else 1.0
    found, left = signed.copy(), np.zeros(60)
    absorb(found, np.exp(-spacing * np.arange(60)), left)
    losses = np.asarray(spacing * np.arange(60), dtype=np.float64)
    epsilons = np.asarray(spacing * np.arange(-5.0, 62.0, 0.5), dtype=np.float64)
    assert (found >= 0.0).all()
    assert (left.sum() > 0.0) == (seed % 2 == 1)
    below = hockey_sticks(losses, found, epsilons) - hockey_sticks(losses, left, epsilons)
    assert (below <= hockey_sticks(losses, signed, epsilons) + 1e-12).all()
    assert found.sum() - left.sum() == pytest.approx(signed.sum())


def law(shift: float, direction: Direction, bound: Bound) -> EvenLaw:
    return law_of_block(AllocatedRound(shift, 2), direction, 1e-14, bound, 2.0, heavy=0.0)


@pytest.mark.parametrize("spacing", [0.002, 0.01, 0.4])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_level_between_nodes_agrees_with_quadrature(direction: Direction, share: float, spacing: float) -> None:
    """Both sides of two steps whose shift lies between the middle two of four nodes."""
    nodes = np.array([0.8, 0.83, 0.86, 0.89])
    shift = 0.83 + share * 0.03
    places, (place,) = coordinate(nodes, 0.8), coordinate(np.array([shift]), 0.8)
    first = (place - places[1]) / (places[2] - places[1])
    fine = min(spacing, 0.01)
    weaker, stronger = (on_lattice(law(each, direction, "upper"), fine, direction, "upper") for each in (0.83, 0.86))
    upper = drawn(weaker, stronger, first)
    epsilons = np.array([0.1, 0.3, 0.6])
    exact = np.array([delta_of_two_steps(shift, each, adding=direction is Direction.ADD) for each in epsilons.tolist()])
    found = hockey_sticks(upper.losses, upper.probabilities, epsilons) + upper.infinity_mass
    assert (found >= exact * (1.0 - 1e-9)).all()
    np.testing.assert_allclose(found, exact, rtol=3e-3)
    for nearer, farther, distance in (
        (0.83, 0.8, (place - places[1]) / (places[1] - places[0])),
        (0.86, 0.89, (places[2] - place) / (places[3] - places[2])),
    ):
        pair = Beside.of(law(nearer, direction, "lower"), law(farther, direction, "upper"), direction)
        masses, left = pair.beyond(distance)
        lower = pair.lowered(masses, distance, spacing)
        assert (masses >= 0.0).all()
        assert left.sum() < 1e-5
        missing = left.sum() + lower.infinity_mass
        for losses, kept in ((pair.losses, masses), (lower.losses, lower.probabilities)):
            below = hockey_sticks(losses, kept, epsilons)
            assert (below - missing <= exact * (1.0 + 1e-9)).all()
            if spacing < 0.1:
                np.testing.assert_allclose(below, exact, rtol=1e-2)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("spacing", [1e-4, 1e-3, 0.02, 0.5])
def test_a_law_on_points_far_from_or_near_to_each_other_stays_below(direction: Direction, spacing: float) -> None:
    """Lattices with many points between atoms, and with one point for nearly all of them."""
    of_block = law_of_block(AllocatedRound(0.1, 20), direction, 1e-14, "lower", 2.0, heavy=0.0)
    losses, masses, _, _ = losses_of(of_block, direction)
    lower = on_lattice(of_block, spacing, direction, "lower")
    epsilons = np.linspace(-0.2, 0.2, 401)
    exact, found = hockey_sticks(losses, masses, epsilons), hockey_sticks(lower.losses, lower.probabilities, epsilons)
    assert (found <= exact + 1e-13).all()
    assert lower.probabilities.sum() == pytest.approx(masses.sum(), abs=2.0 * ROUNDING)
    if spacing < 0.01:
        np.testing.assert_allclose(found[epsilons < 0.02], exact[epsilons < 0.02], rtol=5e-3)


@pytest.mark.parametrize(("first", "last"), [(9.0, 8.0), (0.63, 0.6)])
def test_nodes_give_bounds_like_those_of_all_levels(first: float, last: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks an epoch, a side query on each batch, and an unfinished end."""
    count, sampling = 60, RandomAllocationSampling(8, 2)
    noise = np.geomspace(first, last, count).tolist()
    sides = (SideQuery("counts", 30.0),)
    run = Trace(1000, tuple(Segment(8 * at, 8, sampling, each, sides) for at, each in enumerate(noise)))
    nodes: list[int] = []
    original = block_levels.between_nodes

    def counted(*asked: object) -> object:
        found = original(*asked)  # type: ignore[arg-type]
        nodes.append(len({node for level in found.values() for node in level.nodes}))
        return found

    monkeypatch.setattr(block_laws, "between_nodes", counted)
    with_nodes, cut = epsilon_pld(run, 1e-6), epsilon_pld(run.until(8 * count - 1), 1e-6)
    assert all(0 < each < count - 8 for each in nodes)
    monkeypatch.setattr(block_levels, "_FEWEST", math.inf)
    alone = epsilon_pld(run, 1e-6)
    assert known(with_nodes.lower) <= alone.upper <= with_nodes.upper * (1.0 + 1e-4)
    assert known(alone.lower) <= with_nodes.upper <= known(with_nodes.lower) * 1.0004
    assert known(with_nodes.lower) <= known(alone.lower) * (1.0 + 1e-4)
    assert (cut.upper, cut.lower) == (with_nodes.upper, None)


def test_few_strong_levels_among_many_weak_ones_weigh_in_what_bounds_are_chosen_by() -> None:
    levels = tuple((AllocatedRound(1.0 / noise, 10), 1) for noise in np.linspace(20.0, 0.3, 150).tolist())
    few = cumulants(GroupRounds(allocated=levels), Direction.REMOVE, 1e-14)
    alone = [cumulants(GroupRounds(allocated=(level,)), Direction.REMOVE, 1e-14) for level in levels]
    assert len(few.rounds) <= 33
    assert few.counts.sum() == 150
    for tilt in (0.2, 1.0):
        assert few(tilt)[0] == pytest.approx(sum(each(tilt)[0] for each in alone), rel=0.05)


@pytest.mark.parametrize("steps", [2, 100])
def test_bounds_of_very_different_levels_are_close(steps: int) -> None:
    """Most levels are much narrower than the lattice, and few of them decide."""
    noise = np.linspace(20.0, 0.4, 110).tolist()
    sampling = RandomAllocationSampling(steps)
    levels = tuple(Segment(steps * at, steps, sampling, each) for at, each in enumerate(noise))
    found = epsilon_pld(Trace(1000, levels), 1e-6)
    assert known(found.lower) < found.upper < known(found.lower) * 1.0003


def test_levels_whose_largest_losses_mislead_the_saddle_point_have_close_bounds() -> None:
    """Moments at its tilt are those of losses that hardly add to delta, and led to too few nodes: 5e-4."""
    noise = np.linspace(0.7646, 5.485, 100).tolist()
    segments = tuple(Segment(2000 * at, 2000, RandomAllocationSampling(2000), each) for at, each in enumerate(noise))
    found = epsilon_pld(Trace(10**6, segments), 1e-6)
    assert found.upper <= known(found.lower) * 1.0003


def test_epsilons_whose_exponential_is_no_double_have_close_bounds() -> None:
    noise = np.linspace(0.6, 0.3, 520).tolist()
    segments = tuple(Segment(10 * at, 10, RandomAllocationSampling(10), each) for at, each in enumerate(noise))
    found = epsilon_pld(Trace(10**6, segments), 1e-6)
    assert math.log(sys.float_info.max) < found.upper <= known(found.lower) * 1.0003


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_hockey_sticks_of_a_table_are_its_masses_beyond_epsilon(direction: Direction) -> None:
    table = cumulants(GroupRounds(allocated=((AllocatedRound(1.0, 10), 1),)), direction, 1e-14)
    sticks, rates = table.sticks(0.1)
    masses, losses = np.exp(table.log_weights[0]), table.losses[0]
    over, under = (np.exp(losses), 1.0) if direction is Direction.REMOVE else (1.0, np.exp(losses))
    beyond = over > math.exp(0.1) * under
    assert sticks[0] == pytest.approx(float(np.sum(masses * beyond * (over - math.exp(0.1) * under))), rel=1e-9)
    assert rates[0] == pytest.approx(float(np.sum(masses * beyond * math.exp(0.1) * under)), rel=1e-9)
    assert not np.any(table.sticks(1000.0))
