"""No lower bound is above what an attack could reach: every sampling against every function that returns one.

The truth of small runs is brute force: outputs of the worst data set, with every batch and every order enumerated.
Lower bounds that are not known are None, and absent in files and tables.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from scipy import stats

from dpsweep import accounting
from dpsweep.accounting import (
    ACCOUNTANTS,
    INDIVIDUAL_ACCOUNTANTS,
    BandedNoise,
    CyclicPoissonSampling,
    ExponentialChoice,
    FixedBatchSampling,
    FixedOrderSampling,
    GaussianRelease,
    IndependentNoise,
    PoissonSampling,
    PrivacyEstimate,
    PureRelease,
    RandomTrials,
    Sampling,
    Segment,
    ShuffledSampling,
    SideQuery,
    Trace,
    TruncatedPoissonSampling,
    UnsupportedMechanism,
    account,
    account_together,
    attack_risk,
    curve_of_examples,
    epsilon_of_examples,
    epsilon_of_examples_together,
    group_epsilons,
    individual_epsilons,
    privacy_curve,
)
from dpsweep.accounting.attacks import FALSE_POSITIVE_RATES
from dpsweep.accounting.mechanism.filters import RenyiFilter
from dpsweep.accounting.mechanism.samplings import Adjacency, Draws, RandomAllocationSampling, stored_kinds
from dpsweep.accounting.mechanism.units import EXAMPLE, User
from dpsweep.accounting.pld import delta_pld, epsilon_pld, grows_at_least_linearly, linear_growth
from tests.known import known

DELTA = 1e-3
EPSILON = 0.7
SIGMA = 0.8
EXAMPLES = 4
Array = np.ndarray

RUNS: dict[str, tuple[Sampling, int]] = {
    "poisson": (PoissonSampling(0.4), 2),
    "fixed": (FixedBatchSampling(EXAMPLES, 2), 2),
    "fixed, of all": (FixedBatchSampling(EXAMPLES, EXAMPLES), 2),
    "full": (PoissonSampling(1.0), 2),
    "shuffled": (ShuffledSampling(2), 2),
    "shuffled in one batch": (ShuffledSampling(1), 2),
    "truncated": (TruncatedPoissonSampling(EXAMPLES, 0.4, 2), 2),
    "truncated where all join": (TruncatedPoissonSampling(EXAMPLES, 1.0, 2), 2),
    "a maximum of all": (TruncatedPoissonSampling(EXAMPLES, 0.4, EXAMPLES), 2),
    "allocated": (RandomAllocationSampling(2), 2),
    "allocated, unfinished": (RandomAllocationSampling(4), 2),
    "in turn": (CyclicPoissonSampling(2, 0.4), 2),
    "in turn, banded": (CyclicPoissonSampling(2, 0.4), 2),
    "in order": (FixedOrderSampling(2), 2),
    "in order, banded": (FixedOrderSampling(2), 2),
    "users": (PoissonSampling(0.4), 2),
}
"""Samplings and steps of 4 examples."""
BANDS = BandedNoise(2, 2)
USERS = User(2)
KNOWN = {*RUNS} - {"shuffled", "truncated", "allocated, unfinished", "in order", "in order, banded", "fixed, of all"}
"""Runs whose worst case is the pairs of their rounds, so that lower bounds are given."""


def trace_of(name: str) -> Trace:
    sampling, steps = RUNS[name]
    strategy, unit = BANDS if "banded" in name else IndependentNoise(), USERS if name == "users" else EXAMPLE
    segments = (Segment(0, steps, sampling, SIGMA),)
    return Trace(EXAMPLES, segments, adjacency=sampling.adjacencies[0], strategy=strategy, unit=unit)


# -- the truth ---------------------------------------------------------------------------------------------------------


def batches(name: str, rows: tuple[float, ...]) -> Iterator[tuple[float, tuple[float, float]]]:
    """(probability, sums of the two steps) of every choice of batches of these rows, the last of which is the example.

    A row of 0 is a null record.
    """
    sampling, _ = RUNS[name]
    if isinstance(sampling, ShuffledSampling):
        size = -(-len(rows) // sampling.steps_per_epoch)
        orders = list(itertools.permutations(rows))
        for order in orders:
            sums = [math.fsum(order[start : start + size]) for start in range(0, len(rows), size)]
            if len(sums) == 2:
                yield 1.0 / len(orders), (sums[0], sums[1])
            else:
                yield 1.0 / len(orders), (sums[0], sums[0])
        return
    if isinstance(sampling, RandomAllocationSampling):
        for steps in itertools.product(range(sampling.steps_per_epoch), repeat=len(rows)):
            yield sampling.steps_per_epoch ** -len(rows), _sums(rows, steps)
        return
    if isinstance(sampling, CyclicPoissonSampling | FixedOrderSampling):  # the last row has the first turn
        turns = [place % 2 for place in range(len(rows))][::-1]
        rate = sampling.sample_rate
        for coins in itertools.product((0, 1), repeat=len(rows)):
            chance = math.prod(rate if coin else 1.0 - rate for coin in coins)
            if chance > 0.0:
                yield chance, _sums([row * coin for row, coin in zip(rows, coins, strict=True)], turns)
        return
    once = list(_one_batch(sampling, rows))
    for (p, first), (q, second) in itertools.product(once, once):
        yield p * q, (first, second)


def _sums(rows: Sequence[float], steps: Sequence[int]) -> tuple[float, float]:
    """Sums of the rows of the first step and of the second."""
    first, second = (math.fsum(row for row, step in zip(rows, steps, strict=True) if step == at) for at in (0, 1))
    return first, second


def _one_batch(sampling: Sampling, rows: tuple[float, ...]) -> Iterator[tuple[float, float]]:
    if isinstance(sampling, FixedBatchSampling):
        drawn = list(itertools.combinations(rows, min(sampling.batch_size, len(rows))))
        yield from ((1.0 / len(drawn), math.fsum(batch)) for batch in drawn)
        return
    most = sampling.max_batch_size if isinstance(sampling, TruncatedPoissonSampling) else len(rows)
    for joined in itertools.product((False, True), repeat=len(rows)):
        chance = math.prod(sampling.sample_rate if one else 1.0 - sampling.sample_rate for one in joined)
        members = [row for row, one in zip(rows, joined, strict=True) if one]
        kept = list(itertools.combinations(members, min(most, len(members))))
        yield from ((chance / len(kept), math.fsum(batch)) for batch in kept)


@dataclass(frozen=True)
class Truth:
    """Masses of the outputs of both steps, with the example(s) and without, in cells of the plane."""

    present: Array
    absent: Array

    def delta(self, epsilon: float) -> float:
        ratio = math.exp(epsilon)
        pairs = ((self.present, self.absent), (self.absent, self.present))
        return max(float(np.maximum(p - ratio * q, 0.0).sum()) for p, q in pairs)

    def epsilon(self, delta: float) -> float:
        low, high = 0.0, 60.0
        for _ in range(60):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """Of the best test, in the worse direction; randomised in the cell at the threshold."""
        return max(
            self._roc(p, q, false_positive_rate) for p, q in ((self.present, self.absent), (self.absent, self.present))
        )

    @staticmethod
    def _roc(p: Array, q: Array, rate: float) -> float:
        with np.errstate(divide="ignore", invalid="ignore"):
            order = np.argsort(-np.nan_to_num(p / q, nan=0.0, posinf=1e300), axis=None)
        return float(
            np.interp(rate, np.append(0.0, np.cumsum(q.ravel()[order])), np.append(0.0, np.cumsum(p.ravel()[order])))
        )


@functools.cache
def truth_of(name: str, size: int = 1) -> Truth:
    """Of the worst data set: others are -1 where an example displaces one, and 0 where they would only add noise.

    Cells are post-processing; they are so fine that they lose less than `_CELLS`.
    """
    size *= trace_of(name).unit.rows
    on = BANDS.column() if "banded" in name else (1.0, 0.0)
    displaces = any(word in name for word in ("fixed", "truncated"))
    others = (-1.0 if displaces else 0.0,) * (EXAMPLES - size)
    group = (1.0,) * size
    nulls = (0.0,) * size if "zero_out" in RUNS[name][0].adjacencies[:1] else ()
    edges = np.concatenate(([-np.inf], np.linspace(-EXAMPLES - 5.0, EXAMPLES + 5.0, 300), [np.inf]))

    def masses(rows: tuple[float, ...]) -> Array:
        law: dict[tuple[float, float], float] = {}
        for chance, (first, second) in batches(name, rows):
            sums = (first * on[0], second * on[0] + first * on[1])  # the noise is w, and the release C g + w
            law[sums] = law.get(sums, 0.0) + chance
        cells = {at: np.diff(stats.norm.cdf(edges, at, SIGMA)) for at in {one for sums in law for one in sums}}
        return np.asarray(sum(chance * np.outer(cells[a], cells[b]) for (a, b), chance in law.items()))

    return Truth(masses(others + group), masses(others + nulls))


_CELLS = 2e-2
"""What cells may hide, relative."""

# -- every function that returns a lower bound -------------------------------------------------------------------------


def _account(trace: Trace, truth: Truth) -> Iterator[tuple[float | None, float]]:
    for name in ACCOUNTANTS:
        if name.startswith("dp-accounting"):  # bounds nothing from below, and takes long
            continue
        for ask in (partial(ACCOUNTANTS[name], trace, DELTA, 1), partial(account, trace, DELTA, name)):
            with suppress(UnsupportedMechanism):
                yield ask().lower_epsilon, truth.epsilon(DELTA)


def _curve(trace: Trace, truth: Truth) -> Iterator[tuple[float | None, float]]:
    curve = privacy_curve(trace)
    yield curve.delta(EPSILON).lower, truth.delta(EPSILON)
    yield curve.advantage.lower, truth.delta(0.0)
    rates = np.array(FALSE_POSITIVE_RATES)
    _, missed = curve.trade_off(rates)
    for place, rate in enumerate(FALSE_POSITIVE_RATES):
        best = truth.true_positive_rate(rate)
        yield curve.true_positive_rate(rate).lower, best
        yield None if missed is None else 1.0 - float(missed[place]), best
    profile = curve.profile
    for place in range(0, len(profile.epsilons), 97):
        least = None if profile.lower is None else float(profile.lower[:, place].max())
        yield least, truth.delta(float(profile.epsilons[place]))


def _risk(trace: Trace, truth: Truth) -> Iterator[tuple[float | None, float]]:
    shown = attack_risk(privacy_curve(trace)).as_dict()
    yield shown.get("advantage_at_least"), truth.delta(0.0)
    for rate in FALSE_POSITIVE_RATES:
        yield shown.get(f"{accounting.attacks.rate_name(rate)}_at_least"), truth.true_positive_rate(rate)


def _given(trace: Trace, truth: Truth) -> Iterator[tuple[float | None, float]]:
    yield epsilon_of_examples(trace, [0], [[1.0]], DELTA).lower, truth.epsilon(DELTA)
    yield curve_of_examples(trace, [0], [[1.0]]).advantage.lower, truth.delta(0.0)


def _individual(trace: Trace, truth: Truth) -> Iterator[tuple[float | None, float]]:
    for method in INDIVIDUAL_ACCOUNTANTS:
        found = individual_epsilons([0], [[1.0]], trace, DELTA, method).lower
        yield None if found is None else float(found[0]), truth.epsilon(DELTA)


def _together(trace: Trace, truth: Truth) -> Iterator[tuple[float | None, float]]:
    both = account_together([trace.until(1)] * 2, DELTA)
    if _is_halved(trace):
        yield both.lower_epsilon, truth.epsilon(DELTA)
    yield account_together([trace.until(1)], DELTA).lower_epsilon, truth.epsilon(DELTA)
    yield account_together([trace], DELTA).lower_epsilon, truth.epsilon(DELTA)


def _given_together(trace: Trace, truth: Truth) -> Iterator[tuple[float | None, float]]:
    halves = [(trace.until(1), [0], [[1.0]])] * 2 if _is_halved(trace) else [(trace, [0], [[1.0]])]
    yield epsilon_of_examples_together(halves, DELTA).lower_epsilon, truth.epsilon(DELTA)


def _is_halved(trace: Trace) -> bool:
    """Whether two runs of half the steps are one run: two runs of half an epoch are two epochs."""
    return trace.segments[0].sampling.draws in (Draws.INDEPENDENT, Draws.SUBSET)


def _pld(trace: Trace, truth: Truth) -> Iterator[tuple[float | None, float]]:
    yield epsilon_pld(trace, DELTA).lower, truth.epsilon(DELTA)
    yield delta_pld(trace, EPSILON).lower, truth.delta(EPSILON)
    yield group_epsilons(trace, DELTA, (1,))[0].lower, truth.epsilon(DELTA)


LOWER: dict[str, Callable[[Trace, Truth], Iterator[tuple[float | None, float]]]] = {
    "account": _account,
    "account_together": _together,
    "epsilon_of_examples_together": _given_together,
    "curve_of_examples, epsilon_of_examples": _given,
    "group_epsilons and pld": _pld,
    "individual_epsilons": _individual,
    "privacy_curve": _curve,
    "attack_risk": _risk,
}


OF_GIVEN = ("curve_of_examples, epsilon_of_examples", "epsilon_of_examples_together", "individual_epsilons")
REFUSED = {(function, name) for function in OF_GIVEN for name in RUNS if "turn" in name}
REFUSED |= {(function, "in order, banded") for function in OF_GIVEN}
REFUSED |= {(function, "users") for function in (*OF_GIVEN, "group_epsilons and pld")}
"""Questions about single rows that have no proven answer."""

WITHOUT_LOWER: dict[str, Callable[[Trace], PrivacyEstimate]] = {
    "account_choice": lambda trace: accounting.account_choice(trace, ExponentialChoice(3, 0.1), DELTA),
    "account_selection": lambda trace: accounting.account_selection(trace, RandomTrials(5), DELTA),
}
"""Functions whose result has a place for a lower bound, which they never know."""

SAY_NOTHING = {
    *("AdvantageBudget", "EpsilonBudget", "RhoBudget", "TruePositiveRateBudget"),
    *("calibrate_decay", "calibrate_noise_multiplier", "noise_multiplier_within_budget"),
    *("count_within_budget", "length_within_budget"),
    *("SAMPLINGS", "SCHEDULES", "make_schedule", "parse_schedule", "planned_trace", "read_trace", "write_trace"),
}
"""Public names that bound nothing from below: costs and noise are rounded up, and the rest makes or stores traces."""


def test_every_public_name_and_every_sampling_is_tried() -> None:
    """What is new in `accounting.__all__`, or a sampling that a trace may have, joins one of the tables above."""
    data = {name for name in accounting.__all__ if isinstance(getattr(accounting, name), type)}
    data |= {"Release", "NoiseSchedule"}
    tried = {name for names in LOWER for name in names.replace(" and pld", "").split(", ")}
    tried |= {"ACCOUNTANTS", "INDIVIDUAL_ACCOUNTANTS", *WITHOUT_LOWER, *SAY_NOTHING}
    assert set(accounting.__all__) - (data - SAY_NOTHING) == tried
    assert {type(sampling) for sampling, _ in RUNS.values()} == set(stored_kinds())


@pytest.mark.parametrize("function", WITHOUT_LOWER)
@pytest.mark.parametrize("name", ["full", "shuffled", "truncated"])
def test_the_best_of_several_runs_has_no_lower_bound(function: str, name: str) -> None:
    assert WITHOUT_LOWER[function](trace_of(name)).lower_epsilon is None


@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("function", LOWER)
def test_no_lower_bound_is_above_what_brute_force_finds(function: str, name: str) -> None:
    trace, truth = trace_of(name), truth_of(name)
    if (function, name) in REFUSED:
        with pytest.raises(UnsupportedMechanism, match=r"no epsilon of given examples|protects users"):
            list(LOWER[function](trace, truth))
        return
    given = 0
    for lower, exact in LOWER[function](trace, truth):
        assert lower is None or lower <= exact * (1 + _CELLS) + 1e-9, (lower, exact)
        given += lower is not None
    assert bool(given) == (name in KNOWN and not (function in OF_GIVEN and name == "allocated"))


@pytest.mark.parametrize(
    "name",
    ["poisson", "fixed", "fixed, of all", "full", "truncated", "truncated where all join", "a maximum of all"],
)
def test_lower_bounds_for_pairs_of_records(name: str) -> None:
    lower = group_epsilons(trace_of(name), DELTA, (2,))[0].lower
    assert (lower is not None) == (name in KNOWN)
    assert lower is None or lower <= truth_of(name, 2).epsilon(DELTA) * (1 + _CELLS)


def test_more_records_than_the_data_hold_have_none() -> None:
    """No run has them, and the pairs of its rounds are those of more members."""
    run = Trace(5, (Segment(0, 4, PoissonSampling(0.4), 2.0),))
    of_all, of_more = (account(run, 1e-5, "pld", size) for size in (5, 6))
    assert (of_all.lower_epsilon is None, of_more.lower_epsilon) == (False, None)
    assert of_more.epsilon > of_all.epsilon, "which an upper bound may be"


def test_without_a_full_batch_of_others_there_is_none() -> None:
    """Three of four records displace one record of a batch of two, where the pair has each displace one."""
    trace = trace_of("fixed")
    assert account(trace, DELTA, group_size=2).lower_epsilon is not None
    assert account(trace, DELTA, group_size=3).lower_epsilon is None
    assert account_together([trace] * 2, DELTA, 3).lower_epsilon is None
    assert privacy_curve(trace, 3).profile.lower is None


@pytest.mark.parametrize(("size", "adjacency"), [(2, "add_remove"), (1, "replace_one")])
def test_a_pure_release_about_several_records_has_none(size: int, adjacency: Adjacency) -> None:
    """Two steps of epsilon 2 are at most 0.87 apart in total variation, and randomised response of 4 is 0.96."""
    trace = Trace(9, releases=(PureRelease("answer", 2.0),), adjacency=adjacency)
    assert account(trace, DELTA, group_size=size).lower_epsilon is None
    assert privacy_curve(trace, size).advantage.lower is None
    assert known(account(replace(trace, adjacency="add_remove"), DELTA).lower_epsilon) > 1.9


def test_several_given_records_have_none_as_their_sums_are_rounded_up() -> None:
    """Beside a side query it is no bound at all: shifts of different contributions do not point in one direction."""
    trace, members = Trace(9, (Segment(0, 1, PoissonSampling(1.0), 1.0, (SideQuery("counts", 1.0),)),)), [[1.0], [0.0]]
    assert epsilon_of_examples(trace, [0], members, DELTA).lower is None
    assert epsilon_of_examples_together([(trace, [0], members)], DELTA).lower_epsilon is None
    assert curve_of_examples(trace, [0], members).profile.lower is None


def test_a_run_that_may_lack_the_record_leaves_none() -> None:
    """Its data may: then it costs nothing. Else the record displaces others, and takes part in the release."""
    run = Trace(90, (Segment(0, 9, FixedBatchSampling(90, 9), 1.0),), (GaussianRelease("pca", 4.0),))
    alone, both = (
        epsilon_of_examples_together([(run, [0], [[c]]) for c in each], DELTA) for each in ([1.0], [1.0, 0.0])
    )
    assert known(alone.lower_epsilon) <= alone.epsilon < 0.98 * both.epsilon
    assert both.lower_epsilon is None
    free = Trace(90, (Segment(0, 9, PoissonSampling(0.1), 1.0),))
    same = epsilon_of_examples_together([(run, [0], [[1.0]]), (free, [0], [[0.0]])], DELTA)
    assert (same.epsilon, same.lower_epsilon) == (alone.epsilon, alone.lower_epsilon)
    endless = replace(run, segments=(replace(run.segments[0], noise_multiplier=0.0),))
    assert epsilon_of_examples_together([(run, [0], [[1.0]]), (endless, [0], [[0.0]])], DELTA).lower_epsilon is None


def test_blocks_longer_than_are_told_apart_have_none() -> None:
    """They count as shorter ones, which cost more: 1e9 steps have about log 1000 less than the 17.1 of a million."""
    runs = [Trace(10, (Segment(0, steps, RandomAllocationSampling(steps), 0.21),)) for steps in (10**6, 10**9)]
    assert [account(run, 1e-5).lower_epsilon is None for run in runs] == [False, True]


def test_records_that_only_join_steps_with_noise_have_a_finite_cost() -> None:
    trace = Trace(9, (Segment(0, 1, PoissonSampling(1.0), 1.0), Segment(1, 1, PoissonSampling(1.0), 0.0)))
    found = epsilon_of_examples(trace, [0, 1], [[1.0, 0.0]], DELTA)
    assert known(found.lower) <= account(trace.until(1), DELTA).epsilon == pytest.approx(found.upper)
    assert epsilon_of_examples(trace, [0], [[1.0]], DELTA).lower == math.inf


@pytest.mark.parametrize("name", RUNS)
def test_upper_bounds_are_not_below_the_same_brute_force(name: str) -> None:
    trace, truth = trace_of(name), truth_of(name)
    assert account(trace, DELTA).epsilon >= truth.epsilon(DELTA) * (1 - 1e-9)
    assert privacy_curve(trace).advantage.upper >= truth.delta(0.0) * (1 - 1e-9)


def test_brute_force_is_the_closed_form_where_there_is_one() -> None:
    full = truth_of("full")
    assert full.epsilon(DELTA) == pytest.approx(account(trace_of("full"), DELTA, "gdp").epsilon, rel=_CELLS)
    assert account(trace_of("shuffled"), DELTA).epsilon > 1.05 * truth_of("shuffled").epsilon(DELTA)


def test_the_shuffled_epoch_of_the_issue_has_none() -> None:
    """60,000 examples in batches of 60: that of the worst order is 0.383, and simulations reach 0.062."""
    trace = Trace(60_000, (Segment(0, 1000, ShuffledSampling(1000), 1.0),), adjacency="zero_out")
    assert account(trace, 1e-6).epsilon == pytest.approx(4.8866, abs=1e-3)
    assert account(trace, 1e-6).lower_epsilon is None
    assert "advantage_at_least" not in attack_risk(privacy_curve(trace)).as_dict()
    assert privacy_curve(trace).advantage.lower is None
    assert not grows_at_least_linearly(trace)
    assert grows_at_least_linearly(replace(trace, segments=(Segment(0, 9, ShuffledSampling(1), 1.0),)))
    assert linear_growth(trace, 1e-6, 3) == pytest.approx(3 * 4.8866, abs=1e-2)


@pytest.mark.parametrize(
    "changed",
    [{"noise_follows_results": True}, {"ended_by_results": True}, {"filter": RenyiFilter(order=8, budget=0.1)}],
    ids=lambda changed: next(iter(changed)),
)
def test_runs_that_could_have_gone_otherwise_have_none(changed: dict[str, bool]) -> None:
    trace = replace(Trace(100, (Segment(0, 20, PoissonSampling(0.1), 1.0),)), **changed)  # type: ignore[arg-type]
    assert account(trace, DELTA, "pld").lower_epsilon is None
    assert epsilon_pld(trace, DELTA).lower is None
    assert privacy_curve(trace).advantage.lower is None
    assert individual_epsilons([0], [[1.0]], trace, DELTA, "pld").lower is None


def test_without_noise_the_bounds_are_infinite_and_one() -> None:
    trace = Trace(100, (Segment(0, 20, ShuffledSampling(5), 0.0),), adjacency="zero_out")
    assert account(trace, DELTA).lower_epsilon == math.inf
    assert privacy_curve(trace).advantage.lower == 1.0


@pytest.mark.parametrize("name", ["shuffled", "truncated"])
def test_files_hold_nothing_where_nothing_is_known(name: str) -> None:
    trace = trace_of(name)
    assert json.loads(json.dumps(account(trace, DELTA, "pld").as_dict()))["lower_epsilon"] is None
    assert not [key for key in attack_risk(privacy_curve(trace)).as_dict() if key.endswith("_at_least")]
