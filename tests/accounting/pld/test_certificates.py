"""What a certificate rests on: the mass at infinity, both directions, and no approximation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import GaussianRelease, Segment, Trace
from dpsweep.accounting.numerics.gaussian import gaussian_epsilon
from dpsweep.accounting.pld import composition, delta_pld, epsilon_pld, fourier
from dpsweep.accounting.pld.curve import Composed
from dpsweep.accounting.pld.fourier import compose, compose_upper
from dpsweep.accounting.pld.group_rounds import GroupRounds
from dpsweep.accounting.pld.lattice import LatticePlan, make_plan
from dpsweep.accounting.pld.loss import DIRECTIONS, Direction, discretise
from dpsweep.accounting.pld.saddlepoint import Cumulants, Saddle, cumulants, saddle_at_delta, saddle_at_epsilon
from dpsweep.accounting.pld.sensitivity import RoundLaw, SensitivityMixture, group_law
from tests.known import known

RATE, SIGMA = 0.2, 0.9
ROUND = group_law(PoissonSampling(RATE), 1).scaled(1 / SIGMA)
ROUND_LAW = RoundLaw.certain(ROUND)
OTHER = group_law(PoissonSampling(0.1), 2).scaled(1 / 1.1)
LOST = 1e-2
"""Probability that a round may lose to infinity here; usually it is a negligible share of delta."""


def planned(rounds: GroupRounds, direction: Direction, delta: float, tail: float) -> LatticePlan:
    own, other = (cumulants(rounds, each, tail) for each in (direction, *{*DIRECTIONS} - {direction}))
    saddle = replace(saddle_at_delta(own, math.log(delta)), log_delta=math.log(delta))
    return make_plan(own, other, saddle, 1e-3, tail, rounds.count)


def composed(
    rounds: GroupRounds, direction: Direction = Direction.REMOVE, delta: float = 0.02, tail: float = LOST
) -> Composed:
    with np.errstate(all="ignore"):
        return compose(rounds, planned(rounds, direction, delta, tail))


def exact_remove(epsilon: float) -> float:
    """One round: delta(eps) = P(x > c) - e^eps Q(x > c) with L(c) = eps."""
    cut = SIGMA**2 * math.log((math.exp(epsilon) - 1 + RATE) / RATE) + 0.5
    norm = stats.norm(0, SIGMA)
    return float(RATE * norm.sf(cut - 1) + (1 - RATE) * norm.sf(cut) - math.exp(epsilon) * norm.sf(cut))


@pytest.mark.parametrize("epsilon", [0.3, 0.8, 1.2])
def test_mass_at_infinity_is_part_of_delta(epsilon: float) -> None:
    """Where rounds lose as much as delta, a bound without it would be too low."""
    found = composed(GroupRounds(((ROUND_LAW, 1),)))
    assert found.upper.infinity > 0.3 * LOST
    assert found.upper.delta_at(epsilon) >= exact_remove(epsilon)
    assert found.lower.delta_at(epsilon) <= exact_remove(epsilon)
    assert found.upper.delta_at(epsilon) >= found.upper.infinity
    root = found.upper.epsilon_at(0.05).epsilon
    assert exact_remove(root) <= 0.05


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_masses_at_infinity_of_all_rounds_add_up(direction: Direction) -> None:
    rounds = GroupRounds(((ROUND_LAW, 3), (RoundLaw.certain(OTHER), 2)))
    plan = planned(rounds, direction, 0.05, LOST)
    each = [discretise(mixture, plan.spacing, direction, "upper", LOST).infinity_mass for mixture in (ROUND, OTHER)]
    with np.errstate(all="ignore"):
        both, upper = compose(rounds, plan), compose_upper(rounds, plan)
    assert 3 * each[0] + 2 * each[1] > 0.1 * LOST
    for curve in (both.upper, upper):
        assert curve.infinity == pytest.approx(3 * each[0] + 2 * each[1], rel=1e-6)


def test_what_is_cut_off_a_mixture_is_lost_to_infinity_in_one_direction_and_raises_the_other() -> None:
    wide = SensitivityMixture((0.0, 1.0, 3.0), (0.7, 0.28, 0.02))
    cut = wide.truncated(0.03)
    assert cut.sensitivities == (0.0, 1.0)
    assert cut.missing == pytest.approx(0.02)
    law = discretise(wide, 1e-3, Direction.REMOVE, "upper", 0.03)
    assert law.infinity_mass >= 0.02
    assert float(law.probabilities.sum()) + law.infinity_mass == pytest.approx(1.0, abs=1e-9)


def test_bounds_on_either_side_of_one_round() -> None:
    """The lower bound is below the exact delta and the upper one above, both closely."""
    found = composed(GroupRounds(((ROUND_LAW, 1),)), tail=1e-20)
    for epsilon in (0.3, 0.8, 1.2):
        below, above = found.lower.delta_at(epsilon), found.upper.delta_at(epsilon)
        assert below <= exact_remove(epsilon) <= above
        assert above - below <= 1e-3 * above


def test_errors_are_added_to_the_upper_bound_and_taken_from_the_lower() -> None:
    found = composed(GroupRounds(((ROUND_LAW, 1),)), tail=1e-20)
    for curve, sign in ((found.upper, 1), (found.lower, -1)):
        error = 0.1 * curve.delta_at(0.8) / math.exp(curve.log_scale)
        wrong = replace(curve, additive=curve.additive + error)
        assert wrong.delta_at(0.8) == pytest.approx((1 + 0.1 * sign) * curve.delta_at(0.8), rel=1e-6)
        assert sign * (wrong.epsilon_at(0.02).epsilon - curve.epsilon_at(0.02).epsilon) > 0.01


@pytest.mark.long
def test_merged_sensitivities_bound_what_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of many members, whose law is held in a few sensitivities."""
    trace = Trace(1000, (Segment(0, 5, PoissonSampling(0.3), 8.0),))
    exact = epsilon_pld(trace, 1e-5, 24)
    monkeypatch.setattr(fourier, "MAX_ATOMS", 6)
    merged = epsilon_pld(trace, 1e-5, 24)
    assert known(merged.lower) <= exact.upper
    assert merged.upper >= known(exact.lower)
    assert merged.upper > 1.01 * known(merged.lower), "merging costs precision"


RUN = Trace(1000, (Segment(0, 10, PoissonSampling(0.1), 1.0),))
"""Removing an example is the worse direction."""


def lowered(saddle: Saddle, generating: Cumulants, epsilon: float, log_delta: float) -> Saddle:
    """An approximation that takes the worse direction for the better one."""
    if generating.direction is Direction.ADD:
        return saddle
    return replace(saddle, epsilon=saddle.epsilon * epsilon, log_delta=saddle.log_delta + log_delta)


def test_a_misleading_approximation_costs_precision_and_never_the_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = epsilon_pld(RUN, 1e-5)

    def misleading(generating: Cumulants, log_delta: float) -> Saddle:
        return lowered(saddle_at_delta(generating, log_delta), generating, 0.2, 0.0)

    monkeypatch.setattr(composition, "saddle_at_delta", misleading)
    assert epsilon_pld(RUN, 1e-5).upper >= known(exact.lower)


def test_a_misleading_approximation_never_costs_the_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = delta_pld(RUN, 0.5)

    def misleading(generating: Cumulants, epsilon: float) -> Saddle:
        return lowered(saddle_at_epsilon(generating, epsilon), generating, 1.0, -6.0)

    monkeypatch.setattr(composition, "saddle_at_epsilon", misleading)
    assert delta_pld(RUN, 0.5).upper >= known(exact.lower)


def test_the_directions_differ_where_they_were_mistaken() -> None:
    """Else the two tests above would hold whichever direction is looked at."""
    plan: Any = [composed(GroupRounds(((ROUND_LAW, 10),)), direction, 1e-5, 1e-14) for direction in DIRECTIONS]
    remove, add = (each.upper.epsilon_at(1e-5).epsilon for each in plan)
    assert remove > 1.05 * add


def test_a_release_moves_with_every_member_of_a_group() -> None:
    trace = Trace(100, releases=(GaussianRelease("mean", 6.0),))
    assert epsilon_pld(trace, 1e-5, 3).upper == pytest.approx(gaussian_epsilon(3.0 / 6.0, 1e-5)[0], rel=1e-9)
