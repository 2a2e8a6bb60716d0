"""Statistics of single epsilons, and their correlation with log loss, on cases whose answer is known."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dpsweep.accounting.jobs.release import GroupStatistics, ReleasedStatistics
from dpsweep.accounting.jobs.summaries import CountedEpsilons, Counting, Members, summarise
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.records.epsilon_files import Epsilons
from dpsweep.orchestration.execution.example_statistics import (
    density,
    exact_statistics,
    kind_of_capped,
    loss_correlation,
    loss_density,
    released_statistics,
)
from dpsweep.orchestration.store.published import EpsilonHistogram, GroupEpsilon, IndividualStatistics
from dpsweep.orchestration.store.results import read_exact_statistics, write_exact_statistics
from tests.known import known as present


def counted(epsilons: Epsilons, bound: float) -> CountedEpsilons:
    return CountedEpsilons(summarise(epsilons, Counting(bound)), [epsilons])


def correlation_of(values: NDArray[np.float64], losses: NDArray[np.float32]) -> float | None:
    return loss_correlation(Members.of(values, losses, values).with_loss)


LOSSES = np.geomspace(1e-4, 10.0, 50).astype(np.float32)
"""Equally spaced logarithms."""


def test_an_epsilon_that_grows_with_log_loss_correlates_perfectly() -> None:
    epsilons = 3.0 + 0.2 * np.log(LOSSES.astype(np.float64))
    assert correlation_of(epsilons, LOSSES) == pytest.approx(1.0, abs=1e-9)
    assert correlation_of(-epsilons, LOSSES) == pytest.approx(-1.0, abs=1e-9)
    raw = present(correlation_of(LOSSES.astype(np.float64), LOSSES))
    assert raw < 0.8, "the loss itself is not linear in its logarithm"


def test_constant_sides_and_few_examples_have_none() -> None:
    epsilons = np.linspace(1.0, 2.0, 50)
    assert correlation_of(np.ones(50), LOSSES) is None
    assert correlation_of(epsilons, np.ones(50, np.float32)) is None
    assert correlation_of(epsilons[:9], LOSSES[:9]) is None
    assert correlation_of(epsilons[:10], LOSSES[:10]) is not None


def test_losses_without_a_logarithm_are_left_out() -> None:
    epsilons = np.linspace(1.0, 2.0, 50)
    expected = correlation_of(epsilons, LOSSES)
    lost = np.array([0.0, math.inf, math.nan], np.float32)
    assert correlation_of(np.append(epsilons, [9.0, 9.0, 9.0]), np.append(LOSSES, lost)) == expected
    assert correlation_of(epsilons, np.zeros(50, np.float32)) is None


def worst_case(epsilon: float) -> PrivacyEstimate:
    return PrivacyEstimate(epsilon=epsilon, delta=1e-5, kind="guarantee", accountant="rdp", adjacency="add_remove")


def _epsilons() -> Epsilons:
    """Group 0 pays with its log loss, group 1 against it, group 2 has too few examples to say."""
    groups = np.repeat([0, 1, 2], [50, 50, 5]).astype(np.int32)
    losses = np.concatenate([LOSSES, LOSSES, LOSSES[:5]])
    sign = np.where(groups == 1, -1.0, 1.0)
    upper = 3.0 + sign * 0.2 * np.log(losses.astype(np.float64))
    return Epsilons(np.arange(105), groups, upper, upper, losses, 1e-5, "rdp", "estimate")


def test_it_is_computed_overall_and_for_groups_with_enough_examples() -> None:
    epsilons = _epsilons()
    found = exact_statistics(counted(epsilons, 100.0), ("a", "b", "c", "absent"), worst_case(100.0))
    assert [group.loss_correlation for group in found.groups] == [
        pytest.approx(1.0, abs=1e-9),
        pytest.approx(-1.0, abs=1e-9),
        None,
    ]
    assert found.loss_correlation == pytest.approx(np.corrcoef(epsilons.upper, np.log(epsilons.losses))[0, 1], abs=1e-6)


def test_epsilons_are_capped_at_the_worst_case_first() -> None:
    found = exact_statistics(counted(_epsilons(), 1e-3), ("a", "b", "c"), worst_case(1e-3))
    assert found.loss_correlation is None, "all examples pay the worst case"


def test_it_is_stored_and_claims_no_guarantee_that_nothing_enforced(tmp_path: Path) -> None:
    exact = exact_statistics(counted(_epsilons(), 100.0), ("a", "b", "c"), worst_case(100.0))
    uri = str(tmp_path / "summary.json")
    write_exact_statistics(uri, exact)
    assert read_exact_statistics(uri, "") == exact
    write_exact_statistics(uri, replace(exact, kind="guarantee"))
    assert read_exact_statistics(uri, "") == replace(exact, kind="output_specific")


@pytest.mark.parametrize(
    ("own", "worst", "found"),
    [
        ("guarantee", "guarantee", "guarantee"),
        ("guarantee", "estimate", "estimate"),
        ("estimate", "guarantee", "estimate"),
        ("guarantee", "lower_bound", "estimate"),
    ],
)
def test_capped_statistics_claim_no_more_than_the_weaker_side(own: str, worst: str, found: str) -> None:
    assert kind_of_capped(own, replace(worst_case(2.0), kind=worst)) == found  # type: ignore[arg-type]  # kinds


def test_exact_means_of_groups_have_their_own_standard_errors() -> None:
    found = exact_statistics(counted(_epsilons(), 100.0), ("a", "b", "c"), worst_case(100.0))
    own = _epsilons().upper[:50]
    assert found.groups[0].mean == pytest.approx(own.mean())
    assert found.groups[0].standard_error == pytest.approx(own.std(ddof=1) / math.sqrt(50))
    assert (found.disclosure, found.groups[0].examples) == ("raw", 50.0)


def test_released_numbers_stay_what_they_are() -> None:
    released = ReleasedStatistics(
        edges=(0.0, 1.0, 2.0),
        histogram=(31.0, 9.0),
        groups=(GroupStatistics(1, 41.0, 0.75, 0.125),),
        mean_epsilon=0.5,
        quantiles={0.5: 0.375, 0.9: 1.5},
    )
    exact = IndividualStatistics("raw", "estimate", "rdp", mean=7.0, reasons=("known_seed",))
    found = released_statistics(released, ("a", "b"), exact, 0.0625)
    assert (found.disclosure, found.kind, found.release_epsilon) == ("private", "estimate", 0.0625)
    assert (found.method, found.reasons) == ("rdp", ("known_seed",))
    assert (found.mean, found.median, found.quantiles) == (0.5, 0.375, {0.5: 0.375, 0.9: 1.5})
    assert found.groups == (GroupEpsilon("b", 0.75, 0.125, 41.0),)
    assert found.histogram == EpsilonHistogram((0.0, 1.0, 2.0), (31.0, 9.0))


def test_a_density_counts_every_example_with_a_usable_loss_once() -> None:
    """In parts or at once; the cells along the diagonal hold all points of a line."""
    losses, values = LOSSES.copy(), 1.0 + np.log(LOSSES.astype(np.float64)) - math.log(1e-4)
    losses[0], losses[1] = 0.0, np.inf
    whole = individual_epsilons_of(values, losses)
    parts = [whole.of(np.arange(50) < 20), whole.of(np.arange(50) >= 20)]
    summary = summarise(parts[0], Counting(99.0)).merged(summarise(parts[1], Counting(99.0)))
    found = loss_density(CountedEpsilons(summary, parts))
    assert found == loss_density(counted(whole, 99.0))
    assert found is not None
    counts = np.array(found.counts)
    assert counts.sum() == 48
    assert np.trace(counts) >= 40, "epsilon grows with the log of the loss"
    assert (found.x_edges[0], found.x_edges[-1]) == pytest.approx((math.log(losses[2]), math.log(10.0)))


def individual_epsilons_of(values: NDArray[np.float64], losses: NDArray[np.float32]) -> Epsilons:
    rows = np.arange(len(values))
    return Epsilons(rows, np.zeros(len(values), np.int32), values, values, losses, 1e-5, "rdp", "estimate")


def test_points_that_are_all_alike_have_a_density_and_none_have_none() -> None:
    found = present(density(np.ones(3), np.ones(3)))
    assert np.array(found.counts).sum() == 3
    assert density(np.zeros(0), np.zeros(0)) is None
