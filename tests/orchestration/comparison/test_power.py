"""The differences that a design can show, before and after a sweep."""

from __future__ import annotations

import re

import pytest

from benchmarks.coverage import private
from benchmarks.simulated import Population, simulated
from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.comparison.power import (
    OF_SEEDS,
    Design,
    design,
    detectable,
    hidden_groups,
    hours_by_seeds,
    lines,
    warnings,
)
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from tests.known import known

SIX = Design(6, 300, 30, 10)


def test_seeds_examples_and_fewer_groups_show_smaller_differences() -> None:
    found = [detectable(SIX, seeds) for seeds in (2, 3, 5, 10)]
    assert [each.accuracy for each in found] == sorted((each.accuracy for each in found), reverse=True)
    assert all(each.known == tuple(sorted(each.known)) and len(each.known) == 3 for each in found)
    assert detectable(Design(6, 30000, 3000, 2), 5).known[1] < found[2].known[1] / 3
    assert 0.05 < found[2].accuracy < 0.15


def test_one_group_is_compared_in_accuracy_alone() -> None:
    alone, two = (detectable(Design(6, 300, 300, groups), 3) for groups in (1, 2))
    assert alone.known == (alone.accuracy,)
    assert alone.accuracy < two.accuracy  # half as many verdicts hold together
    shown = lines(Design(6, 300, 300, 1), 3)
    assert not [line for line in shown if "group" in line or "gap" in line]


def test_a_difference_of_the_named_size_is_found_in_most_simulated_sweeps() -> None:
    """Two settings that vary about as a plan assumes; a difference less than half as large is found less often."""
    size = detectable(Design(2, 2000, 2000, 1), 5).accuracy
    base, found = 1.75, []
    for share in (1.0, 0.4):
        lower = base - share * size / (0.85 * 0.15)
        population = Population((2000,), ((base,), (lower,)), 5, of_example=0.0, of_run=0.05)
        sweeps = list(simulated(population, 6, resamples=100))
        verdicts = [each.difference(private(each)[0], private(each)[1], "accuracy").verdict for each in sweeps]
        assert "worse" not in verdicts
        found.append(verdicts.count("better"))
        sizes = [each.detectable("accuracy") for each in sweeps]
        assert all(of is not None and 0.3 * size < of < 3.0 * size for of in sizes)
    assert found[0] > found[1]


def test_a_plan_shows_seeds_with_hours_and_warns_below_what_is_asked() -> None:
    shown = lines(SIX, 2, hours=lambda seeds: seeds / 2.0)
    assert "6 private settings" in shown[0]
    assert re.search(r"^   2 seeds: [\d.]+, [\d.]+, .* points, 1 hours of steps \(planned\)$", shown[1])
    assert any("10 seeds" in line and "5 hours of steps" in line for line in shown)
    assert f"{100 * OF_SEEDS:g} point" in shown[-1]
    (warned,) = warnings(SIX, 2, 0.086)
    assert "asks for 8.6 points" in warned
    assert re.search(r"; \d+ seeds would do$", warned)
    assert "more seeds do not help" in warnings(SIX, 2, 0.001)[0]
    assert warnings(SIX, 10, 0.2) == []
    assert "one seed" in warnings(SIX, 1, None)[0]


def test_the_smallest_group_is_that_of_the_test_examples() -> None:
    """Not of the training examples, of which ``keep`` may leave out most."""
    sweep = parse_sweep(_SWEEP.format("3 points").replace("data: digits", "data: {name: digits, keep: {8: 0.05}}"))
    planned = plan_sweep(sweep).trials
    found, sizes = design(sweep, planned), planned[0].dataset.test_group_sizes
    assert found == Design(2, sum(sizes), min(sizes), 10)
    assert known(found).smallest > 3 * planned[0].dataset.group_sizes[8]


def test_groups_too_small_to_be_shown_are_named_before_the_sweep() -> None:
    sweep = parse_sweep(_SWEEP.format("3 points"))
    planned = plan_sweep(sweep).trials
    assert hidden_groups(planned) == []
    sizes = sorted(planned[0].dataset.test_group_sizes)
    least = parse_sweep(f"{_SWEEP.format('3 points')}min_group_size: {sizes[1]}\n")
    (said,) = hidden_groups([*plan_sweep(least).trials, *plan_sweep(least).trials])
    smallest = {str(group) for group, size in enumerate(planned[0].dataset.test_group_sizes) if size <= sizes[1]}
    assert said.startswith(f"data digits: {len(smallest)} of 10 groups are not shown: ")
    assert {*re.findall(r"\d", said.split(": ")[2].split(".")[0])} == smallest
    assert f"fewer than min_group_size = {sizes[1]} test examples, or would give another group away; raise" in said


def test_a_sweep_that_tunes_first_shows_what_it_compares_after_that() -> None:
    """Its settings are not its candidates, and its hours are those of the tuning and of every seed."""
    text = _SWEEP.format("3 points").replace("data: digits", "data: {name: digits, public_fraction: 0.2}")
    tuned = f"{text}tune: {{parameters: {{clipping.bound: [1, 2, 4]}}, privacy: unaccounted}}"
    plain, sweep = parse_sweep(text), parse_sweep(f"{tuned}\nseeds: [0, 1]")
    planned = plan_sweep(sweep).trials
    assert len(planned) == 6
    assert design(sweep, planned) == design(plain, plan_sweep(plain).trials)
    hours = known(hours_by_seeds(sweep, len(planned), 6.0))
    assert [hours(seeds) for seeds in (2, 5)] == [10.0, 16.0]
    without = known(hours_by_seeds(plain, 2, 2.0))
    assert without(5) == 10.0
    drawn = f"{tuned.replace('unaccounted', 'private_selection, trials: 5')}\nnoise_source: os_entropy"
    assert hours_by_seeds(parse_sweep(drawn), 6, 6.0) is None


def test_refused_settings_are_not_compared() -> None:
    sweep = parse_sweep(
        _SWEEP.format("3 points").replace("[flat, individual]", "[{name: flat, bound: [1, -1]}, individual]")
    )
    plan = plan_sweep(sweep)
    found = known(design(sweep, plan.trials))
    assert plan.refusals
    assert found.settings == 2


def test_what_cannot_be_judged_is_said() -> None:
    sweep = parse_sweep(_SWEEP.format("3 points").replace("[flat, individual]", "flat"))
    assert design(sweep, plan_sweep(sweep).trials) is None
    assert "not judged" in warnings(None, 3, 0.03)[0]
    assert warnings(None, 3, None) == []


@pytest.mark.parametrize(("written", "share"), [("3 points", 0.03), ("0.03", 0.03), ("1 point", 0.01)])
def test_what_to_detect_is_in_points_or_a_share(written: str, share: float) -> None:
    assert parse_sweep(_SWEEP.format(written)).compare.detect == pytest.approx(share)


@pytest.mark.parametrize("written", ["much points", "3 %", "3", "-0.1"])
def test_what_cannot_be_detected_is_refused(written: str) -> None:
    with pytest.raises(InvalidInput, match="detect"):
        parse_sweep(_SWEEP.format(written))


_SWEEP = """
name: power
data: digits
model: logistic
clipping: [flat, individual]
privacy: {{target_epsilon: 3, delta: 1.0e-5}}
epochs: 1
sampling: {{method: poisson, batch_size: 256}}
compare: {{detect: {}}}
"""
