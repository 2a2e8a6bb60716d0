"""Cyclic Poisson batches, one fixed order and correlated noise: certified, or refused by name."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from pydantic import TypeAdapter
from scipy import linalg, stats

from dpsweep.accounting import (
    GaussianRelease,
    InvalidInput,
    PoissonSampling,
    Segment,
    ShuffledSampling,
    SideQuery,
    Trace,
    UnsupportedMechanism,
    account,
    account_together,
    epsilon_of_examples,
    individual_epsilons,
    privacy_curve,
    read_trace,
    write_trace,
)
from dpsweep.accounting.accountants.paper_only import algorithm_2
from dpsweep.accounting.mechanism.noise_strategies import BandedNoise, InverseRootNoise, LambdaNoise, NoiseStrategy
from dpsweep.accounting.mechanism.samplings import CyclicPoissonSampling, FixedOrderSampling, Sampling
from dpsweep.accounting.pld import group_law
from dpsweep.orchestration.store.attempts import StoredTrace

DELTA = 1e-5
IN_TURN = CyclicPoissonSampling(4, 0.2)
IN_ORDER = FixedOrderSampling(5)
BANDED = BandedNoise(4, 40)


def run(sampling: Sampling, steps: int, sigma: float, strategy: NoiseStrategy | None = None) -> Trace:
    trace = Trace(100, (Segment(0, steps, sampling, sigma),), adjacency=sampling.adjacencies[0])
    return trace if strategy is None else replace(trace, strategy=strategy)


def delta_by_quadrature(means: np.ndarray, chances: np.ndarray, sigma: float, epsilon: float) -> float:
    """The larger hockey stick of sum_i chances[i] N(means[i], sigma^2) and N(0, sigma^2) in a plane; [points, 2]."""
    axis = np.linspace(-7.0, 9.0, 401) * sigma
    points = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1)
    none = stats.norm.pdf(points, scale=sigma).prod(axis=-1)
    some = sum(p * stats.norm.pdf(points - m, scale=sigma).prod(axis=-1) for m, p in zip(means, chances, strict=True))
    cell = (axis[1] - axis[0]) ** 2
    removed, added = some - math.exp(epsilon) * none, none - math.exp(epsilon) * some
    return float(max(np.maximum(removed, 0.0).sum(), np.maximum(added, 0.0).sum()) * cell)


@pytest.mark.parametrize("strategy", [None, BandedNoise(2, 4)])
def test_the_example_of_the_first_turn_costs_what_is_certified(strategy: NoiseStrategy | None) -> None:
    """Four steps, two groups: its contributions are columns 0 and 2 of C, or not, by two coins."""
    rate, sigma = 0.3, 1.3
    column = np.ones(1) if strategy is None else strategy.column()
    matrix = linalg.toeplitz(np.pad(column, (0, 4 - len(column))), np.zeros(4))
    joined = list(itertools.product((0.0, 1.0), repeat=2))
    shifts = np.array([matrix[:, 0] * first + matrix[:, 2] * second for first, second in joined])
    plane = np.linalg.qr(matrix[:, [0, 2]])[0]
    np.testing.assert_allclose(plane @ plane.T @ shifts.T, shifts.T, atol=1e-12)
    chances = np.array([math.prod(rate if coin else 1.0 - rate for coin in coins) for coins in joined])
    noise = sigma * float(np.linalg.norm(column))  # the noise multiplier is relative to the norm of a column
    trace = run(CyclicPoissonSampling(2, rate), 4, sigma, strategy)
    found = account(trace, 1e-3, "pld")
    assert found.lower_epsilon is not None
    assert found.epsilon < found.lower_epsilon * 1.001
    for epsilon, above in ((found.epsilon * 1.002, False), (found.lower_epsilon * 0.998, True)):
        true = delta_by_quadrature(shifts @ plane, chances, noise, epsilon)
        assert (true > 1e-3) is above


def test_the_composition_is_that_of_dp_accounting() -> None:
    """43 steps begin 11 cycles of 4; another library composes 11 sampled Gaussians."""
    found = account(run(IN_TURN, 43, 1.0), DELTA, "pld")
    accountant = PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(1.0))
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, 11))
    assert found.epsilon == pytest.approx(accountant.get_epsilon(DELTA), rel=2e-3)
    assert found == account(run(PoissonSampling(0.2), 11, 1.0), DELTA, "pld")
    assert found.adjacency == "add_remove"
    correlated = account(run(IN_TURN, 43, 1.0, BandedNoise(4, 43)), DELTA, "pld")
    assert correlated == replace(found, lower_epsilon=None), "the last column of C is cut by the end of the run"


def test_more_groups_than_bands_and_several_levels_of_independent_noise() -> None:
    few = account(run(CyclicPoissonSampling(8, 0.2), 40, 1.0, BandedNoise(4, 40)), DELTA).epsilon
    assert few == account(run(PoissonSampling(0.2), 5, 1.0), DELTA).epsilon
    levels = Trace(100, (Segment(0, 6, IN_TURN, 1.0), Segment(6, 5, IN_TURN, 2.0)))
    turns = Trace(100, (Segment(0, 2, PoissonSampling(0.2), 1.0), Segment(2, 2, PoissonSampling(0.2), 2.0)))
    found = account(levels, DELTA)
    assert found.epsilon == account(turns, DELTA).epsilon
    assert found.lower_epsilon is None, "which example has the most turns differs between the levels"


@pytest.mark.parametrize("strategy", [BANDED, InverseRootNoise(3, 40), LambdaNoise(0.7, 40)])
@pytest.mark.parametrize("steps", [5, 12, 40])
def test_one_fixed_order_is_one_gaussian(strategy: NoiseStrategy, steps: int) -> None:
    """Its sensitivity by brute force over all starts; contributions of one sign are the worst, as C is not negative."""
    column = strategy.column()
    matrix = linalg.toeplitz(np.pad(column, (0, 40 - len(column))), np.zeros(40))[:steps, :steps]
    assert (matrix >= 0.0).all()
    worst = max(np.linalg.norm(matrix[:, first::5].sum(axis=1)) for first in range(min(5, steps)))
    mu = float(worst / np.linalg.norm(column)) / 1.7
    found = account(run(IN_ORDER, steps, 1.7, strategy), DELTA)
    shift = found.epsilon / mu
    delta = stats.norm.cdf(mu / 2 - shift) - math.exp(found.epsilon) * stats.norm.cdf(-mu / 2 - shift)
    assert DELTA * (1 - 1e-5) <= delta <= DELTA
    assert (found.adjacency, found.kind, found.lower_epsilon) == ("zero_out", "guarantee", None)
    twice = account(run(IN_ORDER, steps, 1.7, strategy), DELTA, group_size=2)
    assert twice.epsilon == account(run(IN_ORDER, steps, 1.7 / 2, strategy), DELTA).epsilon


def test_one_fixed_order_without_correlation_costs_what_a_random_one_does() -> None:
    assert account(run(IN_ORDER, 12, 1.7), DELTA) == account(run(ShuffledSampling(5), 12, 1.7), DELTA)
    given = individual_epsilons([0], [[0.5]], run(IN_ORDER, 12, 1.7), DELTA).upper
    assert given == individual_epsilons([0], [[0.5]], run(ShuffledSampling(5), 12, 1.7), DELTA).upper


CORRELATED = run(IN_TURN, 40, 1.0, BANDED)
REFUSED: list[tuple[Trace, str]] = [
    (replace(run(PoissonSampling(0.1), 40, 1.0), strategy=BANDED), "banded noise with Poisson batches is proven here"),
    (replace(run(ShuffledSampling(5), 40, 1.0), strategy=BANDED), "banded noise with shuffled epochs is proven here"),
    (run(CyclicPoissonSampling(3, 0.2), 40, 1.0, BANDED), "reaches over 4 steps, but a cycle has 3"),
    (run(IN_TURN, 40, 1.0, LambdaNoise(0.5, 40)), "reaches over 40 steps, but a cycle has 4"),
    (run(IN_TURN, 41, 1.0, BANDED), "made for 40 steps, but the run has 41"),
    (
        replace(CORRELATED, segments=(Segment(0, 20, IN_TURN, 1.0), Segment(20, 20, IN_TURN, 2.0))),
        "at one level of noise and with one sampling, but the run has 2 segments",
    ),
    (
        Trace(100, (Segment(0, 40, IN_ORDER, 1.0, (SideQuery("n", 3.0),)),), (), "zero_out", strategy=BANDED),
        "side queries beside banded noise in one fixed order",
    ),
]


@pytest.mark.parametrize(("trace", "said"), REFUSED)
def test_what_has_no_proof_is_refused_by_name(trace: Trace, said: str) -> None:
    for accountant in ("auto", "pld", "rdp", "dp-accounting-pld"):
        with pytest.raises(UnsupportedMechanism, match=said):
            account(trace, DELTA, accountant)


@pytest.mark.parametrize("trace", [CORRELATED, run(IN_TURN, 40, 1.0), run(IN_ORDER, 40, 1.0, BANDED)])
def test_given_examples_are_refused(trace: Trace) -> None:
    for call in (individual_epsilons, algorithm_2):
        with pytest.raises(UnsupportedMechanism, match="no epsilon of given examples"):
            call([0], [[0.5]], trace, DELTA)
    with pytest.raises(UnsupportedMechanism, match="no epsilon of given examples"):
        epsilon_of_examples(trace, [0], [[0.5]], DELTA)


@pytest.mark.parametrize("trace", [CORRELATED, run(IN_TURN, 40, 1.0)])
def test_groups_in_turns_have_no_common_rounds(trace: Trace) -> None:
    for accountant in ("rdp", "gdp", "dp-accounting-pld"):
        with pytest.raises(UnsupportedMechanism, match="members may take turns in different steps; use the accountant"):
            account(trace, DELTA, accountant, 2)
    assert account(trace, DELTA, "auto", 2).accountant in ("pld", "gdp")
    with pytest.raises(UnsupportedMechanism, match="no law of the members"):
        group_law(IN_TURN, 2)


def test_side_queries_releases_curves_and_several_runs_take_the_dominating_rounds() -> None:
    side, release = (SideQuery("n", 3.0),), (GaussianRelease("pca", 5.0),)
    mine = replace(CORRELATED, segments=(Segment(0, 40, IN_TURN, 1.0, side),), releases=release)
    turns = Trace(100, (Segment(0, 10, PoissonSampling(0.2), 1.0, side),), release)
    assert account(mine, DELTA).epsilon == account(turns, DELTA).epsilon
    assert privacy_curve(mine).delta(1.0) == privacy_curve(turns).delta(1.0)
    both = account_together([mine, turns], DELTA)
    assert both.epsilon == account_together([turns, turns], DELTA).epsilon
    assert both.lower_epsilon is None, "an example that comes first in one run may come last in another"


@pytest.mark.parametrize("trace", [CORRELATED, run(IN_ORDER, 40, 1.0, LambdaNoise(0.5, 40)), run(IN_TURN, 40, 1.0)])
def test_files_keep_turns_and_strategy(trace: Trace, tmp_path: Path) -> None:
    write_trace(str(tmp_path / "trace.arrow"), trace)
    assert read_trace(str(tmp_path / "trace.arrow")) == trace
    stored = TypeAdapter(StoredTrace)
    assert stored.validate_json(stored.dump_json(trace)) == trace
    assert ("strategy" in stored.dump_python(trace)) is (trace.strategy.stored_name != "independent")


def test_sizes_of_cycles() -> None:
    assert CyclicPoissonSampling.of_sizes(60_000, 600, 4) == CyclicPoissonSampling(4, 0.04)
    assert CyclicPoissonSampling.of_sizes(60_000, 600, 4).steps_per_epoch == 100
    for groups in (0, 101):
        with pytest.raises(
            InvalidInput, match=f"a cycle has {groups} groups, but 60,000 examples are enough for 1 to 100"
        ):
            CyclicPoissonSampling.of_sizes(60_000, 600, groups)
