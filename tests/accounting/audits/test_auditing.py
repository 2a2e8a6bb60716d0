"""The audit's p-value against simulated mechanisms of known epsilon: false alarms stay within the stated confidence."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from scipy import stats

from dpsweep.accounting.audits import Guesses, audited_epsilon, best_audited_epsilon, p_value, provable
from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.numerics.gaussian import gaussian_epsilon
from dpsweep.workers.evaluation.attack_results import AuditResult
from dpsweep.workers.training.one_run_audit import audit_scores

AUDITS, CANARIES = 1000, 100


def audits(scores_of: str, strength: float, delta: float, confidence: float, groups: int = 1) -> list[AuditResult]:
    """`AUDITS` simulated audits.

    scores_of: ``nothing``, ``response`` (randomised response of epsilon ``strength``) or ``gaussian`` (the coin, plus
    noise of multiplier ``strength``).
    """
    generator = np.random.default_rng(7)
    names, belongs = [str(group) for group in range(groups)], np.arange(CANARIES) % groups
    found = []
    for _ in range(AUDITS):
        included = generator.random(CANARIES) < 0.5
        if scores_of == "nothing":
            scores = generator.normal(size=CANARIES)
        elif scores_of == "response":
            told = np.where(generator.random(CANARIES) < 1 / (1 + math.exp(-strength)), included, ~included)
            scores = told + 1e-3 * generator.random(CANARIES)
        else:
            scores = included + strength * generator.normal(size=CANARIES)
        found.append(audit_scores(scores, included, belongs, names, confidence, delta))
    return found


def false_alarms(results: list[AuditResult], epsilon: float) -> int:
    return sum(any(each.epsilon > epsilon for each in (one.everyone, *one.groups)) for one in results)


def is_within(alarms: int, confidence: float) -> bool:
    """Whether so many false alarms in `AUDITS` are plausible at the stated rate (one chance in 10,000)."""
    return bool(stats.binomtest(alarms, AUDITS, 1.0 - confidence, alternative="greater").pvalue > 1e-4)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("confidence", "groups"), [(0.8, 1), (0.95, 5)])
@pytest.mark.parametrize(
    ("scores_of", "strength", "epsilon", "delta"),
    [
        ("nothing", 0.0, 0.0, 0.0),
        ("nothing", 0.0, 0.0, 1e-5),
        ("response", 1.0, 1.0, 0.0),
        ("response", 3.0, 3.0, 0.0),
        ("gaussian", 1.0, gaussian_epsilon(1.0, 1e-3)[0], 1e-3),
        ("gaussian", 0.3, gaussian_epsilon(1 / 0.3, 1e-3)[0], 1e-3),
    ],
)
def test_false_alarms_are_no_more_than_stated(
    scores_of: str, strength: float, epsilon: float, delta: float, groups: int, confidence: float
) -> None:
    alarms = false_alarms(audits(scores_of, strength, delta, confidence, groups), epsilon)
    assert is_within(alarms, confidence), alarms
    assert not is_within(int(0.35 * AUDITS), confidence), "an unsound audit would be noticed"


def test_an_audit_that_takes_the_best_of_its_guesses_unpaid_is_caught() -> None:
    """The check can fail: bounds of five thresholds, each at the full level, raise more alarms than stated."""
    p_value_of = functools.cache(lambda made, correct: p_value(Guesses(CANARIES, made, correct), 0.0, 0.0))
    generator, alarms = np.random.default_rng(8), 0
    for _ in range(AUDITS):
        included = generator.random(CANARIES) < 0.5
        wins = np.cumsum(included[::-1])
        alarms += any(p_value_of(made, int(wins[made - 1])) < 0.05 for made in range(5, 100, 19))
    assert not is_within(alarms, 0.95)


def test_a_mechanism_with_little_privacy_is_found_out() -> None:
    results = audits("gaussian", 0.1, 1e-5, 0.95)
    assert min(result.everyone.epsilon for result in results) > 2.0
    assert all(math.isclose(result.confidence, 0.95) for result in results)


@pytest.mark.parametrize(("made", "correct"), [(10, 10), (40, 31), (40, 0), (0, 0)])
@pytest.mark.parametrize("epsilon", [0.0, 0.7, 4.0])
def test_the_p_value_is_that_of_the_theorem(made: int, correct: int, epsilon: float) -> None:
    """Term by term, from the definition; the tail of randomised response where delta is 0."""
    law = stats.binom(made, 1 / (1 + math.exp(-epsilon)))
    beta = sum(law.pmf(w) for w in range(correct, made + 1))
    alpha = max((sum(law.pmf(w) for w in range(correct - i, correct)) / i for i in range(1, correct + 1)), default=0.0)
    for delta in (0.0, 1e-4):
        expected = min(1.0, beta + 2 * 50 * delta * alpha)
        assert p_value(Guesses(50, made, correct), epsilon, delta) == pytest.approx(expected, rel=1e-9)


def test_bounds_grow_with_right_guesses_and_shrink_with_delta_and_confidence() -> None:
    bounds = [audited_epsilon(Guesses(200, 200, right), 1e-5, 0.95) for right in (100, 120, 150, 200)]
    assert bounds[0] == 0.0
    assert bounds == sorted(bounds)
    assert bounds[-1] == pytest.approx(-math.log(0.05 ** (-1 / 200) - 1), abs=0.05)
    everything = Guesses(200, 200, 200)
    assert audited_epsilon(everything, 1e-2, 0.95) < bounds[-1]
    assert audited_epsilon(everything, 1e-5, 0.999) < bounds[-1]
    assert best_audited_epsilon([everything, Guesses(200, 10, 10)], 1e-5, 0.95)[1] == everything


def test_few_canaries_prove_nothing() -> None:
    assert not provable(4, 0.95)
    assert audited_epsilon(Guesses(4, 4, 4), 0.0, 0.95) == 0.0
    assert provable(5, 0.95)


@pytest.mark.parametrize("wrong", [(0, 0, 0), (10, 11, 0), (10, 5, 6), (10, 5, -1)])
def test_impossible_guesses_are_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidInput, match="but must be"):
        Guesses(*wrong)
