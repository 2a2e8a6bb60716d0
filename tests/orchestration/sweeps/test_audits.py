"""A plan tells what its audits can show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpsweep.orchestration.commands import plan_notes
from dpsweep.orchestration.commands.plan_notes import prospect_line
from dpsweep.workers.spec import AuditSpec
from dpsweep.workers.training.audit_prospects import AuditProspect
from tests.orchestration.invoking import printed
from tests.orchestration.sample_grids import small


def planned(tmp_path: Path, *flags: str, **changes: object) -> str:
    file = tmp_path / "sweep.yaml"
    file.write_text(small(clipping=["none", "flat"], noise="constant", data="digits", **changes))
    return printed("plan", file, *flags)


def test_once_for_both_seeds_and_not_for_the_baseline(tmp_path: Path) -> None:
    (found,) = json.loads(planned(tmp_path, "--json", audit={"canaries": 100}))["audits"]
    assert (found["audit"]["canaries"], round(found["claim"])) == (100, 5)
    assert 0.0 <= found["shown"][0] <= found["shown"][-1] < found["claim"]
    assert found["left_out"] == 50 / 1438
    assert [key.partition("-")[0] for key in found["trials"]] == ["flat", "flat"]


def test_names_the_trials_where_audits_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def simulated(spec: object, audit: AuditSpec, trace: object, claim: float, *size: object) -> AuditProspect:
        return AuditProspect(audit, claim, claim, (1.0, 2.0, 3.0), 200, None, 1.0, 0.0)

    monkeypatch.setattr(plan_notes, "prospect", simulated)
    file = tmp_path / "sweep.yaml"
    audit = {"canaries": 100, "kind": "gradient", "transcript": "iterates"}
    clipping = ["none", "flat", "dpsgd_f"]
    file.write_text(small(clipping=clipping, noise="constant", data="digits", audit=audit))
    shown = " ".join(printed("plan", file).split())
    assert shown.count("audit of flat-") == shown.count("audit of dpsgd_f-") == 1
    assert shown.count(" and 1 more, ε ") == 2


def test_in_a_line() -> None:
    audit = AuditSpec(2000, kind="gradient", transcript="iterates")
    found = AuditProspect(audit, 8.0, 7.0, (4.0, 5.0, 6.0), 200, None, 1.077, 0.0)
    assert prospect_line((), found) == (
        "audit of ε 8.00 by 2,000 canaries (gradient, iterates): shows about 5.00 (4.00 to 6.00 in 10 simulated runs) "
        "if its canaries leak all that may leak, of the 7.00 that they pay; 200 canaries show 0.6 of "
        "the claim; the canaries move the model about as far as if noise were 7.7% larger"
    )
    last = AuditProspect(AuditSpec(2000, kind="gradient"), 8.0, 8.0, (4.0, 5.0, 6.0), 200, None, 1.0, 0.0)
    assert prospect_line((), last) == (
        "audit of ε 8.00 by 2,000 canaries (gradient, last_model): shows about 5.00 (4.00 to 6.00 in 10 simulated runs)"
        "; 200 canaries show 0.3 of the claim; the canaries take as many of the model's parameters"
    )
    rows = AuditProspect(AuditSpec(100), 8.0, 8.0, (0.0, 1.0, 2.0), None, (1000, 2.1), 1.0, 0.035)
    assert prospect_line((), rows).endswith(
        "; no number that fits shows 0.3 of the claim, as 1,000 show about 2.10; about 3.5% of the training examples "
        "are left out"
    )


def test_nothing_without_an_audit(tmp_path: Path) -> None:
    assert "audits" not in json.loads(planned(tmp_path, "--json"))
