"""Thousands of noise levels at once: against lattices, dp-accounting, and without any lattice."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.joint_cost import account_together
from dpsweep.accounting.individual import epsilon_of_many_rounds, many_rounds
from dpsweep.accounting.mechanism.samplings import (
    FixedBatchSampling,
    PoissonSampling,
    Sampling,
    TruncatedPoissonSampling,
)
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Release, Segment, Trace
from dpsweep.accounting.pld import GroupRounds, PairBounds, epsilon_of_rounds, rounds_of_group
from tests.accounting.work import counted
from tests.known import known

SIZE = 60_000


def levels(count: int, each: int, sampling: Sampling, last: float, first: float, *releases: Release) -> Trace:
    """``count`` noise levels of ``each`` steps, from ``first`` down to ``last``."""
    noise = np.geomspace(first, last, count)
    steps = (Segment(i * each, each, sampling, float(sigma)) for i, sigma in enumerate(noise))
    return Trace(SIZE, tuple(steps), releases)


def refuse(rounds: GroupRounds, delta: float, tolerance: float) -> PairBounds:
    raise AssertionError(
        f"{len(rounds.laws)} rounds were composed on a lattice at delta {delta}, tolerance {tolerance}"
    )


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "trace",
    [
        pytest.param(levels(100, 30, PoissonSampling(0.01), 0.8, 1.6), id="poisson"),
        pytest.param(levels(100, 30, FixedBatchSampling(SIZE, 600), 1.6, 4.0), id="fixed"),
        pytest.param(
            levels(100, 30, PoissonSampling(0.02), 1.0, 8.0, GaussianRelease("pca", 6.0), PureRelease("k", 0.3)),
            id="releases",
        ),
    ],
)
def test_bounds_contain_those_of_lattices(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = rounds_of_group(trace)
    lattice = epsilon_of_rounds(rounds, 1e-6)
    monkeypatch.setattr(many_rounds, "_FEW", 20)
    monkeypatch.setattr(many_rounds, "epsilon_of_rounds", refuse)
    found = epsilon_of_many_rounds(rounds, 1e-6)
    assert found.lower <= lattice.upper
    assert lattice.lower <= found.upper <= lattice.upper * 1.001
    assert found.upper <= 1.001 * found.lower


@pytest.mark.parametrize(
    ("most", "size", "delta"),
    [
        pytest.param(61, 1, 1e-6, id="often cut"),
        pytest.param(98, 1, 1e-5, id="rarely cut"),
        pytest.param(98, 3, 1e-9, id="groups, whose worse direction no saddle point tells"),
    ],
)
def test_few_levels_of_batches_that_may_be_cut_bound_all_closely(
    most: int, size: int, delta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = TruncatedPoissonSampling(SIZE, 0.001, most)
    rounds = rounds_of_group(levels(30, 10, sampling, 1.12, 4.89, GaussianRelease("a", 5.0)), size)
    lattice = epsilon_of_rounds(rounds, delta)
    monkeypatch.setattr(many_rounds, "_FEW_DRAWN", 20)
    monkeypatch.setattr(many_rounds, "epsilon_of_rounds", refuse)
    found = epsilon_of_many_rounds(rounds, delta)
    assert lattice.lower <= found.upper <= 1.001 * lattice.upper
    assert found.lower == 0.0


def test_bounds_contain_the_composition_of_dp_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's optimistic estimate is below the exact epsilon, and its pessimistic one above."""
    trace = levels(10, 100, PoissonSampling(0.02), 1.0, 2.0)
    theirs = []
    for pessimistic in (False, True):
        parts = [
            privacy_loss_distribution.from_gaussian_mechanism(
                segment.noise_multiplier,
                sampling_prob=0.02,
                value_discretization_interval=1e-3,
                pessimistic_estimate=pessimistic,
            ).self_compose(segment.steps)
            for segment in trace.segments
        ]
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.compose(part)
        theirs.append(whole.get_epsilon_for_delta(1e-6))
    monkeypatch.setattr(many_rounds, "_FEW", 1)
    monkeypatch.setattr(many_rounds, "epsilon_of_rounds", refuse)
    found = epsilon_of_many_rounds(rounds_of_group(trace), 1e-6)
    assert theirs[0] <= found.upper <= found.lower * 1.001
    assert found.lower <= theirs[1]
    assert found.upper == pytest.approx(theirs[1], rel=2e-3)


@pytest.mark.parametrize("count", [1500, pytest.param(20_000, marks=pytest.mark.long)])
def test_thousands_of_levels_need_no_lattice(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms of moments do not grow with the number of levels."""
    monkeypatch.setattr(many_rounds, "epsilon_of_rounds", refuse)
    trace = levels(count, 1, PoissonSampling(0.01), 1.0, 2.0)
    with counted() as work:
        found = account(trace, 1e-6, "pld")
    assert (work.points, work.terms < 1e8) == (0, True)
    assert known(found.lower_epsilon) <= found.epsilon <= 1.001 * known(found.lower_epsilon)
    other = levels(count, 1, PoissonSampling(0.01), 1.5, 3.0)
    together = account_together([trace, other], 1e-6)
    assert together.accountant == "pld"
    assert found.epsilon < together.epsilon <= found.epsilon + account(other, 1e-6, "pld").epsilon


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("trace", "size", "delta"),
    [
        pytest.param(levels(30, 5, PoissonSampling(0.02), 1.0, 2.0), 2, 1e-6, id="groups"),
        pytest.param(levels(30, 1, PoissonSampling(1e-4), 1.0, 2.0), 1, 1e-6, id="hardly any draws"),
        pytest.param(levels(30, 30, PoissonSampling(0.01), 1.0, 2.0), 1, 1e-30, id="a tiny delta"),
    ],
)
def test_what_is_not_close_is_composed_on_a_lattice(
    trace: Trace, size: int, delta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = rounds_of_group(trace, size)
    monkeypatch.setattr(many_rounds, "_FEW", 5)
    found, lattice = epsilon_of_many_rounds(rounds, delta), epsilon_of_rounds(rounds, delta)
    assert 0.0 <= found.lower <= found.upper < math.inf
    assert found.upper <= lattice.upper
    assert found.lower >= lattice.lower
