"""The exponential mechanism that chooses among runs on disjoint parts: its law, its cost, and where it is refused."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from dpsweep.accounting import (
    ExponentialChoice,
    InvalidInput,
    PoissonSampling,
    Segment,
    Trace,
    UnsupportedMechanism,
    account,
    account_choice,
    account_together,
    individual_epsilons,
    privacy_curve,
    read_trace,
    write_trace,
)
from dpsweep.accounting.accountants.methods import total_rdp
from dpsweep.accounting.accountants.selection import selected_rdp
from dpsweep.accounting.numerics.renyi import epsilon_improved

DELTA = 1e-5
RUN = Trace(1000, (Segment(0, 200, PoissonSampling(0.05), 1.0),))


def law(errors: list[int], epsilon: float) -> np.ndarray:
    weights = np.exp(-0.5 * epsilon * (np.array(errors) - min(errors)))
    return np.asarray(weights / weights.sum())


@pytest.mark.parametrize(("errors", "epsilon"), [([3, 0, 5, 1], 1.0), ([100, 99], 0.3), ([7, 7, 9], 3.0)])
def test_the_draws_follow_the_stated_law(errors: list[int], epsilon: float) -> None:
    choice, draws = ExponentialChoice(len(errors), epsilon), 20_000
    found = Counter(choice.draw(errors) for _ in range(draws))
    counts = [found[place] for place in range(len(errors))]
    assert chisquare(counts, draws * law(errors, epsilon)).pvalue > 1e-6


@given(
    st.lists(st.integers(0, 8), min_size=2, max_size=5),
    st.floats(0.01, 5.0),
    st.data(),
)
def test_one_more_example_moves_no_probability_by_more_than_epsilon(
    errors: list[int], epsilon: float, data: st.DataObject
) -> None:
    wrong = data.draw(st.lists(st.sampled_from([-1, 0, 1]), min_size=len(errors), max_size=len(errors)))
    other = [max(0, z + change) for z, change in zip(errors, wrong, strict=True)]
    ratios = np.log(law(errors, epsilon) / law(other, epsilon))
    assert np.abs(ratios).max() <= epsilon * (1 + 1e-9)


def test_a_failed_candidate_is_never_chosen_and_the_only_other_always_is() -> None:
    choice = ExponentialChoice(3, 1.0)
    assert {choice.draw([None, 10_000_000, None]) for _ in range(20)} == {1}
    assert {choice.draw([0, 10_000_000, 10_000_000]) for _ in range(20)} == {0}
    for errors in ([None, None, None], [1, 2], [1, -1, 2]):
        with pytest.raises(InvalidInput):
            choice.draw(errors)


@pytest.mark.parametrize("arguments", [(0, 1.0), (3, 0.0), (3, math.nan), (1001, 1.0), (2, 101.0)])
def test_an_impossible_choice_is_refused(arguments: tuple[int, float]) -> None:
    with pytest.raises(InvalidInput):
        ExponentialChoice(*arguments)


@pytest.mark.parametrize("accountant", ["pld", "rdp", "auto"])
def test_it_costs_the_larger_of_one_run_and_the_choice(accountant: str) -> None:
    one = account(RUN, DELTA, accountant).epsilon
    for epsilon in (0.1 * one, one, 3.0 * one):
        trace = replace(RUN, selection=ExponentialChoice(4, epsilon))
        found = account(trace, DELTA, accountant)
        assert found.epsilon == max(one, epsilon)
        assert (found.kind, found.lower_epsilon) == ("guarantee", None)
        assert found == account_choice(RUN, ExponentialChoice(4, epsilon), DELTA, accountant)


def test_the_exact_privacy_loss_of_a_small_case_stays_within_the_bound() -> None:
    """Two candidates that release whether a noisy count of their part exceeds 1/2, by randomised response."""
    flip, epsilon = 0.25, 0.8
    alone = math.log((1 - flip) / flip)
    bound = max(alone, epsilon)

    def released(parts: tuple[int, int, int]) -> dict[tuple[int, int], float]:
        """P(candidate, its output): an output of 1 is wrong on every example of the last part."""
        found: dict[tuple[int, int], float] = {}
        for outputs in itertools.product((0, 1), repeat=2):
            chance = math.prod((1 - flip) if out == bit else flip for out, bit in zip(outputs, parts[:2], strict=True))
            for place, share in enumerate(law([parts[2] * out for out in outputs], epsilon)):
                key = (place, outputs[place])
                found[key] = found.get(key, 0.0) + chance * share
        return found

    for parts in itertools.product((0, 1), (0, 1), range(4)):
        for changed in range(3):
            other = list(parts)
            other[changed] = 1 - parts[changed] if changed < 2 else parts[changed] + 1
            ours, theirs = released(parts), released((other[0], other[1], other[2]))
            loss = max(abs(math.log(ours[key] / theirs[key])) for key in ours)
            assert loss <= bound * (1 + 1e-9)


def test_it_adds_up_with_other_runs_by_renyi_dp_and_by_epsilons() -> None:
    trace = replace(RUN, selection=ExponentialChoice(4, 0.5))
    assert np.all(selected_rdp(trace) >= total_rdp(RUN))
    together = account_together([trace, trace, RUN], DELTA)
    rdp = 2 * selected_rdp(trace) + total_rdp(RUN)
    assert account_together([RUN] * 3, DELTA).epsilon <= together.epsilon <= float(epsilon_improved(rdp, DELTA))
    assert account(trace, DELTA).epsilon <= together.epsilon


def test_what_is_not_proven_is_refused() -> None:
    trace = replace(RUN, selection=ExponentialChoice(4, 0.5))
    with pytest.raises(UnsupportedMechanism, match="may lie in several parts"):
        account(trace, DELTA, "pld", group_size=2)
    for compute in (lambda: privacy_curve(trace), lambda: individual_epsilons([0], [[1.0]], trace, DELTA)):
        with pytest.raises(UnsupportedMechanism, match="one of 4 runs on disjoint parts of the data"):
            compute()


def test_it_is_stored_with_the_trace(tmp_path: Path) -> None:
    trace = replace(RUN, selection=ExponentialChoice(4, 0.5))
    write_trace(str(tmp_path / "trace.arrow"), trace)
    assert read_trace(str(tmp_path / "trace.arrow")) == trace


def test_a_choice_that_costs_more_than_its_runs_counts_in_every_total() -> None:
    cheap = replace(RUN, segments=(Segment(0, 1, PoissonSampling(0.001), 50.0),), selection=ExponentialChoice(2, 3.0))
    assert account(cheap, DELTA).epsilon == 3.0
    assert float(epsilon_improved(selected_rdp(cheap), DELTA)) > 2.5
    assert account_together([cheap] * 2, DELTA).epsilon > 5.0
