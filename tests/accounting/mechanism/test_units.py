"""Epsilons per user: rows of a user as a group, against brute force and against Google's dp-accounting."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant

from dpsweep.accounting import (
    ExponentialChoice,
    account,
    account_choice,
    account_selection,
    calibrate_noise_multiplier,
    epsilon_of_examples,
    group_epsilons,
    individual_epsilons,
    privacy_curve,
)
from dpsweep.accounting.accountants.joint_cost import account_together
from dpsweep.accounting.calibration.so_far import cost_so_far
from dpsweep.accounting.errors import DpsweepError, UnsupportedMechanism
from dpsweep.accounting.mechanism.filters import RenyiFilter
from dpsweep.accounting.mechanism.random_trials import RandomTrials
from dpsweep.accounting.mechanism.samplings import FixedBatchSampling, PoissonSampling, ShuffledSampling
from dpsweep.accounting.mechanism.trace import GaussianRelease, Segment, Trace
from dpsweep.accounting.mechanism.units import EXAMPLE, User
from dpsweep.accounting.records.traces import read_trace, write_trace

DELTA = 1e-5


def run(rows: int = 4, sigma: float = 2.0, steps: int = 40, rate: float = 0.05) -> Trace:
    return Trace(1000, (Segment(0, steps, PoissonSampling(rate), sigma),), unit=User(rows))


def in_rows(trace: Trace) -> Trace:
    return replace(trace, unit=EXAMPLE)


@pytest.mark.parametrize(
    ("rows", "grid", "near"), [(3, 0.02, 0.03), *(pytest.param(k, 1e-3, 5e-3, marks=pytest.mark.long) for k in (1, 6))]
)
def test_a_user_costs_what_mixtures_of_gaussians_cost(rows: int, grid: float, near: float) -> None:
    trace = run(rows)
    members = np.arange(rows + 1)
    event = MixtureOfGaussiansDpEvent(2.0, members.tolist(), scipy.stats.binom.pmf(members, rows, 0.05))
    theirs = PLDAccountant(value_discretization_interval=grid)
    theirs.compose(SelfComposedDpEvent(event, 40))
    ours = account(trace, DELTA)
    assert (ours.unit, ours.group_size, ours.kind, ours.adjacency) == ("user", 1, "guarantee", "add_remove")
    assert ours.lower_epsilon is not None
    assert ours.lower_epsilon <= theirs.get_epsilon(DELTA) * (1.0 + 1e-9)
    assert ours.epsilon == pytest.approx(theirs.get_epsilon(DELTA), rel=near)
    assert ours.epsilon == account(in_rows(trace), DELTA, group_size=rows).epsilon


def test_no_tiny_population_loses_more_than_its_epsilon_per_user() -> None:
    rng = np.random.default_rng(0)
    sigma, rate, most = 0.8, 0.4, 3
    curve = privacy_curve(run(most, sigma, 1, rate))
    grid = np.linspace(-14.0, 14.0, 8001)
    closest = 0.0
    for case in range(12):
        users = int(rng.integers(1, most + 1))
        own: npt.NDArray[np.float64] = np.ones(most) if case == 0 else rng.uniform(-1.0, 1.0, users)
        others = np.zeros(0) if case == 0 else rng.uniform(-1.0, 1.0, int(rng.integers(0, 4)))
        with_user, without = _density([*own, *others], rate, sigma, grid), _density(others, rate, sigma, grid)
        for epsilon in (0.0, 0.5, 1.5, 3.0):
            for first, second in ((with_user, without), (without, with_user)):
                lost = float(np.trapezoid(np.maximum(first - math.exp(epsilon) * second, 0.0), grid))
                assert lost <= curve.delta(epsilon).upper + 1e-6
                closest = max(closest, lost / curve.delta(epsilon).upper)
    assert closest > 0.999, "the worst user attains the bound"


def _density(rows: object, rate: float, sigma: float, grid: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Density of the noisy sum of a Poisson batch, by enumerating all subsets of ``rows``."""
    values, total = np.asarray(rows, dtype=float), np.zeros_like(grid)
    for chosen in itertools.product((0, 1), repeat=len(values)):
        joined = np.array(chosen, dtype=float)
        weight = rate ** joined.sum() * (1.0 - rate) ** (len(values) - joined.sum())
        total += weight * scipy.stats.norm.pdf(grid, float(joined @ values), sigma)
    return total


def test_releases_on_all_rows_count_once_for_each_row_of_a_user() -> None:
    released = Trace(1000, (), (GaussianRelease("scale", 8.0),), unit=User(4))
    alone = Trace(1000, (), (GaussianRelease("scale", 2.0),))
    assert account(released, DELTA).epsilon == pytest.approx(account(alone, DELTA).epsilon, rel=1e-6)


def test_runs_with_other_numbers_of_rows_cost_together_what_their_groups_cost() -> None:
    few, many, users = run(1), run(4), run(1, 3.0)
    together = account_together([few, many, users], DELTA)
    assert together.unit == "user"
    assert together.epsilon > max(account(each, DELTA).epsilon for each in (few, many, users))
    sized = account_together([in_rows(many)] * 2, DELTA, group_size=4)
    assert account_together([many, many], DELTA).epsilon == pytest.approx(sized.epsilon, rel=1e-9)
    with pytest.raises(UnsupportedMechanism, match="different units, example and user"):
        account_together([few, in_rows(many)], DELTA)


def test_users_of_a_known_graph_cost_the_same_mixtures_and_say_so(tmp_path: Path) -> None:
    known = replace(run(3), adjacency="fixed_graph")
    members = np.arange(4)
    event = MixtureOfGaussiansDpEvent(2.0, members.tolist(), scipy.stats.binom.pmf(members, 3, 0.05))
    theirs = PLDAccountant(value_discretization_interval=0.02)
    theirs.compose(SelfComposedDpEvent(event, 40))
    ours = account(known, DELTA)
    assert (ours.unit, ours.kind, ours.adjacency) == ("user", "guarantee", "fixed_graph")
    assert ours.epsilon == pytest.approx(theirs.get_epsilon(DELTA), rel=0.03)
    assert ours == replace(account(run(3), DELTA), adjacency="fixed_graph")
    assert account(known, DELTA, group_size=2).adjacency == privacy_curve(known).adjacency == "fixed_graph"
    write_trace(str(tmp_path / "trace.arrow"), known)
    assert read_trace(str(tmp_path / "trace.arrow")) == known
    together = account_together([known, known], DELTA)
    assert (together.adjacency, together.epsilon) == ("fixed_graph", account_together([run(3)] * 2, DELTA).epsilon)
    with pytest.raises(UnsupportedMechanism, match="may own other records in each"):
        account_together([known, run(3)], DELTA)
    with pytest.raises(UnsupportedMechanism, match="an adjacency of users, who own records"):
        in_rows(known)


def test_calibration_and_prefixes_hold_for_users() -> None:
    sigma = calibrate_noise_multiplier(lambda s: run(4, s), 3.0, DELTA, "auto")
    assert 2.98 < account(run(4, sigma), DELTA).epsilon <= 3.0
    assert account(in_rows(run(4, sigma)), DELTA).epsilon < 2.0
    trace = run(4, sigma)
    whole = account(trace, DELTA)
    assert cost_so_far(trace, (20, 40), 20, whole) < cost_so_far(trace, (20, 40), 40, whole) == whole.epsilon


def test_what_accounts_for_rows_refuses_users() -> None:
    trace = run(1)
    with pytest.raises(UnsupportedMechanism, match="protects users"):
        group_epsilons(trace, DELTA, [1])
    with pytest.raises(UnsupportedMechanism, match="protects users"):
        epsilon_of_examples(trace, [0], [[1.0]], DELTA)
    with pytest.raises(UnsupportedMechanism, match="protects users"):
        individual_epsilons([0], [[1.0]], trace, DELTA)
    with pytest.raises(UnsupportedMechanism, match="protects users"):
        account_selection(trace, RandomTrials(5.0), DELTA)
    with pytest.raises(UnsupportedMechanism, match="protects users"):
        account_choice(trace, ExponentialChoice(candidates=4, epsilon=1.0), DELTA)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"segments": (Segment(0, 5, ShuffledSampling(10), 1.0),), "adjacency": "zero_out"}, "zero_out"),
        ({"segments": (Segment(0, 5, FixedBatchSampling(1000, 10), 1.0),)}, "[Ff]ixed"),
        ({"filter": RenyiFilter(1.0, 2)}, "a filter"),
        ({"selection": RandomTrials(2.0)}, "a private selection"),
    ],
)
def test_no_user_is_accounted_for_without_proof(change: dict[str, Any], words: str) -> None:
    with pytest.raises(DpsweepError, match=words):
        replace(run(2), **change)


def test_a_stored_trace_keeps_its_unit(tmp_path: Path) -> None:
    path = str(tmp_path / "trace.arrow")
    for trace in (run(3), in_rows(run(3))):
        write_trace(path, trace)
        assert read_trace(path) == trace
