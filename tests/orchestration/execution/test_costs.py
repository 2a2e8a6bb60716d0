"""What a run costs in the worst case: by every accountant and for every group size of its sweep."""

from __future__ import annotations

import pytest

from dpsweep.accounting import account, attack_risk, privacy_curve
from dpsweep.orchestration.execution.completion import Costs, costs, costs_as_planned
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.orchestration.sweeps.schema import SweepSpec, parse_sweep
from tests.orchestration.sample_grids import small

ACCOUNTING = {"group_sizes": [1, 2, 3], "also": ["pld", "rdp-classic"]}


@pytest.fixture(scope="module")
def sweep() -> SweepSpec:
    return parse_sweep(small(clipping="flat", noise="constant", seeds=0, accounting=ACCOUNTING))


@pytest.fixture(scope="module")
def planned(sweep: SweepSpec) -> PlannedTrial:
    (trial,) = plan_sweep(sweep).trials
    return trial


@pytest.fixture(scope="module")
def found(planned: PlannedTrial, sweep: SweepSpec) -> Costs:
    return costs_as_planned(planned, sweep)


def test_groups_are_accounted_by_privacy_loss_distributions(planned: PlannedTrial, found: Costs) -> None:
    """What one example costs, times their size, is less than they pay."""
    assert found.groups == (found.worst_case, *(account(planned.trace, 1e-5, "pld", size) for size in (2, 3)))
    assert found.groups[1].epsilon > 2.05 * account(planned.trace, 1e-5, "pld").epsilon


def test_attacks_are_bounded_for_one_record_and_every_group(planned: PlannedTrial, found: Costs) -> None:
    assert found.risks == tuple(attack_risk(privacy_curve(planned.trace, size)) for size in (1, 2, 3))


def test_a_run_as_planned_costs_what_any_run_of_its_trace_does(
    planned: PlannedTrial, sweep: SweepSpec, found: Costs
) -> None:
    assert found.weakened(planned.reasons) == costs(planned.trace, 1e-5, sweep).weakened(planned.reasons)
    assert (found.worst_case, *found.others) == (planned.worst_case, *planned.others)


def test_estimates_have_the_same_numbers(found: Costs) -> None:
    weaker = found.weakened(("known_seed", "noise_followed_results"))
    kinds = [claim.kind for claim in (weaker.worst_case, *weaker.others, *weaker.groups)]
    assert {*kinds, *(risk.kind for risk in weaker.risks)} == {"estimate"}
    reasons = {*(other.reasons for other in weaker.others), *(risk.reasons for risk in weaker.risks)}
    assert reasons == {("known_seed", "noise_followed_results")}
    assert [each.epsilon for each in weaker.groups] == [each.epsilon for each in found.groups]
