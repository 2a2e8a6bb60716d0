"""The tests of f-DP and of independent Gaussian canaries: published values, guarantees, and their limits."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dpsweep.accounting.audits import ASSUMPTIONS, Guesses, assumed_by_best, f_dp_epsilon, gdp_epsilon, p_value
from dpsweep.accounting.audits.gaussian_tests import contradicts_f_dp
from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.numerics.gaussian import gaussian_epsilon
from dpsweep.workers.training.one_run_audit import SHARES

DELTA = 1e-5


@pytest.mark.parametrize(
    ("canaries", "made", "correct", "error", "delta", "f_dp", "steinke"),
    [
        (2000, 2000, 1107, 0.05, 1e-5, 0.27018831662917364, 0.13965572273718863),
        (2000, 2000, 1360, 0.05, 1e-5, 1.2120570023953405, 0.6737647621439464),
        (2000, 1000, 900, 0.025, 1e-5, 3.103903967860788, 1.9878228709776522),
        (1000, 1000, 1000, 0.05, 1e-5, 12.334569480969549, 5.782283135394209),
        (10000, 10000, 10000, 0.05, 1e-5, 16.111034524848037, 7.834303247177559),
        (500, 100, 99, 0.01, 1e-6, 4.65019045765348, 2.6716717500630693),
        (1000, 1000, 800, 0.05, 1e-5, 2.333243176392898, 1.2539840942345108),
    ],
)
def test_bounds_are_those_of_jax_privacy(
    canaries: int, made: int, correct: int, error: float, delta: float, f_dp: float, steinke: float
) -> None:
    """Golden values of jax_privacy 2.0.0, with roots found to 1e-12:

    jax_privacy.auditing._epsilon_one_run_fdp(0, canaries, made, correct, error, delta), which epsilon_one_run_fdp calls
    for each threshold, and ._epsilon_one_run likewise. It finds the sigma of a delta to 1e-9 only.
    """
    guesses = Guesses(canaries, made, correct)
    assert f_dp_epsilon(guesses, delta, 1 - error) == pytest.approx(f_dp, abs=1e-9, rel=1e-7)
    assert p_value(guesses, steinke - 1e-6, delta) < error < p_value(guesses, steinke + 1e-6, delta)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.5, math.nan])
def test_a_delta_that_is_none_is_refused(delta: float) -> None:
    for epsilon_of in (f_dp_epsilon, gdp_epsilon):
        with pytest.raises(InvalidInput, match="delta is"):
            epsilon_of(Guesses(100, 100, 80), delta, 0.95)


@pytest.mark.parametrize(("right", "expected"), [(600, 1.1831999297179152), (700, 5.179943332196757)])
def test_the_epsilon_of_a_gaussian_is_that_of_jax_privacy(right: int, expected: float) -> None:
    """CanaryScoreAuditor(scores of 1000 members, of 1000 others).epsilon_from_gdp(0.05, 1e-5, 1e-12) of jax_privacy
    2.0.0: binary scores, with ``right`` ones of 600 or 700 members and 400 or 200 others. It shares the error among
    both rates at three thresholds.
    """
    false = {600: 400, 700: 200}[right]
    missed, others = (stats.beta.ppf(1 - 0.05 / 6, k + 1, 1000 - k) for k in (1000 - right, false))
    mean = stats.norm.isf(others) - stats.norm.ppf(missed)
    assert gaussian_epsilon(abs(mean), DELTA)[1] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("canaries", "most"), [(1000, 5.81), (10000, 8.12)])
def test_the_most_that_canaries_can_show(canaries: int, most: float) -> None:
    """The published ceilings of Opake 0.16: -log(0.05^(-1/m) - 1)."""
    guesses = Guesses(canaries, canaries, canaries)
    assert p_value(guesses, most - 0.02, 0.0) < 0.05 < p_value(guesses, most + 0.01, 0.0)
    assert p_value(guesses, most - 0.02, DELTA) > 0.05, "a delta takes from it"


def test_a_contradiction_grows_with_right_guesses_and_shrinks_with_the_mean() -> None:
    found = [f_dp_epsilon(Guesses(400, 400, right), DELTA, 0.95) for right in (200, 240, 300, 380)]
    assert found[0] == 0.0
    assert found == sorted(found)
    assert contradicts_f_dp(Guesses(400, 400, 300), 0.2, 0.05)
    assert not contradicts_f_dp(Guesses(400, 400, 300), 2.0, 0.05)
    assert f_dp_epsilon(Guesses(400, 400, 300), DELTA, 0.999) < found[2]
    assert f_dp_epsilon(Guesses(400, 0, 0), DELTA, 0.95) == 0.0


def response_of_one_mind(canaries: int, mean: float, generator: np.random.Generator) -> int:
    """Number of right guesses about coins that are mu-GDP each, while all have one privacy loss in common.

    The loss of the Gaussian mechanism is revealed, once for all, and then every coin by randomised response with it.
    """
    loss = abs(mean * generator.normal() + mean**2 / 2)
    return int(generator.binomial(canaries, 1 / (1 + math.exp(-loss))))


@pytest.mark.parametrize("mean", [0.3, 1.5])
def test_f_dp_holds_where_canaries_depend_on_each_other_and_independence_does_not(mean: float) -> None:
    """The test that assumes independence is caught by a mechanism without it, which the other allows for."""
    generator, runs = np.random.default_rng(3), 60
    true = gaussian_epsilon(mean, DELTA)[0]
    found = [Guesses(500, 500, response_of_one_mind(500, mean, generator)) for _ in range(runs)]
    alarms = sum(f_dp_epsilon(each, DELTA, 0.9) > true for each in found)
    assert stats.binomtest(alarms, runs, 0.1, alternative="greater").pvalue > 1e-4, alarms
    assert sum(gdp_epsilon(each, DELTA, 0.9) > true for each in found) > 0.2 * runs


@pytest.mark.parametrize("runs", [200, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_independent_canaries_of_a_gaussian_are_never_above_it(epsilon: float, runs: int) -> None:
    """Exact: each guess is right with probability Phi(mu / 2), and bounds exceed the truth as often as stated."""
    mean = mean_of(epsilon)
    canaries, right = 2000, stats.norm.cdf(mean / 2)
    law = stats.binom(canaries, right)
    counts = np.arange(canaries + 1)
    low = int(law.ppf(1e-6))
    above = [c for c in counts[low:] if gdp_epsilon(Guesses(canaries, canaries, int(c)), DELTA, 0.95) > epsilon]
    assert 0.03 < law.sf(above[0] - 1) <= 0.05
    generator = np.random.default_rng(7)
    bounds = [
        gdp_epsilon(Guesses(canaries, canaries, int(c)), DELTA, 0.95) for c in law.rvs(runs, random_state=generator)
    ]
    assert np.mean(np.array(bounds) > epsilon) <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / runs)
    assert np.median(bounds) > 0.6 * epsilon


def mean_of(epsilon: float) -> float:
    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_epsilon(middle, DELTA)[1] < epsilon else (low, middle)
    return low


def test_independent_canaries_are_all_guessed() -> None:
    with pytest.raises(InvalidInput, match="900 of 1000 canaries are guessed, but this test needs a guess about each"):
        gdp_epsilon(Guesses(1000, 900, 800), DELTA, 0.95)
    assert gdp_epsilon(Guesses(10, 10, 0), DELTA, 0.95) == 0.0
    assert 0.0 < gdp_epsilon(Guesses(10, 10, 10), DELTA, 0.95) < math.inf


PAGE = Path(__file__).parents[3] / "docs" / "accounting.md"


def test_the_table_of_the_page_says_what_is_assumed() -> None:
    table = PAGE.read_text().split("| test | assumes |\n|---|---|\n")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`[^|]* \| ([^|]+) \|$", table, re.MULTILINE) == [*ASSUMPTIONS.items()]
    assert [*ASSUMPTIONS] == [*SHARES]


def test_a_test_of_another_version_is_told_as_one() -> None:
    assert assumed_by_best({"ranks": 1.0, "later": 2.0}) == "later assumes what this version does not know"
    assert assumed_by_best({}).startswith("no known test assumes")
