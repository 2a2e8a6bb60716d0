"""Intervals cover the truth and verdicts are seldom wrong, in simulated sweeps whose truth is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from benchmarks.coverage import (
    CASES,
    LOOKS,
    Case,
    at_looks,
    gaps,
    means,
    measure,
    measure_looks,
    measure_others,
    of_each,
    positives,
    private,
    worst_groups,
)
from benchmarks.other_intervals import METHODS, mixed_model
from benchmarks.simulated import Population, drawn, simulated
from dpsweep.orchestration.comparison.extremes import Extreme, corrected, extreme_bounds
from dpsweep.orchestration.comparison.intervals import RunValues, moments
from dpsweep.workers.evaluation.outcomes import Outcomes
from tests.known import known

QUICK = 12
"""Sweeps of each case in the gate: enough to notice an interval that covers half of the time."""


@pytest.mark.parametrize(
    ("case", "least"),
    [
        (Case(Population((300,), ((-2.9,),), 3, positives=3, of_run=0.3), (positives,)), 0.9),
        (Case(Population((30,) * 10, ((1.0,) * 10,), 2), (gaps, worst_groups)), 0.9),
        (Case(Population((300,), ((1.2,),) * 3, 3, of_user=1.5, of_example=0.6, rows=10), (means,)), 0.85),
        (Case(Population((300,), ((1.5,),) * 3, 3, task="regression"), (of_each("r2", Population.accuracy),)), 0.85),
        (
            Case(Population((300,), ((1.5,),) * 3, 3, task="multi_label"), (of_each("micro_f1", Population.accuracy),)),
            0.85,
        ),
    ],
    ids=["three positives", "ten groups", "users", "regression", "many labels"],
)
def test_intervals_cover(case: Case, least: float) -> None:
    assert measure(case, QUICK)["cover"] >= least


def test_one_seed_tells_nothing_apart() -> None:
    case = replace(CASES["one-seed"], population=replace(CASES["one-seed"].population, sizes=(300,)))
    assert measure(case, 3)["false"] == 0.0


def test_the_worst_of_ten_equal_groups_is_corrected_on_average() -> None:
    """By the bias of the lowest of ten, and not at all where one group is far below the others."""
    draw, of, raw, better = np.random.default_rng(0), Extreme("lowest", ("accuracy",)), [], []
    for truth in (np.full(10, 0.7), np.array([0.3, *[0.9] * 9])):
        for _ in range(40):
            value = draw.binomial(60, truth) / 60
            resampled = draw.binomial(60, value, (1, 200, 10)) / 60
            reach = np.tile([0.0, 1.0], (10, 1))
            found = moments(RunValues(value[None], resampled, np.zeros(1, np.int64), np.full(10, 60.0), reach))
            raw.append(value.min() - truth.min())
            better.append(corrected(of, found) - truth.min())
    assert np.mean(raw[:40]) < -0.07
    assert abs(np.mean(better[:40])) < 0.025
    assert abs(np.mean(better[40:])) < 0.025


def test_the_bound_on_the_worst_of_many_groups_allows_for_all_of_them() -> None:
    """Of twenty equal groups; without a correction the lowest bound of a group would be wrong in a third of sweeps."""
    draw, truth, wrong, sweeps = np.random.default_rng(0), np.full(20, 0.7), 0, 200
    for _ in range(sweeps):
        value = draw.binomial(60, truth) / 60
        resampled, reach = draw.binomial(60, value, (1, 200, 20)) / 60, np.tile([0.0, 1.0], (20, 1))
        found = moments(RunValues(value[None], resampled, np.zeros(1, np.int64), np.full(20, 60.0), reach))
        wrong += extreme_bounds(Extreme("lowest", ("accuracy",)), found, 0.025)[1] < 0.7
    assert wrong / sweeps <= 0.06


def test_the_corrected_worst_group_is_no_better_than_the_mean_over_groups() -> None:
    """One test example of a group says nothing, and cannot lift the other group above itself."""
    values, units = np.array([1.0, 0.8]), np.array([1.0, 200.0])
    resampled = np.random.default_rng(0).binomial(200, values, (1, 200, 2)) / 200
    found = moments(RunValues(values[None], resampled, np.zeros(1, np.int64), units, np.tile([0.0, 1.0], (2, 1))))
    assert 0.8 <= corrected(Extreme("lowest", ("accuracy",)), found) < 0.81
    assert corrected(Extreme("highest", ("accuracy",)), found) >= 0.8


def test_a_group_whose_seeds_agree_by_chance_lifts_no_worst_group_above_all_examples() -> None:
    values, units = np.array([[0.965, 0.951, 0.981], [0.941, 0.981, 0.981]]), np.array([25.0, 21.0, 71.0])
    draws = (np.random.default_rng(seed).binomial(60, each, (200, 3)) / 60 for seed, each in enumerate(values))
    found = moments(RunValues(values, np.stack(list(draws)), np.zeros(2, np.int64), units, np.tile([0.0, 1.0], (3, 1))))
    overall = float(values.mean(0) @ units) / units.sum()
    assert corrected(Extreme("lowest", ("accuracy",)), found) <= overall + 1e-12


def test_users_are_resampled_with_all_their_rows() -> None:
    """Rows of a user that are all alike say as much as one row."""
    population = Population((200,), ((0.0,),), 2, of_example=0.0, of_user=8.0, of_run=0.01, of_seed=0.01, rows=20)
    (owned,) = simulated(population, 1)
    interval = known(owned.interval(private(owned)[0], "accuracy"))
    assert interval.high - interval.low > 0.4, "ten users"
    assert all(found.users is not None for found in drawn(population, np.random.default_rng(0)).values())


_WEAK = {
    **{(f"collapse-r{seeds}", "cover"): cover for seeds, cover in ((2, 0.58), (3, 0.40), (5, 0.45))},
    ("collapse-r2", "false"): 0.06,
    ("two-modes-r2", "cover"): 0.85,
    ("two-modes-r2", "false"): 0.11,
}
"""Measured in 240 sweeps each. Few seeds do not show that runs may collapse, or be of another kind."""


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_every_case_covers_and_seldom_errs(name: str) -> None:
    """Within two Monte Carlo standard errors of the level, or of what docs/performance.md says of the weakest laws."""
    sweeps = 120
    found = measure(CASES[name], sweeps)
    error = 2.0 * (0.05 * 0.95 / sweeps) ** 0.5
    for kind, value in found.items():
        if (name, kind) in _WEAK:
            assert abs(value - _WEAK[name, kind]) <= 0.1, (kind, found)
            continue
        if kind == "cover_last":  # few seeds that agree by chance hide a spread of their own; see test_intervals.py
            assert value >= (0.95 - 2.0 * error if CASES[name].population.runs > 3 else 0.8), (kind, found)
        elif kind.startswith("cover"):
            assert value >= 0.95 - error, (kind, found)
        if kind in ("false", "false_front", "reversed"):
            assert value <= 0.05 + error, (kind, found)


def test_every_look_adds_seeds_at_a_stricter_level() -> None:
    """Two equal settings, three seeds at most."""
    population = Population((60,), ((1.7,),) * 2, 3)
    looks = list(at_looks(population, drawn(population, np.random.default_rng(0))))
    assert [len(found.settings[0].trials) for found in looks] == [2, 3]
    assert looks[0].level < looks[1].level


@pytest.mark.long
@pytest.mark.parametrize("name", LOOKS)
def test_verdicts_hold_at_every_look(name: str) -> None:
    sweeps = 60
    found = measure_looks(LOOKS[name], sweeps)
    assert found["false"] <= 0.05 + 2.0 * (0.05 * 0.95 / sweeps) ** 0.5
    assert name != "until-apart" or found["told"] > 0.8


@pytest.mark.long
def test_other_methods_are_measured_on_the_same_sweeps() -> None:
    found = measure_others(replace(CASES["means-r2"].population, runs=3), 2)
    assert set(found) == set(METHODS)
    assert found["paired bootstrap"]["width_difference"] < found["dpsweep"]["width_difference"]
    assert "width_difference" not in found["fairlearn"]


def test_a_mixed_model_of_seeds_alone_has_the_interval_of_student() -> None:
    values = np.add.outer([0.1, 0.2, 0.6], np.random.default_rng(0).normal(0.0, 0.01, 400))
    low, high = mixed_model(values) or (0.0, 0.0)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2.0 * stats.t.isf(0.025, 2) * np.std([0.1, 0.2, 0.6], ddof=1) / 3**0.5, rel=0.01)


def test_runs_of_two_kinds_are_drawn_with_their_mean() -> None:
    """One run in ten is right about nothing."""
    population = Population((50,), ((8.0,),), 400, of_example=0.0, modes=((0.9, 0.0), (0.1, -40.0)))
    assert population.accuracy(0) == pytest.approx(0.9, abs=0.001)
    found = drawn(population, np.random.default_rng(0)).values()
    shares = [float(np.mean(each.predicted == each.labels)) for each in found if isinstance(each, Outcomes)]
    assert {round(share) for share in shares} == {0, 1}
    assert np.mean(shares) == pytest.approx(0.9, abs=0.05)
