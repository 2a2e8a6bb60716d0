"""Intervals of means, shares and differences, against exact tests and closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from dpsweep.orchestration.comparison.intervals import (
    TAIL,
    Array,
    ConfidenceInterval,
    Moments,
    RunValues,
    beside,
    bounds,
    difference_bounds,
    joined_runs,
    moments,
    paired,
    singles,
    unnoticed,
    unpaired,
)
from dpsweep.orchestration.comparison.settings import _spread_apart, pooled
from tests.known import known


def of_one(
    values: Array,
    resampled: Array,
    splits: npt.NDArray[np.int64],
    units: float = 0.0,
    reach: tuple[float, float] = (0.0, 1.0),
    overlap: float = 0.0,
) -> RunValues:
    """One number of each run: values [R], resampled [R, B]."""
    return RunValues(values[:, None], resampled[..., None], splits, np.array([units]), np.array([reach]), overlap)


def of_seeds(*values: float, **changes: Any) -> RunValues:
    """Runs whose test examples leave nothing to chance."""
    array = np.array(values)
    splits = np.array(changes.pop("splits", [0] * len(values)))
    return of_one(array, np.repeat(array[:, None], 50, 1), splits, **changes)


def ends(found: Moments, tail: float = TAIL) -> tuple[float, float]:
    low, high = singles(found, tail)
    return float(low[0]), float(high[0])


def test_seeds_alone_have_the_interval_of_student() -> None:
    values = (0.70, 0.74, 0.79, 0.75)
    found = moments(of_seeds(*values))
    half = stats.t.ppf(0.975, 3) * np.std(values, ddof=1) / 2.0
    assert ends(found) == pytest.approx((0.745 - half, 0.745 + half))
    assert (found.runs, found.covers) == (4, "seeds and test examples")


def test_differences_of_pairs_lose_what_pairs_share() -> None:
    one, other = of_seeds(0.50, 0.60, 0.70), of_seeds(0.41, 0.50, 0.61)
    assert difference_bounds(paired(one, other))[0] > 0.0 > difference_bounds(unpaired(one, other))[0]


def test_test_examples_that_two_settings_share_are_paired_without_common_seeds() -> None:
    luck = np.random.default_rng(0).normal(0.0, 0.05, 400)
    one, other = (of_one(np.array([mean]), mean + luck[None], np.zeros(1, dtype=np.int64)) for mean in (0.8, 0.7))
    low, high = difference_bounds(unpaired(one, other))
    assert high - low < 1e-8
    low, high = ends(moments(one))
    assert high - low > 0.1


def test_one_seed_says_that_its_interval_is_of_test_examples() -> None:
    draws = np.random.default_rng(0).normal(0.8, 0.02, (1, 4000))
    found = moments(of_one(np.array([0.8]), draws, np.zeros(1, dtype=np.int64)))
    assert found.covers == "test examples"
    low, high = ends(found)
    assert high - low == pytest.approx(2 * 1.96 * 0.02, rel=0.05)


def test_a_value_corrected_for_selection_lies_within_its_interval() -> None:
    """The correction takes all groups to be about as noisy as the chosen one, and overshoots where they are not."""
    gap = ConfidenceInterval(10.4, 2.3, 31.3, 2, "seeds and test examples", corrected=0.0)
    assert gap.within(-math.inf, math.inf).corrected == 2.3


@pytest.mark.parametrize("units", [1, 3, 80])
def test_a_share_of_nobody_has_the_interval_of_clopper_and_pearson(units: int) -> None:
    nobody, everybody = (ends(moments(constant(value, value, units=units))) for value in (0.0, 1.0))
    assert nobody == pytest.approx((0.0, stats.beta.ppf(0.975, 1, units)))
    assert everybody == pytest.approx((stats.beta.ppf(0.025, units, 1), 1.0))


def test_a_share_of_many_examples_has_the_interval_of_its_resamples() -> None:
    draws = np.random.default_rng(0).binomial(20000, 0.7, (1, 4000)) / 20000
    low, high = ends(moments(of_one(np.array([0.7]), draws, np.zeros(1, np.int64), 20000)))
    assert (high - low) / 2 == pytest.approx(1.96 * math.sqrt(0.7 * 0.3 / 20000), rel=0.05)


def constant(*values: float, units: float = 80.0) -> RunValues:
    """Runs that treat every test example alike."""
    array = np.array(values)
    return of_one(array, np.repeat(array[:, None], 50, 1), np.zeros(len(values), np.int64), units)


@pytest.mark.parametrize("examples", [1, 2, 3, 5, 6, 7, 30])
@pytest.mark.parametrize("level", [0.95, 0.99])
@pytest.mark.parametrize("join", [paired, unpaired])
def test_a_difference_of_every_example_is_as_sure_as_the_exact_test_of_mcnemar(
    examples: int, level: float, join: Any
) -> None:
    """If one of two models is right on all examples and the other on none, its p-value is 2 / 2**n."""
    right, wrong = constant(1.0, units=examples), constant(0.0, units=examples)
    low, _ = difference_bounds(join(right, wrong), (1.0 - level) / 2.0)
    _, high = difference_bounds(join(wrong, right), (1.0 - level) / 2.0)
    assert (low > 0.0) == (high < 0.0) == (2.0 / 2.0**examples < 1.0 - level)


def test_models_that_predict_alike_may_differ_on_other_examples() -> None:
    low, high = difference_bounds(paired(constant(0.5, 0.5), constant(0.5, 0.5)))
    assert (-low, high) == pytest.approx([stats.beta.ppf(0.975, 1, 80)] * 2)


def test_one_example_decides_nothing_however_many_seeds_agree_on_it() -> None:
    one, other = constant(1.0, 1.0, 1.0, 1.0, 0.0, units=1), constant(0.0, 0.0, 0.0, 0.0, 0.0, units=1)
    low, high = difference_bounds(paired(one, other))
    assert low <= 0.0 < high


@pytest.mark.parametrize(("unlike", "is_told"), [(5, False), (6, True)])
def test_few_unlike_examples_decide_no_more_than_the_exact_test_of_mcnemar(unlike: int, is_told: bool) -> None:
    """Of 20 examples: 2 / 2**5 is above 0.05, though the interval alone would exclude 0, and 2 / 2**6 below."""
    weights = np.random.default_rng(0).multinomial(20, np.full(20, 1 / 20), 4000) / 20
    right = np.arange(20)[None] >= np.array([[0], [unlike]])
    one, other = (of_one(each.mean(keepdims=True), (weights @ each)[None], np.zeros(1, np.int64), 20) for each in right)
    found = paired(one, other)
    assert float(bounds(found, np.array([[1.0, -1.0]]))[0][0]) > 0.0
    assert (difference_bounds(found)[0] > 0.0) == is_told


def test_many_seeds_tell_small_differences_of_many_examples_apart() -> None:
    """Of ten seeds, each errs on another tenth of the examples, and the other method on another tenth besides. No
    example differs by more than a tenth, so that squares of differences add up to two examples of 200."""
    places, draw = np.arange(200), np.random.default_rng(0)
    weights = draw.multinomial(200, np.full(200, 1 / 200), 300) / 200

    def runs(errs: int, units: int = 200) -> RunValues:
        right = np.array([(places - run) % 10 >= errs for run in range(10)], dtype=np.float64)
        return of_one(right.mean(1), right @ weights.T, np.zeros(10, np.int64), units)

    low, high = difference_bounds(paired(runs(1), runs(2)), 1e-4)
    assert 0.0 < low < 0.1 < high
    low, _ = difference_bounds(paired(runs(1, 10), runs(2, 10)), 1e-4)
    assert low <= 0.0, "ten examples decide less"


def test_splits_of_the_same_data_are_not_independent() -> None:
    values, splits = (0.70, 0.71, 0.80, 0.81, 0.75, 0.76), [0, 0, 1, 1, 2, 2]
    apart, overlapping = (moments(of_seeds(*values, splits=splits, overlap=share)) for share in (0.0, 0.25))
    assert apart.covers == "splits, seeds and test examples"
    half, value = stats.t.ppf(0.975, 2) * np.std([0.705, 0.805, 0.755], ddof=1), 0.755
    assert ends(apart)[1] - value == pytest.approx(half / math.sqrt(3.0))
    assert ends(overlapping)[1] - value == pytest.approx(half * math.sqrt(1.0 / 3.0 + 0.25))


@pytest.mark.parametrize(("splits", "seeds"), [(2, 5), (3, 3), (3, 1), (5, 2)])
@pytest.mark.parametrize("count", [2, 4])
def test_seeds_of_few_splits_do_not_stand_for_other_splits(splits: int, seeds: int, count: int) -> None:
    """A split moves a setting three times as much as a seed does. Splits that agree by chance decide nothing."""
    draw, weights, sweeps = np.random.default_rng(5), np.array([[1.0, -1.0]]), 300
    covered, place = np.zeros(2), np.repeat(np.arange(splits), seeds)
    for _ in range(sweeps):
        values = draw.normal(0.0, 3.0, (count, splits))[:, place] + draw.normal(size=(count, len(place)))
        runs = [of_seeds(*each, splits=place.tolist()) for each in values]
        pool = pooled(runs)
        low, high = ends(moments(runs[0], pool))
        below, above = (float(each[0]) for each in bounds(paired(runs[0], runs[1], pool), weights))
        covered += (low <= 0.0 <= high), (below <= 0.0 <= above)
    assert (covered / sweeps >= 0.92).all(), covered / sweeps


def test_splits_with_more_seeds_count_for_more_and_leave_fewer_others() -> None:
    """The mean over runs is that of two splits with weights of a third and two thirds: 5/9 of the variance of one."""
    values, splits = (0.70, 0.70, 0.70, 0.70, 0.80, 0.80), [0, 0, 0, 0, 1, 1]
    low, high = ends(moments(of_seeds(*values, splits=splits)))
    half = stats.t.ppf(0.975, 1) * np.std([0.7, 0.8], ddof=1) * math.sqrt(5.0 / 9.0)
    assert [low, high] == pytest.approx([np.mean(values) - half, np.mean(values) + half])


def test_two_seeds_that_agree_by_chance_are_no_certainty() -> None:
    """Their sample variance is 0, but each test example could have been another one. They treat the examples so
    differently that what seeds explain is more than the bootstrap's variance."""
    draws = np.random.default_rng(0).normal(size=(2, 1000))
    draws[1] -= (draws[0] @ draws[1] / (draws[0] @ draws[0]) + 0.1) * draws[0]
    runs = of_one(np.array([0.003, 0.003]), 0.003 + 0.01 * draws, np.zeros(2, dtype=np.int64))
    low, high = ends(moments(runs))
    assert low < -0.005 < 0.003 < 0.011 < high
    other = of_one(np.zeros(2), 0.01 * np.random.default_rng(1).normal(size=(2, 1000)), np.zeros(2, dtype=np.int64))
    low, high = difference_bounds(unpaired(runs, other))
    assert low < 0.0 < high


def settings(draw: np.random.Generator, spreads: tuple[float, ...], seeds: int, common: float) -> list[RunValues]:
    of_seed = draw.normal(0.0, common, seeds)
    return [of_seeds(*(of_seed + draw.normal(0.0, spread, seeds))) for spread in spreads]


@pytest.mark.parametrize("common", [0.0, 3.0])
def test_pooled_seeds_cover_means_and_differences(common: float) -> None:
    """Of six settings with three seeds each, which are related where seeds move all settings together."""
    draw, weights, sweeps = np.random.default_rng(1), np.array([[1.0, -1.0]]), 150
    covered, widths = np.zeros(2), np.zeros((2, 2))
    for _ in range(sweeps):
        runs = settings(draw, (1.0,) * 6, 3, common)
        pool = pooled(runs)
        low, high = ends(moments(runs[0], pool))
        below, above = (float(each[0]) for each in bounds(paired(runs[0], runs[1], pool), weights))
        covered += (low <= 0.0 <= high), (below <= 0.0 <= above)
        alone, apart = ends(moments(runs[0])), bounds(paired(runs[0], runs[1]), weights)
        widths += [[high - low, alone[1] - alone[0]], [above - below, float((apart[1] - apart[0])[0])]]
    assert (covered / sweeps >= 0.9).all(), covered / sweeps
    assert widths[1, 0] < 0.8 * widths[1, 1], "a difference is free of what all settings of a seed share"


@pytest.mark.parametrize(("seeds", "least"), [(2, 0.75), (3, 0.85), (5, 0.89)])
def test_a_setting_of_another_spread_keeps_its_own(seeds: int, least: float) -> None:
    """Eight times the spread of the five others. Two seeds may agree by chance, and then nothing shows it."""
    draw, covered, sweeps = np.random.default_rng(2), np.zeros(2), 150
    for _ in range(sweeps):
        runs = settings(draw, (*(1.0,) * 5, 8.0), seeds, 0.5)
        pool = pooled(runs)
        for place, each in enumerate((runs[0], runs[-1])):
            low, high = ends(moments(each, pool))
            covered[place] += low <= 0.0 <= high
    assert covered[0] / sweeps >= 0.9, covered
    assert covered[1] / sweeps >= least, covered


@pytest.mark.parametrize(("seeds", "narrower"), [(2, 0.7), (3, 0.85)])
def test_differences_from_a_baseline_are_pooled_over_what_is_compared_with_it(seeds: int, narrower: float) -> None:
    """Six settings beside one baseline that spreads half as much, and shares with them what a seed moves."""
    draw, weights, sweeps = np.random.default_rng(3), np.array([[1.0, -1.0]]), 150
    covered, widths = 0, np.zeros((sweeps, 2))
    for sweep in range(sweeps):
        *runs, baseline = settings(draw, (*(1.0,) * 6, 0.5), seeds, 2.0)
        pool = pooled([joined_runs(each, baseline) for each in runs])
        found, own = beside(runs[0], baseline, pool), paired(runs[0], baseline)
        (low,), (high,) = bounds(found, weights)
        covered += low <= 0.0 <= high
        widths[sweep] = high - low, float(np.subtract(*reversed(bounds(own, weights)))[0])
    assert covered / sweeps >= 0.93
    assert np.median(widths[:, 0]) < narrower * np.median(widths[:, 1])


def test_differences_are_widened_for_a_spread_that_goes_unnoticed() -> None:
    """By the factor of `unnoticed` beyond what Student's t of the pool says, where no F test rejects."""
    runs = [of_seeds(0.5 + each, 0.6, 0.7 - each) for each in (0.0, 0.1, 0.2, -0.1, 0.15, 0.05)]
    pool, weights, tail = pooled(runs), np.array([[1.0, -1.0]]), 0.01
    found = paired(runs[2], runs[4], pool)
    assert pool is not None
    deviation = np.sqrt(2.0 * float((pool.own - pool.shared)[0, 0]) / 3.0)
    low, high = bounds(found, weights, tail)
    assert high - low == pytest.approx(
        2.0 * unnoticed(2) * deviation * stats.t.isf(tail, 2 * (pool.settings - 1)), rel=1e-6
    )


@pytest.mark.parametrize(
    ("seeds", "times", "price", "of_other", "of_usual"),
    [(2, 4.0, 2.6, 37.0, 0.0), (2, 8.0, 3.5, 81.0, 0.0), (3, 4.0, 1.4, 25.0, 5.0)],
)
def test_no_rule_covers_a_spread_of_few_seeds_that_goes_unnoticed_at_the_width_of_the_pool(
    seeds: int, times: float, price: float, of_other: float, of_usual: float
) -> None:
    """Any interval m +- w(u) by a mean m of the seeds and their deviation u, beside a pool known to be 1.

    If it covers 93% of the settings that spread ``times`` as much and 95% of the usual ones, the mean E w of its half
    width for these is at least ``price`` times that by the pool: with P the two probabilities that it covers and any
    k, l >= 0, by weak duality E w >= min over w of (E w - k P_other - l P_usual) + 0.93 k + 0.95 l.
    """
    deviations = np.concatenate((np.linspace(0, 5, 1001)[1:], np.linspace(5, 6 * times, 1001)[1:]))
    widths = np.concatenate((np.linspace(0, 10, 201), np.geomspace(10, 60 * times, 200)[1:]))
    law = stats.chi(seeds - 1, scale=1.0 / np.sqrt(seeds - 1))
    steps = np.diff(deviations, prepend=0.0)
    usual, other = (law.pdf(deviations / spread) / spread * steps for spread in (1.0, times))
    gains = [
        k * share[:, None] * (2.0 * stats.norm.cdf(widths / spread) - 1.0)
        for k, share, spread in ((of_usual, usual, 1.0), (of_other, other, times))
    ]
    beyond = [max(1.0 - share.sum(), 0.0) for share in (usual, other)]  # the grid, where covering would cost nothing
    least = (usual[:, None] * widths - gains[0] - gains[1]).min(1).sum()
    least += of_usual * (0.95 - beyond[0]) + of_other * (0.93 - beyond[1])
    assert least > price * stats.norm.isf(0.025)


def test_a_spread_that_a_larger_one_hides_is_not_pooled() -> None:
    """As of private regressions: some fit alike with every seed, one badly, and one diverges."""
    alike = [of_seeds(0.146, 0.148 + each, 0.149) for each in (0.0, 0.001, -0.001, 0.002, -0.002)]
    pool = known(pooled([*alike, of_seeds(-0.9, -2.4, -1.3), of_seeds(-36.5, -47.2, -35.5)]))
    assert pool.settings == len(alike)
    assert pool.own[0, 0] < 1e-5


def test_settings_that_spread_alike_do_not_hide_each_other() -> None:
    """As of private regressions under two clipping methods, where one fits with every seed and one seldom."""
    fitting, failing = ((0.936, 0.984, 0.938), (0.964, 0.976, 0.957)), ((-1.979, 0.577, 0.622), (-1.642, 0.305, 0.692))
    runs, baseline = [of_seeds(*each) for each in (*fitting, *failing)], of_seeds(0.968, 0.964, 0.963)
    for each in (runs, [joined_runs(run, baseline) for run in runs]):
        pool = known(pooled(each))
        assert pool.settings == len(fitting)
        assert pool.own[0, 0] < 0.03**2


@pytest.mark.parametrize("count", [4, 8, 16])
def test_settings_that_spread_alike_are_hardly_ever_held_apart(count: int) -> None:
    """Whether seeds move them together or not: at most in one of a thousand sweeps."""
    draw, found = np.random.default_rng(4), 0
    for common in (0.0, 3.0):
        for _ in range(1000):
            runs = draw.normal(size=(count, 3, 1)) + common * draw.normal(size=(1, 3, 1))
            found += bool(_spread_apart(runs - runs.mean(1, keepdims=True), 2).any())
    assert found <= 2


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("common", [(0.0, 0.0, 0.0), (0.1, -0.1, 0.0)])
def test_settings_that_do_not_spread_are_not_held_apart(common: tuple[float, ...]) -> None:
    """As of constant predictions, or of numbers that all settings have in common."""
    assert not _spread_apart(np.tile(np.array(common)[:, None], (4, 1, 1)), 2).any()


def test_one_setting_and_one_seed_pool_nothing() -> None:
    assert pooled([of_seeds(0.5, 0.6)]) is None
    assert pooled([of_seeds(0.5), of_seeds(0.6)]) is None
    assert pooled([of_seeds(0.5, 0.6, splits=[0, 1]), of_seeds(0.6, 0.8, splits=[0, 1])]) is not None, "two splits"
