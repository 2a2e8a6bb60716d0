"""Draws between rounds at two noise levels dominate the rounds between them, by quadrature that shares no code."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.pld import Direction, GroupRounds, RoundLaw, SensitivityMixture, group_law
from dpsweep.accounting.pld.levels import AnyRound, Between, from_few
from dpsweep.accounting.pld.saddlepoint import cumulants
from dpsweep.accounting.pld.sensitivity import AllocatedRound

Array = NDArray[np.float64]

_OUTPUTS = np.linspace(-14.0, 22.0, 36_001)
_FEW_OUTPUTS = np.linspace(-9.0, 14.0, 921)
_EPSILONS = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0, 7.0)


def hockey_sticks(one: AnyRound, epsilon: float) -> Array:
    """Return delta of removing and of adding, [2]."""
    if isinstance(one, AllocatedRound):
        assert one.steps == 2
        ratios = np.exp(one.shift * _FEW_OUTPUTS - one.shift**2 / 2)
        density = stats.norm.pdf(_FEW_OUTPUTS)
        weights = np.outer(density, density) * (_FEW_OUTPUTS[1] - _FEW_OUTPUTS[0]) ** 2
        likelihood = np.add.outer(ratios, ratios) / 2
    else:
        ((_, mixture),) = one.cases
        weights = stats.norm.pdf(_OUTPUTS) * (_OUTPUTS[1] - _OUTPUTS[0])
        pairs = zip(mixture.sensitivities, mixture.probabilities, strict=True)
        likelihood = np.asarray(sum(p * np.exp(a * _OUTPUTS - a**2 / 2) for a, p in pairs))
    removing = np.maximum(likelihood - math.exp(epsilon), 0.0)
    adding = np.maximum(1.0 - math.exp(epsilon) * likelihood, 0.0)
    return np.array([(weights * removing).sum(), (weights * adding).sum()])


def levels(kind: str) -> list[AnyRound]:
    shifts = np.geomspace(0.3, 3.0, 9).tolist()
    if kind == "random allocation":
        return [AllocatedRound(shift, 2) for shift in shifts]
    if kind == "anything":
        base = SensitivityMixture((0.0, 0.2, 0.65, 1.0), (0.5, 0.3, 0.1, 0.1))
    else:
        base = group_law(PoissonSampling(0.1), {"one example": 1, "a group": 3}[kind])
    return [RoundLaw.certain(base.scaled(shift)) for shift in shifts]


@pytest.mark.parametrize("kind", ["one example", "a group", "anything", "random allocation"])
def test_a_draw_between_two_levels_dominates_every_level_between_them(kind: str) -> None:
    rounds = levels(kind)
    few = GroupRounds(
        tuple((each, 1) for each in rounds if isinstance(each, RoundLaw)),
        allocated=tuple((each, 1) for each in rounds if isinstance(each, AllocatedRound)),
    )
    found = from_few(rounds, cumulants(few, Direction.REMOVE, 1e-15), 2.0, 1e99)
    assert found[rounds[0]] == rounds[0]
    assert found[rounds[-1]] == rounds[-1]
    for one in rounds[1:-1]:
        drawn = found[one]
        assert isinstance(drawn, Between)
        assert (drawn.weaker, drawn.stronger) == (rounds[0], rounds[-1])
        for epsilon in _EPSILONS:
            ends = hockey_sticks(drawn.weaker, epsilon), hockey_sticks(drawn.stronger, epsilon)
            draw = (1.0 - drawn.share) * ends[0] + drawn.share * ends[1]
            assert (hockey_sticks(one, epsilon) <= draw + 1e-9).all()


def test_levels_that_cost_too_much_between_others_are_kept() -> None:
    rounds = levels("one example")
    table = cumulants(
        GroupRounds(tuple((each, 5) for each in rounds if isinstance(each, RoundLaw))), Direction.REMOVE, 1e-15
    )
    kept = [
        sum(found[each] == each for each in rounds)
        for found in (from_few(rounds, table, 2.0, allowed) for allowed in (0.0, 0.3, 10.0))
    ]
    assert kept[0] == len(rounds) > kept[1] > kept[2] >= 2


def test_rounds_of_other_rates_are_not_drawn_between() -> None:
    laws = [RoundLaw.certain(group_law(PoissonSampling(0.1 + 0.1 * at), 1).scaled(1.0 + at)) for at in range(3)]
    table = cumulants(GroupRounds(tuple((each, 1) for each in laws)), Direction.ADD, 1e-15)
    assert from_few(laws, table, 2.0, 1e9) == {each: each for each in laws}
