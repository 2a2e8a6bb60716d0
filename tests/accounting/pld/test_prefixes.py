"""Upper bounds of growing runs on one lattice: never below the certified lower bound of each, and close to its own."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from dpsweep.accounting.mechanism.samplings import (
    FixedBatchSampling,
    PoissonSampling,
    RandomAllocationSampling,
    SizedSampling,
    TruncatedPoissonSampling,
)
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, Trace
from dpsweep.accounting.pld import epsilon_of_rounds, epsilon_pld, rounds_of_group, upper_of_prefixes
from tests.known import known


def run(rate: float, noises: list[float], steps: int) -> Trace:
    return Trace(
        1000, segments=tuple(Segment(at * steps, steps, PoissonSampling(rate), each) for at, each in enumerate(noises))
    )


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
@pytest.mark.parametrize(
    ("rate", "noises"),
    [
        (0.05, [1.0] * 8),
        (0.3, [2.0, 4.0, 1.0, 3.0, 0.8, 2.0, 2.0, 5.0]),
        (0.002, [0.6 * 0.9**at for at in range(8)]),
        (0.01, [5.0, 0.4, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]),
        (0.9, [6.0] * 8),
    ],
    ids=["one level", "up and down", "falling", "one strong step", "nearly all"],
)
def test_each_bound_is_above_the_certified_lower_one(
    rate: float, noises: list[float], delta: float, group: int
) -> None:
    trace = run(rate, noises, 25)
    places = range(25, 201, 25)
    found = upper_of_prefixes([rounds_of_group(trace.until(step), group) for step in places], delta, 4e-3)
    for step, upper in zip(places, found, strict=True):
        exact = epsilon_pld(trace.until(step), delta, group)
        assert upper >= known(exact.lower)
        assert math.isinf(upper) or upper == pytest.approx(exact.upper, rel=0.05, abs=0.02)
    assert all(later >= earlier for earlier, later in itertools.pairwise(found))


def test_samplings_with_rounds_of_one_law_all_count() -> None:
    fixed, poisson = Segment(0, 100, FixedBatchSampling(8, 4), 4.0), Segment(100, 300, PoissonSampling(0.5), 2.0)
    runs = [rounds_of_group(Trace(8, segments=segments)) for segments in ((fixed,), (fixed, poisson))]
    alike = rounds_of_group(Trace(8, segments=(replace(poisson, start_step=0, steps=400),)))
    assert runs[1].laws == alike.laws
    assert upper_of_prefixes(runs, 1e-5, 4e-3)[1] >= epsilon_of_rounds(alike, 1e-5).lower


@pytest.mark.parametrize("noises", [[2.0] * 8, [2.0 * 0.99**at for at in range(80)]], ids=["one level", "eighty"])
def test_blocks_of_random_allocation_are_bounded_from_above_on_coarse_grids(noises: list[float]) -> None:
    sampling = RandomAllocationSampling(6)
    trace = Trace(1000, segments=tuple(Segment(6 * at, 6, sampling, each) for at, each in enumerate(noises)))
    places = [6 * len(noises) * part // 4 for part in (1, 2, 3, 4)]
    found = upper_of_prefixes([rounds_of_group(trace.until(step), 1) for step in places], 1e-5, 4e-3)
    for step, upper in list(zip(places, found, strict=True))[:1]:
        exact = epsilon_pld(trace.until(step), 1e-5)
        assert known(exact.lower) <= upper == pytest.approx(exact.upper, rel=0.01)
    assert all(later > earlier for earlier, later in itertools.pairwise(found))


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    "sampling",
    [PoissonSampling(0.02), TruncatedPoissonSampling(1000, 0.02, 28), FixedBatchSampling(1000, 20)],
    ids=lambda sampling: type(sampling).__name__,
)
def test_a_level_for_every_step_is_bounded_closely_at_the_end_and_less_so_early_on(
    sampling: SizedSampling, group: int
) -> None:
    trace = Trace(1000, segments=tuple(Segment(at, 1, sampling, 3.0 * 0.99**at) for at in range(120)))
    found = upper_of_prefixes([rounds_of_group(trace.until(step), group) for step in (30, 60, 120)], 1e-5, 4e-3)
    for step, upper, near in zip((30, 60, 120), found, (0.07, 0.03, 0.003), strict=True):
        exact = epsilon_of_rounds(rounds_of_group(trace.until(step), group), 1e-5, 1e-3)
        assert exact.lower <= upper == pytest.approx(exact.upper, rel=near)


def test_plain_gaussians_between_sampled_steps_are_composed_where_they_stand() -> None:
    sampled, full = PoissonSampling(0.1), PoissonSampling(1.0)
    trace = Trace(1000, tuple(Segment(4 * at, 4, full if at % 2 else sampled, 9.0) for at in range(6)))
    found = upper_of_prefixes([rounds_of_group(trace.until(step), 1) for step in (4, 8, 12, 24)], 1e-5, 4e-3)
    for step, upper in zip((4, 8, 12, 24), found, strict=True):
        exact = epsilon_pld(trace.until(step), 1e-5)
        assert known(exact.lower) <= upper == pytest.approx(exact.upper, rel=0.01, abs=0.005)


def test_releases_are_part_of_each_run_and_other_rounds_are_not_bounded_here() -> None:
    trace = replace(run(0.1, [1.0, 1.2], 10), releases=(GaussianRelease("counts", 6.0), PureRelease("choice", 0.5)))
    (upper, whole) = upper_of_prefixes([rounds_of_group(trace.until(step), 1) for step in (10, 20)], 1e-5, 4e-3)
    for found, step in ((upper, 10), (whole, 20)):
        exact = epsilon_pld(trace.until(step), 1e-5)
        assert known(exact.lower) <= found == pytest.approx(exact.upper, rel=0.02)
    full = Trace(1000, (Segment(0, 9, PoissonSampling(1.0), 5.0),))
    assert upper_of_prefixes([rounds_of_group(full, 1)], 1e-5, 4e-3) == [math.inf]
