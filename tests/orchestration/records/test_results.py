"""Results of trials as they are stored, and what is read of those that earlier versions stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from accounting.attacks import attack_risk, privacy_curve
from accounting.estimates import PrivacyEstimate
from orchestration.records.results import StoppedTrial, read_result, write_result
from orchestration.sweeps.grid import grid
from orchestration.sweeps.schema import parse_sweep
from tests.orchestration.sample_grids import small
from tests.orchestration.sample_results import stopped_of


@pytest.mark.parametrize(("accountant", "kind"), [("pld", "estimate"), ("filter", "guarantee")])
def test_the_cost_of_a_stopped_trial_is_read_as_an_estimate_unless_a_filter_enforced_it(
    accountant: str, kind: str, tmp_path: Path
) -> None:
    point = grid(parse_sweep(small(clipping="flat", noise="constant", seeds=0)))[0]
    cost, stopped = PrivacyEstimate(1.5, 1e-5, "add_remove", accountant), stopped_of(point)
    risks = (attack_risk(privacy_curve(stopped.trace)),)
    assert risks[0].kind == "guarantee"
    uri = str(tmp_path / "result.json")
    write_result(uri, replace(stopped, worst_case=cost, others=(cost,), groups=(cost,), risks=risks))
    found = read_result(uri)
    assert isinstance(found, StoppedTrial)
    assert [each.kind for each in (found.worst_case, *found.others, *found.groups)] == [kind] * 3
    assert found.risks == (replace(risks[0], kind="estimate"),)
