"""Truncated Poisson batches, against oracles that share no code with the accounting.

Enumeration of all batches of few examples, quadrature of one step, Monte Carlo of the draw that a step reveals, and
dp-accounting's own event and mixtures.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpsweep import accounting
from dpsweep.accounting import (
    AdvantageBudget,
    ExponentialChoice,
    FixedBatchSampling,
    PoissonSampling,
    RandomTrials,
    Sampling,
    Segment,
    SideQuery,
    Trace,
    TruncatedPoissonSampling,
    account,
    account_selection,
    account_together,
    calibrate_noise_multiplier,
    epsilon_of_examples,
    individual_epsilons,
    privacy_curve,
)
from dpsweep.accounting.accountants.events import dp_accounting_pld
from dpsweep.accounting.calibration.parameter_search import noise_multiplier_within_budget
from dpsweep.accounting.mechanism.reductions import cases_of, rarest_apart
from dpsweep.accounting.pld import delta_pld, group_epsilons, vadhan_epsilon

DELTA = 1e-6
MNIST = (60_000, 0.01, 2000)
"""Examples, sample rate and steps of a run with 600 examples expected in a batch."""


def run(sampling: Sampling, sigma: float = 1.0, steps: int = 1000, size: int = 10_000) -> Trace:
    return Trace(size, (Segment(0, steps, sampling, sigma),))


def truncated(size: int, rate: float, most: int, sigma: float = 1.0, steps: int = 1000) -> Trace:
    return run(TruncatedPoissonSampling(size, rate, most), sigma, steps, size)


def mnist(most: int | None, sigma: float = 1.0) -> Trace:
    size, rate, steps = MNIST
    sampling = PoissonSampling(rate) if most is None else TruncatedPoissonSampling(size, rate, most)
    return run(sampling, sigma, steps, size)


def dp_accounting_epsilon(trace: Trace, delta: float) -> float:
    """By dp-accounting's own event for truncated batches."""
    (segment,) = trace.segments
    sampling = segment.sampling
    assert isinstance(sampling, TruncatedPoissonSampling)
    event = TruncatedSubsampledGaussianDpEvent(
        sampling.dataset_size, sampling.sample_rate, sampling.max_batch_size, segment.noise_multiplier
    )
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, segment.steps))
    return float(accountant.get_epsilon(delta))


# -- never too low -----------------------------------------------------------------------------------------------------


def exact_delta(others: int, rate: float, most: int, sigma: float, epsilon: float) -> float:
    """Worst of both directions for one step on the line: the example is +1, all others are -1; by quadrature."""
    points = np.linspace(-others - 12.0 * sigma, 2.0 + 12.0 * sigma, 40_001)
    spacing = points[1] - points[0]

    def density(atoms: dict[int, float]) -> np.ndarray:
        return np.asarray(sum(weight * stats.norm.pdf(points, at, sigma) for at, weight in atoms.items()))

    without: dict[int, float] = {}
    with_it: dict[int, float] = {}
    for joined in range(others + 1):
        chance = float(stats.binom.pmf(joined, others, rate))
        kept = min(joined, most)
        without[-kept] = without.get(-kept, 0.0) + chance
        with_it[-kept] = with_it.get(-kept, 0.0) + chance * (1 - rate)
        stays = min(1.0, most / (joined + 1))
        held = min(joined + 1, most)
        for at, share in ((2 - held, stays), (-held, 1.0 - stays)):
            with_it[at] = with_it.get(at, 0.0) + chance * rate * share
    p, q = density(with_it), density(without)
    losses = [np.maximum(a - math.exp(epsilon) * b, 0.0).sum() * spacing for a, b in ((p, q), (q, p))]
    return float(max(losses))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("others", "most", "sigma", "rate"),
    list(itertools.product([3, 8], [1, 3], [0.5, 1.0], [0.15, 0.5])),
    ids=lambda v: str(v),
)
@pytest.mark.parametrize("counts_the_example", [False, True])
def test_a_step_is_never_cheaper_than_its_quadrature(
    others: int, most: int, sigma: float, rate: float, counts_the_example: bool
) -> None:
    """The dataset_size of a trace may be that of either neighbour."""
    size = others + counts_the_example
    trace = truncated(size, rate, most, sigma, steps=1)
    for delta in (1e-2, 1e-4):
        epsilon = account(trace, delta).epsilon
        if most < size:  # else the maximum is that of the trace, and cuts nothing on either side
            assert exact_delta(others, rate, most, sigma, epsilon) <= delta * (1 + 1e-6)


def batch_sums(gradients: Sequence[float], rate: float, most: int) -> dict[float, float]:
    """The law of the sum of a truncated batch, by enumerating who joins and who is kept."""
    found: dict[float, float] = {}
    for joined in itertools.product((False, True), repeat=len(gradients)):
        chance = math.prod(rate if one else 1.0 - rate for one in joined)
        rows = [gradient for gradient, one in zip(gradients, joined, strict=True) if one]
        kept = list(itertools.combinations(rows, min(most, len(rows))))
        for batch in kept:
            total = round(math.fsum(batch), 12)
            found[total] = found.get(total, 0.0) + chance / len(kept)
    return found


@pytest.mark.thinned(2)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_data_set_of_six_examples_costs_more_than_claimed(size: int, most: int, seed: int) -> None:
    """All batches are enumerated. Random gradients, and such where all others oppose the group."""
    rng = np.random.default_rng(seed)
    rate, sigma = float(rng.uniform(0.2, 0.7)), float(rng.uniform(0.4, 1.5))
    others = [-1.0] * (6 - size) if seed == 0 else rng.uniform(-1.0, 1.0, 6 - size).tolist()
    points = np.linspace(-6.0 - 9.0 * sigma, 6.0 + 9.0 * sigma, 6_001)

    def density(gradients: Sequence[float]) -> np.ndarray:
        law = batch_sums(gradients, rate, most)
        return np.asarray(sum(chance * stats.norm.pdf(points, at, sigma) for at, chance in law.items()))

    pair = density([1.0] * size + others), density(others)
    for of_smaller in (False, True):  # the trace is that of either data set
        trace = truncated(6 - size if of_smaller else 6, rate, most, sigma, steps=1)
        if of_smaller and most >= 6 - size:
            continue  # a maximum of all examples is none
        epsilon = account(trace, 1e-3, "pld", size).epsilon
        for p, q in (pair, pair[::-1]):
            delta = np.maximum(p - math.exp(epsilon) * q, 0.0).sum() * (points[1] - points[0])
            assert delta <= 1e-3 * (1 + 1e-6)


@pytest.mark.parametrize(("size", "rate", "most"), [(40, 0.3, 14), (200, 0.05, 12), (9, 0.5, 4)])
def test_the_draw_that_a_step_reveals_is_that_of_simulated_batches(size: int, rate: float, most: int) -> None:
    """How often the others leave no room, and how often the example is in a batch then."""
    rng, trials = np.random.default_rng(0), 400_000
    others = rng.binomial(size - 1, rate, trials)
    full = others >= most
    kept = full & (rng.random(trials) < rate) & (rng.random(trials) < most / (others + 1.0))
    plain, (crowded, thinned), (filled, cut) = cases_of(TruncatedPoissonSampling(size, rate, most), 1)
    assert plain[1] == PoissonSampling(rate)
    assert crowded == pytest.approx(full.mean(), abs=5 * math.sqrt(full.mean() / trials))
    share = kept.sum() / full.sum()
    assert thinned.sample_rate == pytest.approx(share, abs=5 * math.sqrt(share / full.sum()))
    assert crowded + filled == pytest.approx(stats.binom.sf(most - 1, size, rate), rel=1e-6)
    assert (thinned.displaced, cut.displaced, cut.sample_rate) == (1, 1, rate)
    assert plain[0] + crowded + filled == pytest.approx(1.0, abs=1e-12)


def test_plain_poisson_accounting_of_truncated_batches_would_be_too_low() -> None:
    """The quadrature can fail: it is not met by the epsilon of the batches before they are cut."""
    uncut = account(run(PoissonSampling(0.25), 0.5, 1, 60), 1e-4).epsilon
    assert exact_delta(60, 0.25, 2, 0.5, uncut) > 5e-3
    cut = account(truncated(60, 0.25, 2, 0.5, 1), 1e-4).epsilon
    assert exact_delta(60, 0.25, 2, 0.5, cut) < 1e-4


# -- as low as others --------------------------------------------------------------------------------------------------

PROTOTYPES = [
    ((1000, 0.01, 16, 1.0, 128), 5.28),
    ((1000, 0.05, 64, 1.0, 500), 13.81),
    ((100, 0.1, 15, 2.0, 200), 5.18),
    ((100, 0.1, 10, 2.0, 200), 8.87),
]


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("case", "prototype"), PROTOTYPES[2:])
def test_at_or_below_dp_accounting_and_a_mixture_of_all_joining(
    case: tuple[int, float, int, float, int], prototype: float
) -> None:
    trace = truncated(*case)
    found = account(trace, DELTA)
    assert found.epsilon <= min(prototype, dp_accounting_epsilon(trace, DELTA))
    assert (found.delta, found.lower_epsilon) == (DELTA, None)
    assert dp_accounting_pld(trace, DELTA) == pytest.approx(dp_accounting_epsilon(trace, DELTA), rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(("case", "prototype"), PROTOTYPES[:2])
def test_longer_runs_too(case: tuple[int, float, int, float, int], prototype: float) -> None:
    test_at_or_below_dp_accounting_and_a_mixture_of_all_joining(case, prototype)


@pytest.mark.parametrize("case", [PROTOTYPES[2][0], PROTOTYPES[3][0]])
def test_a_step_is_the_mixture_of_its_cases(case: tuple[int, float, int, float, int]) -> None:
    """dp-accounting composes the same mixture of sampled Gaussians."""
    size, rate, most, sigma, steps = case
    cases = cases_of(TruncatedPoissonSampling(size, rate, most), 1)
    parts = [
        from_gaussian_mechanism(
            sigma / (1 + sampling.displaced), sampling_prob=sampling.sample_rate, value_discretization_interval=1e-3
        )
        for _, sampling in cases
    ]
    mixed, left = parts[0], cases[0][0]
    for part, (chance, _) in zip(parts[1:], cases[1:], strict=True):
        left += chance
        mixed = part.compute_mixture(mixed, chance / left)
    theirs = mixed.self_compose(steps).get_epsilon_for_delta(DELTA)
    assert account(truncated(*case), DELTA, "pld").epsilon == pytest.approx(theirs, rel=2e-3)


@pytest.mark.parametrize("accountant", ["auto", "pld", "rdp", "strong"])
@pytest.mark.parametrize("group_size", [1, 3])
def test_where_all_join_a_maximum_is_a_fixed_batch(accountant: str, group_size: int) -> None:
    if group_size > 1 and accountant in ("rdp", "strong"):
        pytest.skip("groups in sampled batches are for pld")
    full, fixed = truncated(1000, 1.0, 500, 20.0, 100), run(FixedBatchSampling(1000, 500), 20.0, 100, 1000)
    found = account(full, DELTA, accountant, group_size)
    assert found == account(fixed, DELTA, accountant, group_size)


def test_what_the_run_of_the_issue_costs() -> None:
    """60,000 examples at a rate of 0.01 and a maximum of 1200, which a batch passes with probability 1e-104."""
    cut, plain = mnist(1200), mnist(None)
    assert account(cut, DELTA).epsilon == pytest.approx(2.955, abs=1e-3)
    assert account_together([cut] * 2, DELTA).epsilon == pytest.approx(4.209, abs=1e-3)
    assert account_together([cut] * 10, DELTA).epsilon == pytest.approx(10.252, abs=1e-3)
    assert account_selection(cut, RandomTrials(14), DELTA).epsilon == pytest.approx(4.543, abs=1e-3)
    assert privacy_curve(cut).advantage.upper == pytest.approx(0.2264, abs=1e-4)
    assert vadhan_epsilon(cut, DELTA, 1) == pytest.approx(2.955, abs=1e-3)
    for most in (1600, 1800, 3000):
        rows = [[1.0], [0.3], [0.0]]
        for method in ("rdp", "pld"):
            alone = individual_epsilons([0], rows, mnist(most), DELTA, method).upper
            np.testing.assert_allclose(alone, individual_epsilons([0], rows, plain, DELTA, method).upper, rtol=1e-6)


def test_noise_for_an_advantage_is_that_of_plain_batches() -> None:
    sigma = noise_multiplier_within_budget(lambda sigma: mnist(1200, sigma), AdvantageBudget(0.05))
    assert sigma == pytest.approx(3.6325, abs=1e-3)


def test_noise_is_calibrated_with_the_maximum() -> None:
    def trace_of(sigma: float) -> Trace:
        return truncated(1000, 0.05, 70, sigma, 100)

    sigma = calibrate_noise_multiplier(trace_of, 2.0, DELTA)
    assert account(trace_of(sigma), DELTA, "pld").epsilon <= 2.0
    plain = calibrate_noise_multiplier(lambda s: run(PoissonSampling(0.05), s, 100, 1000), 2.0, DELTA)
    assert sigma > plain


# -- properties of every function --------------------------------------------------------------------------------------

COSTS: dict[str, Callable[[Trace], list[float]]] = {
    "ACCOUNTANTS": lambda t: [accounting.ACCOUNTANTS[name](t, DELTA, 1).epsilon for name in ("pld", "rdp", "strong")],
    "AdvantageBudget": lambda t: [AdvantageBudget(0.5).cost(t)],
    "EpsilonBudget": lambda t: [accounting.EpsilonBudget(1.0, DELTA).cost(t)],
    "INDIVIDUAL_ACCOUNTANTS": lambda t: [
        each for name in accounting.INDIVIDUAL_ACCOUNTANTS for each in _individuals(t, name)
    ],
    "TruePositiveRateBudget": lambda t: [accounting.TruePositiveRateBudget(0.5, 0.01).cost(t)],
    "account": lambda t: [account(t, DELTA).epsilon],
    "account_choice": lambda t: [accounting.account_choice(t, ExponentialChoice(3, 0.01), DELTA).epsilon],
    "account_selection": lambda t: [account_selection(t, RandomTrials(5), DELTA).epsilon],
    "account_together": lambda t: [account_together([t, t], DELTA).epsilon],
    "attack_risk": lambda t: [each.upper for each in accounting.attack_risk(privacy_curve(t)).true_positive_rates],
    "curve_of_examples": lambda t: [accounting.curve_of_examples(t, [0], [[0.7]]).advantage.upper],
    "epsilon_of_examples": lambda t: [epsilon_of_examples(t, [0], rows, DELTA).upper for rows in ([[0.7]], [[1], [0]])],
    "epsilon_of_examples_together": lambda t: [
        accounting.epsilon_of_examples_together([(t, [0], [[0.7], [1.0]]), (t, [0], [[0.2], [0.0]])], DELTA).epsilon
    ],
    "group_epsilons": lambda t: [each.upper for each in group_epsilons(t, DELTA, (1, 2))],
    "individual_epsilons": lambda t: _individuals(t, "rdp"),
    "privacy_curve": lambda t: [privacy_curve(t, size).delta(1.0).upper for size in (1, 2)],
}
"""What each public function says a trace costs; more is worse."""

SOLVERS: dict[str, Callable[[Callable[[float], Trace]], list[float]]] = {
    "calibrate_noise_multiplier": lambda of: [calibrate_noise_multiplier(of, 2.0, DELTA)],
    "noise_multiplier_within_budget": lambda of: [noise_multiplier_within_budget(of, AdvantageBudget(0.1))],
}
"""Functions that find the noise for a family of traces; more is worse."""

WITHOUT_BATCHES = {
    "SAMPLINGS": "a registry of samplings",
    "SCHEDULES": "a registry of noise",
    "RhoBudget": "refuses sampled batches",
    "calibrate_decay": "solves for decays of rho",
    "count_within_budget": "counts what the budgets above say",
    "length_within_budget": "counts what the budgets above say",
    "make_schedule": "makes noise",
    "parse_schedule": "makes noise",
    "planned_trace": "makes a trace",
    "read_trace": "reads a trace",
    "write_trace": "writes a trace",
}
"""Public names that say nothing of the cost of given batches, and why."""


def _individuals(trace: Trace, method: str) -> list[float]:
    return list(individual_epsilons([0], [[1.0], [0.4], [0.0]], trace, DELTA, method).upper)


def test_every_public_name_is_tried() -> None:
    """A function that is new in `accounting.__all__` joins one of the tables above."""
    data = {name for name in accounting.__all__ if isinstance(getattr(accounting, name), type)}
    data |= {"Release", "NoiseSchedule"}
    budgets = {name for name in data if name.endswith("Budget")}
    tried = {*COSTS, *SOLVERS, *WITHOUT_BATCHES}
    assert set(accounting.__all__) - (data - budgets) == tried


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("group", [(100, 0.1), (3, 0.5)])
def test_a_maximum_of_all_examples_is_none(name: str, group: tuple[int, float]) -> None:
    """To the last digit."""
    size, rate = group
    plain = run(PoissonSampling(rate), 2.0, 40, size)
    assert COSTS[name](truncated(size, rate, size, 2.0, 40)) == COSTS[name](plain)
    mixed = (SideQuery("counts", 9.0),)
    sides = [replace(t, segments=(replace(t.segments[0], side_queries=mixed),)) for t in (plain,)]
    with_maximum = replace(sides[0].segments[0], sampling=TruncatedPoissonSampling(size, rate, size))
    assert COSTS[name](replace(sides[0], segments=(with_maximum,))) == COSTS[name](sides[0])


@pytest.mark.parametrize("name", SOLVERS)
def test_noise_for_a_maximum_of_all_examples_is_that_for_none(name: str) -> None:
    found = SOLVERS[name](lambda sigma: truncated(200, 0.1, 200, sigma, 20))
    assert found == SOLVERS[name](lambda sigma: run(PoissonSampling(0.1), sigma, 20, 200))


@pytest.mark.parametrize("name", COSTS)
def test_cost_falls_or_stays_as_the_maximum_grows(name: str) -> None:
    """From the expected batch size on; within the certified error of a lattice."""
    costs = [COSTS[name](truncated(400, 0.1, most, 2.0, 60)) for most in (40, 52, 75, 400)]
    for smaller, larger in pairwise(costs):
        assert (np.array(larger) <= np.array(smaller) * (1 + 5e-4)).all()
    assert costs[-1][0] < costs[0][0]


@pytest.mark.parametrize("name", SOLVERS)
def test_noise_falls_or_stays_as_the_maximum_grows(name: str) -> None:
    noise = [SOLVERS[name](functools.partial(_of_noise, most))[0] for most in (20, 26, 40, 200)]
    assert all(larger <= smaller * (1 + 5e-4) for smaller, larger in pairwise(noise))


def _of_noise(most: int, sigma: float) -> Trace:
    return truncated(200, 0.1, most, sigma, 20)


@given(
    most=st.integers(10, 40), rate=st.floats(0.02, 0.25), sigma=st.floats(0.8, 4.0), counts=st.lists(st.integers(1, 3))
)
@settings(max_examples=8, deadline=None)
def test_runs_together_cost_at_most_the_sum(most: int, rate: float, sigma: float, counts: list[int]) -> None:
    """Each at its share of delta, as adding up needs."""
    traces = [truncated(40, rate, most, sigma, 10 * count) for count in [1, 2, *counts]]
    share = DELTA / len(traces)
    added = sum(account(trace, share).epsilon for trace in traces)
    assert account_together(traces, DELTA).epsilon <= added * (1 + 1e-9)


def test_a_group_costs_more_than_one_and_pays_for_its_own_room() -> None:
    """C = 1[|R| > B - k]: the more members, the more often the others leave no room for all of them."""
    sampling = TruncatedPoissonSampling.of_sizes(10_000, 100, 150)
    assert cases_of(sampling, 20)[1][0] == pytest.approx(stats.binom.sf(130, 10_000, 0.01), rel=1e-8)
    assert [chance for chance, _ in cases_of(sampling, 151)] == [1.0]
    pair = account(truncated(10_000, 0.01, 200), DELTA, "pld", 2).epsilon
    assert pair == pytest.approx(account(run(PoissonSampling(0.01)), DELTA, "pld", 2).epsilon, rel=2e-3)
    assert account(truncated(10_000, 0.01, 150), DELTA, "pld", 2).epsilon > pair


@pytest.mark.thinned(6)
@pytest.mark.parametrize("most", [100, 110, 130, 200])
@pytest.mark.parametrize("contribution", [1.0, 0.3, 0.0])
def test_single_examples_are_above_their_own_mixture_and_close_where_cuts_are_rare(
    most: int, contribution: float
) -> None:
    trace = truncated(10_000, 0.01, most, 1.0, 300)
    exact = epsilon_of_examples(trace, [0], [[contribution]], DELTA).upper
    found: Any = {m: individual_epsilons([0], [[contribution]], trace, DELTA, m) for m in ("pld", "rdp")}
    assert found["pld"].upper[0] >= exact * (1 - 1e-3)
    assert found["rdp"].upper[0] >= found["pld"].upper[0] * (1 - 1e-9)
    assert found["pld"].upper[0] <= exact * 1.05 + 1e-4
    assert found["pld"].lower is found["rdp"].lower is None
    assert found["pld"].delta == DELTA


def test_who_contributes_nothing_pays_only_for_batches_that_are_cut() -> None:
    trace = truncated(100, 0.1, 12, 2.0, 3)
    nothing, everything = (epsilon_of_examples(trace, [0], [[share]], DELTA).upper for share in (0.0, 1.0))
    assert 0.0 < nothing < 0.5 * everything


def test_rare_cuts_are_not_what_renyi_divergences_find() -> None:
    """Of events of probability 1e-24 their high moments are infinite for practical purposes."""
    plain = account(mnist(None), DELTA, "rdp").epsilon
    assert plain <= account(mnist(850), DELTA, "rdp").epsilon <= plain * (1 + 1e-4)
    apart, left = rarest_apart(mnist(850), DELTA)
    assert apart == mnist(None)
    assert 0.999 * DELTA <= left < DELTA
    assert rarest_apart(mnist(700), DELTA) == (mnist(700), DELTA)


def test_delta_of_a_truncated_run_is_that_of_its_epsilon() -> None:
    trace = truncated(1000, 0.05, 64, 1.0, 50)
    epsilon = account(trace, DELTA, "pld").epsilon
    assert delta_pld(trace, epsilon).upper == pytest.approx(DELTA, rel=1e-2)
