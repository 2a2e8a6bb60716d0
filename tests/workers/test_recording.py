"""Snapshots of norms: when they are taken, and what one contribution says about several steps."""

from __future__ import annotations

import math

import pytest
import torch

from workers.clipping import ClipRule, Examples
from workers.gradients import BatchNorms
from workers.recording import Interval, Measurement, choose_rows, is_due

NORMS = torch.tensor([0.0, 0.3, 0.8, 5.0, float("inf")])


def rule(sensitivity: float) -> ClipRule:
    """Clipping at 1 under noise scaled to ``sensitivity``."""
    return ClipRule(sensitivity, lambda examples: torch.clamp(1.0 / examples.norms, max=1.0))


def interval(sensitivities: list[float], sigma: float) -> Interval:
    rows = torch.arange(len(NORMS))
    made = Interval.from_step(0, Measurement(Examples(NORMS, rows, rows), torch.zeros(len(NORMS))), sigma)
    for sensitivity in sensitivities:
        made.extend(rule(sensitivity))
    return made


@pytest.mark.parametrize("sigma", [0.0, 0.3, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("steps", [1, 7])
def test_contributions_under_one_rule_are_those_of_each_step(sigma: float, steps: int) -> None:
    made = interval([2.0] * steps, sigma)
    torch.testing.assert_close(
        made.contributions, rule(2.0).contributions(made.measured.examples), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("sigma", [0.0, 0.3, 1.0, 30.0])
def test_contributions_under_several_rules_lie_between_root_mean_square_and_maximum(sigma: float) -> None:
    made = interval([1.0, 2.0, 4.0], sigma)
    each = torch.stack([rule(s).contributions(made.measured.examples) for s in (1.0, 2.0, 4.0)])
    assert (made.contributions >= each.square().mean(0).sqrt() - 1e-9).all()
    assert (made.contributions <= each.max(0).values + 1e-9).all()
    assert made.contributions[-1] == 1.0


def test_a_restored_interval_repeats_every_bit() -> None:
    made = interval([1.0, 3.0], 1.2)
    again = Interval.restored(made.state(), torch.device("cpu"))
    for each in (made, again):
        each.extend(rule(2.0))
    assert torch.equal(made.contributions, again.contributions)


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
    assert float(made.contributions[3]) == pytest.approx(expected, rel=1e-4)
    assert expected > 0.93


def test_norms_that_are_renewed_count_from_the_next_step_on() -> None:
    """As if each step had been counted with the norms and the rule of its own, to rounding."""
    made, norms = interval([], 1.0), NORMS.clone()
    first, second = rule(2.0), rule(3.0)
    moments = torch.zeros(len(NORMS), dtype=torch.float64)
    everyone = torch.arange(len(NORMS))
    for step, each in enumerate([first, first, second, second, second, first]):
        rows = torch.tensor([[0], [1, 4], [], [2], [1, 2], [3]][step], dtype=torch.int64)
        renewed = torch.rand(len(rows), generator=torch.Generator().manual_seed(step)) * 2.0
        norms[rows] = renewed
        made.renew(rows, BatchNorms(renewed, None, renewed))
        made.extend(each)
        moments += torch.expm1(made.rate * each.contributions(Examples(norms, everyone, everyone)).square())
    expected = (torch.log1p(moments / 6) / made.rate).sqrt()
    torch.testing.assert_close(made.contributions, expected, rtol=1e-12, atol=0.0)
    assert torch.equal(made.measured.examples.norms, NORMS), "those of its first step"
    assert torch.equal(made.latest.examples.norms, norms)
