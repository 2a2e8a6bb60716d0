"""Solvers: the papers' tables, the safe side, and targets that cannot be met."""

import math
from dataclasses import replace
from typing import Any

import pytest

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.calibration.budgets import Budget, EpsilonBudget, RhoBudget
from dpsweep.accounting.calibration.parameter_search import (
    calibrate_decay,
    calibrate_noise_multiplier,
    count_within_budget,
    epsilon_text,
    length_within_budget,
    noise_multiplier_within_budget,
    round_up,
)
from dpsweep.accounting.errors import InvalidInput, Unreachable
from dpsweep.accounting.mechanism.samplings import PoissonSampling, Sampling, ShuffledSampling
from dpsweep.accounting.mechanism.schedules import (
    NoiseSchedule,
    make_schedule,
    parse_schedule,
    planned_trace,
    with_initial,
)
from dpsweep.accounting.mechanism.trace import GaussianRelease, Trace

BUDGET = RhoBudget(0.78125)
STEP = {"period": 10}
POLYNOMIAL = {"end_noise_multiplier": 2.0, "period": 100}
TABLE_III = {
    "time": ({}, (0.076, 0.0441, 0.0281, 0.019, 0.0132, 0.0093, 0.0067, 0.0048)),
    "step": (STEP, (0.5459, 0.7008, 0.7922, 0.851, 0.891, 0.919, 0.94, 0.956)),
    "exponential": ({}, (0.0442, 0.0282, 0.0193, 0.0138, 0.0101, 0.0075, 0.0056, 0.0041)),
    "polynomial": (POLYNOMIAL, (6.2077, 3.5277, 2.1948, 1.4317, 0.9549, 0.6382, 0.4167, 0.1626)),
}
ROWS = [
    (name, params, epochs, published)
    for name, (params, values) in TABLE_III.items()
    for epochs, published in zip(range(30, 101, 10), values, strict=True)
]


def fits(trace: Trace, budget: Budget) -> bool:
    return budget.cost(trace) <= budget.limit * (1 + 1e-12)


def whole_epochs(
    schedule: NoiseSchedule, budget: Budget, sampling: Sampling, steps_per_epoch: int, size: int, at_most: int = 100_000
) -> int:
    return count_within_budget(
        lambda epochs: planned_trace(schedule, sampling, epochs, steps_per_epoch, size), budget, at_most
    )


def shuffled_epochs(schedule: NoiseSchedule, epochs: int) -> Trace:
    return planned_trace(schedule, ShuffledSampling(1), epochs, 1, 60_000)


def poisson_run(sigma: float, q: float = 0.01, epochs: int = 20, name: str = "constant", **params: Any) -> Trace:
    return planned_trace(make_schedule(name, sigma, **params), PoissonSampling(q), epochs, math.ceil(1 / q), 60_000)


@pytest.mark.parametrize(
    ("schedule", "sigma", "epochs"),
    [
        ("constant", 8.0, 100),
        ("time:decay=0.05", 10.0, 38),
        ("step:factor=0.6,period=10", 10.0, 31),
        ("exponential:decay=0.01", 10.0, 71),
        ("polynomial:power=3,end_noise_multiplier=2,period=100", 10.0, 44),
    ],
)
def test_table_ii(schedule: str, sigma: float, epochs: int) -> None:
    planned = parse_schedule(schedule, sigma)
    assert whole_epochs(planned, BUDGET, ShuffledSampling(100), 100, 60_000) == epochs
    assert fits(shuffled_epochs(planned, epochs), BUDGET)
    assert not fits(shuffled_epochs(planned, epochs + 1), BUDGET)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("name", "params", "epochs", "published"), ROWS)
def test_table_iii(name: str, params: dict[str, Any], epochs: int, published: float) -> None:
    decimals = len(str(published).partition(".")[2])
    decay = calibrate_decay(name, 10.0, epochs, BUDGET, shuffled_epochs, params=params)
    assert round_up(decay, decimals) == published


class TestNoise:
    @pytest.mark.parametrize("accountant", ["rdp", "rdp-classic", "zcdp-sampled", "strong", "pld"])
    def test_meets_the_target_and_wastes_nothing(self, accountant: str) -> None:
        sigma = calibrate_noise_multiplier(poisson_run, 2.0, 1e-5, accountant)
        assert account(poisson_run(sigma), 1e-5, accountant).epsilon <= 2.0
        assert account(poisson_run(sigma * 0.999), 1e-5, accountant).epsilon > 2.0
        assert float(f"{sigma:.6g}") == sigma

    @pytest.mark.parametrize(
        "schedule",
        ["exponential:decay=0.02", "cosine:end_noise_multiplier=0.8,period=20", "validation:factor=0.9,period=5"],
    )
    def test_solves_for_the_initial_noise_of_any_schedule(self, schedule: str) -> None:
        planned = parse_schedule(schedule, 1.0)

        def run(sigma: float) -> Trace:
            return planned_trace(with_initial(planned, sigma), PoissonSampling(0.02), 20, 50, 60_000)

        sigma = calibrate_noise_multiplier(run, 3.0, 1e-5, "rdp")
        assert account(run(sigma), 1e-5, "rdp").epsilon <= 3.0 < account(run(sigma * 0.999), 1e-5, "rdp").epsilon

    def test_a_rho_budget_has_a_closed_form(self) -> None:
        def run(sigma: float) -> Trace:
            return shuffled_epochs(make_schedule("constant", sigma), 100)

        assert noise_multiplier_within_budget(run, BUDGET) == pytest.approx(8.0, rel=1e-5)
        assert fits(run(noise_multiplier_within_budget(run, BUDGET)), BUDGET)

    def test_groups(self) -> None:
        def run(sigma: float) -> Trace:
            return shuffled_epochs(make_schedule("constant", sigma), 10)

        one, three = (calibrate_noise_multiplier(run, 2.0, 1e-5, "gdp", size) for size in (1, 3))
        assert three == pytest.approx(3.0 * one, rel=2e-5)

    def test_says_what_releases_already_cost(self) -> None:
        def run(sigma: float) -> Trace:
            return replace(poisson_run(sigma), releases=(GaussianRelease("pca", 0.5),))

        spent = account(run(1e6), 1e-5, "rdp").epsilon
        with pytest.raises(Unreachable, match=f"epsilon 1 is unreachable.*{spent:.6g}.*releases"):
            calibrate_noise_multiplier(run, 1.0, 1e-5, "rdp")

    def test_noise_that_falls_to_nothing_meets_no_target(self) -> None:
        with pytest.raises(Unreachable, match="noise multiplier 1e\\+06 costs epsilon inf"):
            calibrate_noise_multiplier(
                lambda sigma: poisson_run(sigma, name="step", factor=1e-13, period=1), 2.0, 1e-5, "rdp"
            )

    @pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf])
    def test_refuses_impossible_targets(self, target: float) -> None:
        with pytest.raises(InvalidInput, match="target epsilon"):
            calibrate_noise_multiplier(poisson_run, target, 1e-5)


class TestDecay:
    def test_the_budget_lasts_exactly_as_long(self) -> None:
        decay = calibrate_decay("exponential", 10.0, 60, BUDGET, shuffled_epochs)
        for value, epochs in ((decay, 60), (decay * 0.999, 61)):
            schedule = make_schedule("exponential", 10.0, decay=value)
            assert whole_epochs(schedule, BUDGET, ShuffledSampling(1), 1, 60_000) == epochs

    def test_works_on_an_epsilon_budget(self) -> None:
        def run(schedule: NoiseSchedule, epochs: int) -> Trace:
            return planned_trace(schedule, PoissonSampling(0.02), epochs, 50, 60_000)

        budget = EpsilonBudget(3.0, 1e-5, "rdp")
        decay = calibrate_decay("time", 3.0, 25, budget, run)
        assert whole_epochs(make_schedule("time", 3.0, decay=decay), budget, PoissonSampling(0.02), 50, 1) == 25

    def test_a_run_that_no_decay_makes_last_is_computed_once(self) -> None:
        """Found by hostile input: 551 epochs of other noise each took minutes to be refused."""
        lengths: list[int] = []

        def run(schedule: NoiseSchedule, epochs: int) -> Trace:
            lengths.append(epochs)
            return shuffled_epochs(schedule, epochs)

        with pytest.raises(Unreachable, match="last 551 epochs: it lasts between 1 and 156"):
            calibrate_decay("exponential", 10.0, 551, BUDGET, run)
        assert [length for length in lengths if length > 512] == [551]

    @pytest.mark.parametrize("epochs", [200, 3])
    def test_names_how_long_the_budget_can_last(self, epochs: int) -> None:
        with pytest.raises(Unreachable, match=f"last {epochs} epochs: it lasts between 10 and 156"):
            calibrate_decay("step", 10.0, epochs, BUDGET, shuffled_epochs, params=STEP)

    def test_refuses_schedules_without_decay(self) -> None:
        with pytest.raises(InvalidInput, match="no decay to solve for"):
            calibrate_decay("constant", 10.0, 60, BUDGET, shuffled_epochs)


class TestLength:
    def test_one_more_step_would_pass_the_target(self) -> None:
        def run(steps: int) -> Trace:
            return planned_trace(make_schedule("constant", 1.0), PoissonSampling(0.01), 1, steps, 60_000)

        budget = EpsilonBudget(2.0, 1e-5, "rdp")
        steps = length_within_budget(run, budget, 10**8)
        assert fits(run(steps), budget)
        assert not fits(run(steps + 1), budget)

    def test_a_budget_reached_exactly_is_within(self) -> None:
        assert whole_epochs(make_schedule("constant", 10.0), RhoBudget(0.5), ShuffledSampling(1), 1, 1) == 100

    def test_no_run_is_one_short_whatever_its_length_and_the_longest_one(self) -> None:
        """Against counting: rho 1/200 for each epoch."""
        constant = make_schedule("constant", 10.0)
        for affordable in (1, 2, 3, 4, 7, 8, 9, 31, 32, 33):
            found = [
                whole_epochs(constant, RhoBudget(0.005 * affordable), ShuffledSampling(1), 1, 1, at_most)
                for at_most in range(35)
            ]
            assert found == [min(affordable, at_most) for at_most in range(35)]
        assert whole_epochs(constant, RhoBudget(10.0), ShuffledSampling(1), 1, 1) == 2000
        assert whole_epochs(constant, RhoBudget(10.0, group_size=4), ShuffledSampling(1), 1, 1) == 125

    def test_no_epoch_fits_or_the_run_ends_first(self) -> None:
        tight = whole_epochs(make_schedule("constant", 0.5), BUDGET, ShuffledSampling(1), 1, 1)
        capped = whole_epochs(make_schedule("constant", 8.0), BUDGET, ShuffledSampling(1), 1, 1, 7)
        assert (tight, capped) == (0, 7)

    def test_says_when_no_length_answers(self) -> None:
        constant = make_schedule("constant", 0.5)
        with pytest.raises(Unreachable, match="length 1 already costs rho 2"):
            length_within_budget(lambda n: shuffled_epochs(constant, n), BUDGET, 1000)
        quiet = make_schedule("constant", 1e3)
        with pytest.raises(Unreachable, match="outlasts"):
            length_within_budget(lambda n: shuffled_epochs(quiet, n), BUDGET, 1000)


class TestBudgets:
    @pytest.mark.parametrize("limit", [0.0, math.nan, -1.0])
    def test_refuse_impossible_limits(self, limit: float) -> None:
        with pytest.raises(InvalidInput):
            RhoBudget(limit)
        with pytest.raises(InvalidInput):
            EpsilonBudget(limit, 1e-5)

    def test_a_run_without_noise_fits_no_budget(self) -> None:
        silent = shuffled_epochs(make_schedule("constant", 0.0), 1)
        assert not fits(silent, BUDGET)
        assert not fits(silent, EpsilonBudget(1e9, 1e-5))


@pytest.mark.parametrize("value", [1.0, 0.1, 3.14159265, 1e-9, 123456.7, 0.999999999, 1e6])
def test_round_up_is_never_below(value: float) -> None:
    assert value <= round_up(value) <= value * (1.0 + 1.1e-5)
    assert round_up(1.001, 1) == 1.1


@pytest.mark.parametrize(
    ("epsilon", "told"),
    [
        (0.71801, "0.7181"),
        (225.30012, "225.3002"),
        (1e-9, "0.0001"),
        (2.5, "2.5000"),
        (0.0, "0.0000"),
        (math.inf, "infinite"),
    ],
)
def test_an_epsilon_is_told_rounded_up(epsilon: float, told: str) -> None:
    assert epsilon_text(epsilon) == told
