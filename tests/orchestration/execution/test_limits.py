"""A run that stops early under Ray Tune."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dpsweep.accounting.records.files import exists
from dpsweep.orchestration.execution.environment import EMBEDDED
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.status import SweepStatus
from tests.orchestration.test_limits import run, said, states


def enough(status: SweepStatus) -> str | None:
    return "enough" if any(trial.progress for trial in status.trials) else None


@pytest.mark.long
def test_tune_ends_its_trials_and_none_counts_as_stopped_by_a_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("RAY_AUTH_MODE", "disabled")  # as where another test of this process has used Ray
        patched.setattr(SweepStatus, "must_stop", property(enough))
        outcome = run(tmp_path, address=EMBEDDED, epochs=20, resources={"max_concurrent": 1})
    assert states(outcome) == [TrialState.PENDING] * 3
    first = outcome.files.trial(outcome.record.points[0].key)
    assert exists(first.checkpoint)
    assert not exists(first.result)
    assert said(outcome.files)[0] == "stopped"
    last = outcome.files.trial(outcome.record.points[2].key)
    assert not exists(last.spec), "it was never started"
    shutil.rmtree(outcome.files.trial(outcome.record.points[1].key).root, ignore_errors=True)
    again = run(tmp_path, epochs=20, resources={"max_concurrent": 1})
    assert states(again) == [TrialState.FINISHED] * 3
