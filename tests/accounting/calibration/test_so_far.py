"""Epsilon of the first epochs: that of the run's own accountant, rising to the end, and never below the true one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from dpsweep.accounting import calibrate_noise_multiplier
from dpsweep.accounting.accountants.account import account, account_again
from dpsweep.accounting.calibration.so_far import cost_of_steps, cost_so_far
from dpsweep.accounting.mechanism.random_trials import ExponentialChoice, RandomTrials
from dpsweep.accounting.mechanism.samplings import PoissonSampling, RandomAllocationSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.mechanism.units import User
from dpsweep.accounting.pld import epsilon_pld
from tests.known import known

DELTA = 1e-5
SAMPLING = PoissonSampling(0.052)


def run(epochs: int, per_epoch: int = 20, segments: int = 1) -> Trace:
    length = epochs * per_epoch // segments
    steps = (Segment(at * length, length, SAMPLING, 1.1 - 0.01 * at) for at in range(segments))
    return Trace(1437, segments=tuple(steps))


def ends(epochs: int, per_epoch: int = 20) -> tuple[int, ...]:
    return tuple(range(per_epoch, epochs * per_epoch + 1, per_epoch))


def curve(trace: Trace, at: tuple[int, ...], accountant: str = "pld") -> list[float]:
    whole = account(trace, DELTA, accountant)
    return [cost_so_far(trace, at, step, whole) for step in at]


def test_every_epoch_of_a_calibrated_run_costs_what_pld_says_and_the_last_ends_at_the_target() -> None:
    noise = calibrate_noise_multiplier(
        lambda noise: Trace(1437, (Segment(0, 400, SAMPLING, noise),)), 8.0, DELTA, "pld"
    )
    trace = Trace(1437, (Segment(0, 400, SAMPLING, noise),))
    shown = curve(trace, ends(20))
    for step, epsilon in zip(ends(20)[::3], shown[::3], strict=True):
        exact = epsilon_pld(trace.until(step), DELTA)
        assert known(exact.lower) <= epsilon == pytest.approx(exact.upper, rel=2e-3)
    assert all(later > earlier * 1.01 for earlier, later in itertools.pairwise(shown))
    assert shown[-1] == account(trace, DELTA, "pld").epsilon
    assert 7.98 < shown[-1] <= 8.0


def test_a_coarse_bound_above_the_cost_of_the_whole_run_is_not_shown() -> None:
    """One step of 2,000 costs less than the bound of a part is coarse."""
    trace = run(100)
    whole, exact = account(trace, DELTA, "pld"), epsilon_pld(trace.until(1999), DELTA)
    assert cost_of_steps(trace.until(1999), DELTA, "pld") > whole.epsilon
    assert known(exact.lower) < cost_so_far(trace, (), 1999, whole) == whole.epsilon


def test_between_the_epochs_that_are_asked_the_next_one_bounds_them() -> None:
    trace = run(100, 4)
    shown = curve(trace, ends(100, 4))
    assert len(set(shown)) == 51
    assert shown[70] < shown[80] < shown[90] < shown[98] < shown[99], "neither last fifth nor last epoch is free"
    for place in (0, 42, 97):
        exact = epsilon_pld(trace.until(ends(100, 4)[place]), DELTA)
        assert shown[place] >= known(exact.lower)


def test_a_run_of_many_segments_is_asked_about_at_a_third_of_them_and_its_last_epoch_is_not_free() -> None:
    trace = run(60, 4, segments=60)
    shown = curve(trace, ends(60, 4))
    assert len(set(shown)) == 21
    assert shown[58] < shown[59]
    for place in (1, 19, 40, 58):  # epochs that are asked
        exact = epsilon_pld(trace.until(ends(60, 4)[place]), DELTA)
        assert known(exact.lower) <= shown[place] == pytest.approx(exact.upper, rel=1e-2)


@pytest.mark.parametrize("accountant", ["rdp", "filter", "rdp-classic"])
def test_quick_accountants_are_asked_at_every_epoch(accountant: str) -> None:
    trace, name = run(30), "rdp" if accountant == "filter" else accountant
    for step in ends(30)[::7]:
        expected = account(trace.until(step), DELTA, name).epsilon
        whole = replace(account(trace, DELTA, name), accountant=accountant)
        assert cost_so_far(trace, ends(30), step, whole) == expected


def test_a_step_after_the_planned_ones_is_accounted_for_itself() -> None:
    trace = run(10)
    whole = account(trace, DELTA, "pld")
    assert cost_so_far(trace, ends(5), 140, whole) > cost_so_far(trace, ends(5), 100, whole)


def test_noise_that_decays_to_nothing_costs_infinity_from_there_on() -> None:
    trace = Trace(1000, segments=(Segment(0, 4, PoissonSampling(0.1), 1.0), Segment(4, 4, PoissonSampling(0.1), 0.0)))
    shown = curve(trace, (4, 8), "auto")
    assert shown[0] == pytest.approx(epsilon_pld(trace.until(4), DELTA).upper, rel=3e-3)
    assert shown[1] == float("inf")


def test_what_is_not_sampled_costs_what_the_gaussian_does() -> None:
    trace = Trace(1000, segments=(Segment(0, 8, PoissonSampling(1.0), 5.0),))
    first = account(trace.until(4), DELTA, "gdp").epsilon
    assert cost_so_far(trace, (4, 8), 4, account(trace, DELTA, "gdp")) == pytest.approx(first)


ALLOCATED = Trace(1000, segments=(Segment(0, 4, RandomAllocationSampling(2), 2.0),))
SAMPLED = Trace(1000, segments=(Segment(0, 4, PoissonSampling(0.5), 2.0),))


@pytest.mark.parametrize(
    ("trace", "named"),
    [
        (ALLOCATED, "rdp"),
        pytest.param(replace(ALLOCATED, selection=RandomTrials(2.0)), "selection-pld", marks=pytest.mark.long),
        (replace(SAMPLED, unit=User(3)), "rdp"),
        (SAMPLED, "gdp"),
    ],
)
def test_a_method_that_covers_the_rounds_alone_is_not_asked_about_the_run(trace: Trace, named: str) -> None:
    """Bounds of `pld` may bear the names of Renyi DP and of one Gaussian, which refuse such runs."""
    least = account(trace, DELTA).lower_epsilon or 0.5 * account(trace, DELTA).epsilon
    assert least <= cost_of_steps(trace, DELTA, named) == pytest.approx(account(trace, DELTA).epsilon, rel=4e-3)
    assert account_again(trace, DELTA, named) == account(trace, DELTA)


@pytest.mark.parametrize("delta", [1e-150, 1e-250])
def test_the_first_steps_have_a_cost_at_a_delta_whose_lattice_does_not_reach_it(delta: float) -> None:
    """The lattice begins at the mean loss, and so tiny a delta is reached at a loss beyond its end."""
    trace = Trace(240, (Segment(0, 18, PoissonSampling(1 / 6), 1.0),))
    whole = account(trace, delta, "pld")
    found = [cost_so_far(trace, (6, 12, 18), step, whole) for step in (6, 12, 18)]
    for step, epsilon in zip((6, 12), found, strict=False):
        exact = epsilon_pld(trace.until(step), delta)
        assert known(exact.lower) <= epsilon == pytest.approx(exact.upper, rel=2e-2)
    assert found[0] < found[1] < found[2] == whole.epsilon


@pytest.mark.parametrize("accountant", ["auto", "pld", "rdp", "strong", "dp-accounting-pld", "dp-accounting-rdp"])
def test_a_choice_is_compared_with_what_its_own_accountant_says(accountant: str) -> None:
    """An estimate may be below the tightest guarantee."""
    chosen = replace(SAMPLED, selection=ExponentialChoice(3, 0.1))
    claimed = account(chosen, DELTA, accountant)
    assert account_again(chosen, DELTA, claimed.accountant).epsilon == pytest.approx(claimed.epsilon, rel=1e-9)
