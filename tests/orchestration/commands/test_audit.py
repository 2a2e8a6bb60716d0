"""`dpsweep audit`: a copy is trained and deleted, the trial stays as it is, and what was found is private."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from typer.testing import Result

from dpsweep.accounting.audits import ASSUMPTIONS
from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.orchestration.commands.audit import _lines
from dpsweep.orchestration.comparison.metrics import final_metrics
from dpsweep.orchestration.pipeline import render_again
from dpsweep.orchestration.store.later_results import AuditRecord, audit_schema
from dpsweep.orchestration.store.layout import SweepFiles
from tests.orchestration.execution.test_upkeep import KEYS, TEXT, files, trained, trained_sweep
from tests.orchestration.invoking import invoked
from tests.orchestration.public_values import words
from tests.orchestration.sample_grids import contents

__all__ = ["files", "trained"]

NAME = "gradient-iterates-100"


def audited(files: SweepFiles, *arguments: str, only: str = KEYS[0]) -> Result:
    asked = ["audit", files.root, "--only", only, "--canaries", "100", *arguments]
    return invoked(*asked, env={"MLFLOW_TRACKING_URI": "none"})


def test_it_proves_a_bound_that_stays_private_and_leaves_the_trial_as_it_is(files: SweepFiles) -> None:
    render_again(files.root)
    trials, public = contents(files.trials), Path(files.results).read_text()
    done = audited(files, "--json")
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)["audits"]
    assert 0.0 < found["lower_bound"] <= found["claim"]
    assert found["lower_bound"] == max(found["lower_bounds"].values())
    assert 0.99 * found["claim"] < found["of_canary"] <= found["claim"]
    assert {*found} - {"sensitive"} == {*audit_schema()["properties"]}
    stored = Path(files.audits(KEYS[0]), f"{NAME}.json")
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    assert contents(files.trials) == trials
    assert not Path(files.audited_copy).exists()
    assert Path(files.results).read_text() == public
    assert "in copy 1 of 1" in words(files.private_report)
    assert "What an audit proves" not in words(files.report)
    first = stored.read_bytes()
    repeated = audited(files, "--json")
    assert json.loads(repeated.stdout)["audits"] == [found], "the same copy counts once"
    assert "was audited so before, as shown; another --seed audits another copy" in repeated.stderr
    (again,) = json.loads(audited(files, "--json", "--seed", "1").stdout)["audits"]
    assert (found["number"], again["number"]) == (1, 2)
    assert stored.read_bytes() == first, "a later audit replaces none"
    assert stored.with_name(f"{NAME}-2.json").exists()
    stored.write_bytes(first.replace(b"lower_bound", b"upper_bound"))
    with pytest.raises(DataCorruption, match=f"{NAME}.json"):
        render_again(files.root)


@pytest.mark.parametrize(("bound", "said"), [(0.6, "60% of the claim"), (0.95, "that it CONTRADICTS the claim")])
def test_a_bound_is_compared_with_what_its_canaries_pay(bound: float, said: str) -> None:
    """Under a filter that is less than the claim, and the test with the best bound is told with what it assumes."""
    record = AuditRecord(
        key="filter",
        canaries=2000,
        kind="gradient",
        transcript="iterates",
        confidence=0.95,
        seed=0,
        delta=1e-5,
        claim=1.0,
        of_canary=0.9,
        lower_bound=bound,
        lower_bounds={"steinke": 0.1, "ranks": bound},
        groups={},
        guesses=0,
        correct=0,
        seconds=3.0,
    )
    first, second, third, _ = _lines(record, "file")
    assert said in first
    assert "canaries (gradient, iterates) that pay at most ε 0.900" in second
    assert f"ranks assumes {ASSUMPTIONS['ranks']}" in third


def test_what_cannot_be_audited_is_refused_before_any_training(files: SweepFiles) -> None:
    for arguments, reason in (
        (("--kind", "rows", "--transcript", "iterates"), "audit.transcript is iterates, but audit.kind is rows"),
        (("--canaries", "100000"), "audit.canaries is 100000, but the model has"),
        (("--confidence", "2"), "audit.confidence is 2"),
    ):
        refused = audited(files, *arguments).exception
        assert isinstance(refused, InvalidInput)
        assert reason in str(refused)
    nobody = audited(files, only="nobody").exception
    assert f"has no finished private trial 'nobody' to audit; it has: {KEYS[0]}" in str(nobody)
    assert not Path(files.root, "private", "audits").exists()


@pytest.mark.long
def test_raw_shows_it_in_report_results_and_metrics(tmp_path: Path) -> None:
    files = trained_sweep(tmp_path / "out", TEXT + "release: raw\n")
    key = next(path.name for path in Path(files.trials).iterdir())
    assert audited(files, "--kind", "rows", only=key).exit_code == 0
    assert audited(files, only=key).exit_code == 0
    rows = {row["key"]: row for row in json.loads(Path(files.results).read_text())}
    assert [audit["name"] for audit in rows[key]["audits"]] == [NAME, "rows-last_model-100"]
    assert rows[key]["audits"][0]["lower_bound"] <= rows[key]["epsilon"]
    assert all(words(files.report).count(f"in copy {place} of 2") == 1 for place in (1, 2))
    record = render_again(files.root).record
    trial = next(each for each in record.data().trials if each.key == key)
    assert final_metrics(trial)[f"audit/{NAME}/lower_bound"] == rows[key]["audits"][0]["lower_bound"]
    assert final_metrics(trial)[f"audit/{NAME}/confidence"] == 0.95


@pytest.mark.long
def test_a_cluster_trains_the_copy(files: SweepFiles) -> None:
    """On Ray it finds what this process finds, and leaves nothing behind."""
    here = json.loads(audited(files, "--json").stdout)["audits"][0]
    there = audited(files, "--json", "--address", "local")
    assert there.exit_code == 0, there.output
    found = json.loads(there.stdout)["audits"][0]
    assert {**found, "seconds": 0.0} == {**here, "seconds": 0.0}
    assert not Path(files.audited_copy).exists()
