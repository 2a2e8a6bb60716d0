"""95% intervals cover what they should, in a simulation with seeds, shared test examples and groups."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from orchestration.comparison.intervals import Array, RunValues, interval, unpaired

SIZES, LOGITS, SEEDS, RESAMPLES, SWEEPS = (400, 150), (1.5, 0.3), 5, 150, 600
GROUPS = np.repeat(np.arange(len(SIZES)), SIZES)
OF_SEED, OF_EXAMPLE, BEHIND = 0.12, 1.0, 0.2
"""Standard deviations, in logits, of a seed and of an example; how far the second setting is behind the first."""


def expected(shift: float) -> tuple[float, float, float]:
    """Accuracy, worst group's accuracy and gap of a setting, over all seeds and examples there are."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    of_example = nodes * OF_EXAMPLE
    found = []
    for seed in nodes * OF_SEED * math.sqrt(2.0):
        by_group = [weights @ (1.0 / (1.0 + np.exp(-(logit + shift + seed + of_example)))) for logit in LOGITS]
        found.append((np.average(by_group, weights=SIZES), min(by_group), max(by_group) - min(by_group)))
    whole, worst, gap = weights @ np.array(found)
    return float(whole), float(worst), float(gap)


def one_sweep(draw: np.random.Generator) -> list[dict[str, RunValues]]:
    """Accuracy, worst group and gap of two settings whose runs share seeds and test examples."""
    difficulty, common = draw.normal(0.0, OF_EXAMPLE, len(GROUPS)), draw.normal(0.0, OF_SEED, SEEDS)
    drawn = draw.multinomial(len(GROUPS), np.full(len(GROUPS), 1.0 / len(GROUPS)), RESAMPLES)
    weights = np.concatenate((np.ones((1, len(GROUPS))), drawn.astype(np.float64)))
    settings = []
    for shift in (0.0, -BEHIND):
        seeds = common + draw.normal(0.0, OF_SEED, SEEDS)
        chance = 1.0 / (1.0 + np.exp(-(np.array(LOGITS)[GROUPS] + shift + seeds[:, None] + difficulty)))
        settings.append(numbers(draw.random(chance.shape) < chance, weights))
    return settings


def numbers(correct: npt.NDArray[np.bool_], weights: Array) -> dict[str, RunValues]:
    by_group = np.stack(
        [weights[:, g == GROUPS] @ correct[:, g == GROUPS].T / weights[:, g == GROUPS].sum(1)[:, None] for g in (0, 1)]
    )
    found = {"accuracy": weights @ correct.T / len(GROUPS), "worst": by_group.min(0)}
    found["gap"] = by_group.max(0) - by_group.min(0)
    splits = np.zeros(SEEDS, dtype=np.int64)
    return {name: RunValues(values[0], values[1:].T, splits) for name, values in found.items()}


def test_intervals_cover_93_to_97_percent() -> None:
    """Of means, of the worst group, of the gap between groups, and of paired differences between settings."""
    truth, behind = (dict(zip(("accuracy", "worst", "gap"), expected(s), strict=True)) for s in (0.0, -BEHIND))
    draw, covered = np.random.default_rng(14), dict.fromkeys(("accuracy", "worst", "gap", "difference"), 0)
    for _ in range(SWEEPS):
        first, second = one_sweep(draw)
        for name, runs in first.items():
            covered[name] += contains(runs, truth[name])
        difference = first["accuracy"].minus(second["accuracy"])
        covered["difference"] += contains(difference, truth["accuracy"] - behind["accuracy"])
    shares = {name: count / SWEEPS for name, count in covered.items()}
    assert all(0.93 <= share <= 0.97 for share in shares.values()), shares


def contains(runs: RunValues, value: float) -> bool:
    found = interval(runs)
    return found is not None and found.low <= value <= found.high


def of_seeds(*values: float, **changes: Any) -> RunValues:
    """Runs whose test examples leave nothing to chance."""
    array = np.array(values)
    splits = np.array(changes.pop("splits", [0] * len(values)))
    return RunValues(array, np.repeat(array[:, None], 50, 1), splits, **changes)


def test_seeds_alone_have_the_interval_of_student() -> None:
    values = (0.70, 0.74, 0.79, 0.75)
    found = interval(of_seeds(*values))
    assert found is not None
    half = stats.t.ppf(0.975, 3) * np.std(values, ddof=1) / 2.0
    assert (found.low, found.high) == pytest.approx((0.745 - half, 0.745 + half))
    assert (found.runs, found.covers) == (4, "seeds and test examples")


def test_differences_of_pairs_lose_what_pairs_share() -> None:
    one, other = of_seeds(0.50, 0.60, 0.70), of_seeds(0.41, 0.50, 0.61)
    paired, apart = interval(one.minus(other)), unpaired(one, other)
    assert paired is not None
    assert apart is not None
    assert paired.value == pytest.approx(apart.value) == pytest.approx(0.28 / 3)
    assert paired.low > 0.0 > apart.low


def test_test_examples_that_two_settings_share_are_paired_without_common_seeds() -> None:
    draw = np.random.default_rng(0)
    luck = draw.normal(0.0, 0.05, 400)
    one, other = (RunValues(np.array([mean]), mean + luck[None], np.zeros(1, dtype=np.int64)) for mean in (0.8, 0.7))
    found = unpaired(one, other)
    assert found is not None
    assert found.high - found.low < 1e-9
    assert interval(one) is not None


def test_one_seed_says_that_its_interval_is_of_test_examples() -> None:
    runs = RunValues(
        np.array([0.8]), np.random.default_rng(0).normal(0.8, 0.02, (1, 4000)), np.zeros(1, dtype=np.int64)
    )
    found = interval(runs)
    assert found is not None
    assert found.covers == "test examples"
    assert found.high - found.low == pytest.approx(2 * 1.96 * 0.02, rel=0.05)


def test_a_share_of_nobody_is_not_known_to_be_zero() -> None:
    """0 of 80: Clopper and Pearson's upper bound, where every resample says 0."""
    runs = RunValues(np.zeros(2), np.zeros((2, 50)), np.zeros(2, dtype=np.int64))
    none, all_right = (
        interval(runs, examples=80),
        interval(RunValues(runs.values + 1, runs.resampled + 1, runs.splits), examples=80),
    )
    assert none is not None
    assert all_right is not None
    assert (none.low, none.high) == pytest.approx((0.0, stats.beta.ppf(0.975, 1, 80)))
    assert (all_right.low, all_right.high) == pytest.approx((stats.beta.ppf(0.025, 80, 1), 1.0))


def constant(*values: float) -> RunValues:
    """Runs that treat every test example alike."""
    return RunValues(np.array(values), np.repeat(np.array(values)[:, None], 50, 1), np.zeros(len(values), np.int64))


@pytest.mark.parametrize("examples", [1, 2, 3, 5, 6, 7, 30])
@pytest.mark.parametrize("level", [0.95, 0.99])
def test_a_difference_of_every_example_is_as_sure_as_the_exact_test_of_mcnemar(examples: int, level: float) -> None:
    """If one of two models is right on all examples and the other on none, its p-value is 2 / 2**n."""
    ahead, behind = (interval(constant(value), level, examples=examples, possible=(-1.0, 1.0)) for value in (1.0, -1.0))
    apart = unpaired(constant(1.0), constant(0.0), level, examples)
    assert ahead is not None
    assert behind is not None
    assert apart is not None
    assert (ahead.low > 0.0) == (2.0 / 2.0**examples < 1.0 - level)
    assert (ahead.high, behind.low, behind.high) == pytest.approx((1.0, -1.0, -ahead.low))
    assert (apart.low, apart.high) == (ahead.low, ahead.high)


def test_models_that_predict_alike_may_differ_on_other_examples() -> None:
    alike = interval(constant(0.0, 0.0), examples=80, possible=(-1.0, 1.0))
    assert alike is not None
    assert (-alike.low, alike.high) == pytest.approx([stats.beta.ppf(0.975, 1, 80)] * 2)


def test_one_example_decides_nothing_however_many_seeds_agree_on_it() -> None:
    found = interval(constant(1.0, 1.0, 1.0, 1.0, 0.0), examples=1, possible=(-1.0, 1.0))
    assert found is not None
    assert found.low < 0.0 < found.value


def test_splits_of_the_same_data_are_not_independent() -> None:
    values, splits = (0.70, 0.71, 0.80, 0.81, 0.75, 0.76), [0, 0, 1, 1, 2, 2]
    apart, overlapping = (interval(of_seeds(*values, splits=splits, overlap=share)) for share in (0.0, 0.25))
    assert apart is not None
    assert overlapping is not None
    assert apart.covers == "splits, seeds and test examples"
    half = stats.t.ppf(0.975, 2) * np.std([0.705, 0.805, 0.755], ddof=1)
    assert apart.high - apart.value == pytest.approx(half / math.sqrt(3.0))
    assert overlapping.high - overlapping.value == pytest.approx(half * math.sqrt(1.0 / 3.0 + 0.25))


def test_numbers_that_are_none_have_no_interval() -> None:
    assert interval(of_seeds(0.5, math.nan)) is None
    assert unpaired(of_seeds(0.5), of_seeds(math.nan)) is None


def test_two_seeds_that_agree_by_chance_are_no_certainty() -> None:
    """Their sample variance is 0, but each test example could have been another one. They treat the examples so
    differently that what seeds explain is more than the bootstrap's variance."""
    draws = np.random.default_rng(0).normal(size=(2, 1000))
    draws[1] -= (draws[0] @ draws[1] / (draws[0] @ draws[0]) + 0.1) * draws[0]
    runs = RunValues(np.array([0.003, 0.003]), 0.003 + 0.01 * draws, np.zeros(2, dtype=np.int64))
    found = interval(runs)
    assert found is not None
    assert found.low < -0.005 < 0.003 < 0.011 < found.high
    other = RunValues(np.zeros(2), 0.01 * np.random.default_rng(1).normal(size=(2, 1000)), np.zeros(2, dtype=np.int64))
    apart = unpaired(runs, other)
    assert apart is not None
    assert apart.low < 0.0 < apart.high
