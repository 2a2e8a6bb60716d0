"""Snapshots of norms: when they are taken, and what one contribution says about several steps."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from dpsweep.accounting.numerics.renyi import sampled_gaussian_rdp_at
from dpsweep.workers.clipping import ClipRule, Examples
from dpsweep.workers.gradients.pass_results import BatchNorms
from dpsweep.workers.machine.checkpoint import save_checkpoint
from dpsweep.workers.training.norm_recorder import choose_rows, is_due
from dpsweep.workers.training.snapshot_intervals import EndedInterval, Measurement, SnapshotInterval, generator_rate

NORMS = torch.tensor([0.0, 0.3, 0.8, 5.0, float("inf")])


def rule(sensitivity: float) -> ClipRule:
    """Clipping at 1 under noise scaled to ``sensitivity``."""
    return ClipRule(sensitivity, lambda examples: torch.clamp(1.0 / examples.norms, max=1.0))


def measurement(norms: BatchNorms) -> Measurement:
    rows = torch.arange(len(norms.norms))
    return Measurement(Examples(norms.norms, rows, rows), norms.losses)


def interval(sensitivities: list[float], sigma: float) -> SnapshotInterval:
    measured = measurement(BatchNorms(NORMS, None, torch.zeros(len(NORMS))))
    made = SnapshotInterval.from_step(0, measured, generator_rate(4.0, sigma))
    for sensitivity in sensitivities:
        made.extend(rule(sensitivity))
    return made


@pytest.mark.parametrize("sigma", [0.0, 0.3, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("steps", [1, 7])
def test_contributions_under_one_rule_are_those_of_each_step(sigma: float, steps: int) -> None:
    made = interval([2.0] * steps, sigma)
    torch.testing.assert_close(
        made.ended().contributions, rule(2.0).contributions(made.measured.examples), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("sigma", [0.0, 0.3, 1.0, 30.0])
def test_contributions_under_several_rules_lie_between_root_mean_square_and_maximum(sigma: float) -> None:
    made = interval([1.0, 2.0, 4.0], sigma)
    each = torch.stack([rule(s).contributions(made.measured.examples) for s in (1.0, 2.0, 4.0)])
    assert (made.ended().contributions >= each.square().mean(0).sqrt() - 1e-9).all()
    assert (made.ended().contributions <= each.max(0).values + 1e-9).all()
    assert made.ended().contributions[-1] == 1.0


def test_a_restored_interval_repeats_every_bit() -> None:
    made = interval([1.0, 3.0], 1.2)
    again = SnapshotInterval.restored(made.state(), measurement)
    for each in (made, again):
        each.extend(rule(2.0))
    assert torch.equal(made.ended().contributions, again.ended().contributions)


def test_a_checkpoint_holds_of_each_example_what_differs_between_them(tmp_path: Path) -> None:
    """Norm and loss in float32, two sums in float64: neither groups and positions, nor what is the same for all."""
    examples = 10_000
    norms = BatchNorms(torch.rand(examples), None, torch.rand(examples))
    made = SnapshotInterval.from_step(0, measurement(norms), 1.0)
    for _ in range(3):
        made.extend(rule(2.0))
    save_checkpoint(str(tmp_path / "checkpoint"), "trial", made.state())
    assert (tmp_path / "checkpoint").stat().st_size < examples * (2 * 4 + 2 * 8) + 10_000


@pytest.mark.parametrize(
    ("times", "steps"),
    [(1.0, [0, 10, 20]), (3.0, [0, 4, 7, 10, 14, 17, 20, 24, 27]), (0.5, [0, 20]), (50.0, list(range(30)))],
)
def test_what_is_due_is_spread_evenly(times: float, steps: list[int]) -> None:
    assert [step for step in range(30) if is_due(step, times, 10)] == steps


def test_chosen_rows_are_distinct_and_follow_the_seed() -> None:
    rows = choose_rows(100, 20, seed=1)
    assert len(set(rows.tolist())) == 20
    assert torch.equal(rows, choose_rows(100, 20, seed=1))
    assert not torch.equal(rows, choose_rows(100, 20, seed=2))
    assert choose_rows(5, 20, seed=1).tolist() == [0, 1, 2, 3, 4]


def test_several_rules_count_as_the_mean_of_their_fourth_moments() -> None:
    """Of contributions 1 and 0.1 at sigma 1: far above their root mean square of 0.71."""
    made = interval([1.0, 10.0], 1.0)
    expected = math.sqrt(math.log((math.exp(6.0 * 1.0) + math.exp(6.0 * 0.01)) / 2.0) / 6.0)
    assert float(made.ended().contributions[3]) == pytest.approx(expected, rel=1e-4)
    assert expected > 0.93


def generator(made: SnapshotInterval, rule: ClipRule, norms: torch.Tensor) -> torch.Tensor:
    everyone = torch.arange(len(norms))
    return torch.expm1(made.rate * rule.contributions(Examples(norms, everyone, everyone)).double().square())


RENEWED = [[0], [1, 4], [], [2], [1, 2], [3]]
"""Rows whose norms are renewed before each of six steps."""


def renewals() -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(0)
    return [(torch.tensor(rows, dtype=torch.int64), 2.0 * torch.rand(len(rows), generator=rng)) for rows in RENEWED]


def test_under_rules_that_change_a_norm_counts_from_its_step_on() -> None:
    """As if each step had been counted with the norms and the rule of its own, to rounding."""
    made, norms = interval([], 1.0), NORMS.clone()
    moments = torch.zeros(len(NORMS), dtype=torch.float64)
    for (rows, renewed), sensitivity in zip(renewals(), [2.0, 3.0, 2.5, 4.0, 2.2, 3.1], strict=True):
        norms[rows] = renewed
        made.renew(rows, BatchNorms(renewed, None, renewed))
        each = rule(sensitivity)
        made.extend(each)
        moments += generator(made, each, norms)
    expected = (torch.log1p(moments / 6) / made.rate).sqrt()
    torch.testing.assert_close(made.ended().contributions, expected, rtol=1e-9, atol=0.0)
    assert torch.equal(made.measured.examples.norms, NORMS), "those of its first step"
    assert torch.equal(made.latest.examples.norms, norms)


@pytest.mark.parametrize("lengths", [[6], [3, 3], [1, 4, 1], [1] * 6])
def test_between_two_norms_under_one_rule_the_moment_changes_linearly(lengths: list[int]) -> None:
    """The intervals together count what linear interpolation gives, wherever snapshots divide the steps."""
    one, made = rule(2.0), interval([], 1.0)
    known = [[(0, norm)] for norm in NORMS.tolist()]
    for step, (rows, renewed) in enumerate(renewals()):
        for row, norm in zip(rows.tolist(), renewed.tolist(), strict=True):
            known[row].append((step, norm))
    ends, stored = np.cumsum(lengths).tolist(), list[EndedInterval]()
    for step, (rows, renewed) in enumerate(renewals()):
        if step in ends:
            last, made = made, made.continued(step, made.rate)
            stored += [last.before] if last.before is not None else []
        made.renew(rows, BatchNorms(renewed, None, renewed))
        made.extend(one)
    stored += made.settled()
    assert [each.steps for each in stored] == lengths
    found = torch.stack([made.rate * each.contributions.square() for each in stored]).expm1() / math.expm1(made.rate)
    counted = found * torch.tensor(lengths, dtype=torch.float64)[:, None]
    for row, points in enumerate(known):
        steps, norms = (torch.tensor(each) for each in zip(*points, strict=True))
        values = generator(made, one, norms) / math.expm1(made.rate)
        expected = np.interp(np.arange(6), steps, values)
        assert float(counted[:, row].sum()) == pytest.approx(float(expected.sum()), abs=1e-12)
        if lengths == [3, 3]:  # no two norms lie further apart than both intervals are long
            assert counted[:, row].tolist() == pytest.approx(expected.reshape(2, 3).sum(1).tolist(), abs=1e-12)


@pytest.mark.parametrize("lengths", [[2, 1, 3], [1, 2, 1, 2], [3, 3], [1, 1, 4]])
def test_under_rules_that_stand_for_some_steps_moments_change_linearly_within_each(lengths: list[int]) -> None:
    """Up to the norm that an example has when the next rule begins, and not across rules."""
    made, known = interval([], 1.0), [[(0, norm)] for norm in NORMS.tolist()]
    ends = np.cumsum(lengths).tolist()
    rules = [each for place, length in enumerate(lengths) for each in [rule(2.0 + place)] * length]
    for step, (rows, renewed) in enumerate(renewals()):
        for row, norm in zip(rows.tolist(), renewed.tolist(), strict=True):
            known[row].append((step, norm))
        made.renew(rows, BatchNorms(renewed, None, renewed))
        made.extend(rules[step])
    ended = made.ended()
    counted = 6.0 * torch.expm1(made.rate * ended.contributions.square())
    for row, points in enumerate(known):
        expected = 0.0
        for start, end in pairwise([0, *ends]):
            first = [norm for step, norm in points if step <= start][-1]
            knots = [(start, first), *((step, norm) for step, norm in points if start < step <= end)]
            steps, norms = zip(*knots, strict=True)
            expected += np.interp(range(start, end), steps, generator(made, rules[start], torch.tensor(norms))).sum()
        assert float(counted[row]) == pytest.approx(expected, rel=1e-9)


def test_a_mean_of_a_higher_order_is_larger_and_lies_below_the_maximum() -> None:
    means = []
    for order in (4.0, 8.0, 30.0, 1000.0):
        measured = measurement(BatchNorms(NORMS, None, torch.zeros(len(NORMS))))
        made = SnapshotInterval.from_step(0, measured, generator_rate(order, 1.0))
        for sensitivity in (1.0, 2.0, 4.0):
            made.extend(rule(sensitivity))
        means.append(made.ended().contributions)
    for lower, higher in pairwise(means):
        assert (lower <= higher + 1e-12).all()
    assert (means[-1] <= rule(1.0).contributions(made.measured.examples) + 1e-12).all()


@pytest.mark.parametrize("sample_rate", [0.001, 0.1, 1.0])
@pytest.mark.parametrize(("order", "sigma"), [(4, 1.0), (9, 0.7), (20, 3.0)])
def test_a_mean_costs_no_less_renyi_privacy_than_its_steps(order: int, sigma: float, sample_rate: float) -> None:
    """At every whole order up to that of the mean, as `SnapshotInterval` says."""
    rng = np.random.default_rng(order)
    sensitivities = (1.0 / rng.uniform(0.05, 1.0, 12)).tolist()
    measured = measurement(BatchNorms(torch.ones(1, dtype=torch.float64), None, torch.zeros(1)))
    made = SnapshotInterval.from_step(0, measured, generator_rate(order, sigma))
    for sensitivity in sensitivities:
        made.extend(rule(sensitivity))
    mean = float(made.ended().contributions[0])
    for each in range(2, order + 1):
        paid = math.fsum(sampled_gaussian_rdp_at(each, sample_rate, sigma * s) for s in sensitivities)
        assert paid <= 12 * sampled_gaussian_rdp_at(each, sample_rate, sigma / mean) * (1.0 + 1e-9)


def test_norms_of_an_age_are_found() -> None:
    made = interval([2.0] * 3, 1.0)
    made.renew(torch.tensor([1, 3]), BatchNorms(torch.ones(2), None, torch.ones(2)))
    made.extend(rule(2.0))
    assert made.as_old_as(2.0).tolist() == [0, 2, 4]
    assert made.continued(4, made.rate).as_old_as(1.0).tolist() == [0, 1, 2, 3, 4]
    assert made.as_old_as(5.0).tolist() == []
