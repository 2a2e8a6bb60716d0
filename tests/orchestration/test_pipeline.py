"""`run_sweep` in one process: the whole flow without Ray."""

from __future__ import annotations

import contextlib
import json
import shutil
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dpsweep.accounting.errors import InvalidInput, StorageError
from dpsweep.accounting.records.sealed import read_sealed, write_sealed
from dpsweep.orchestration.execution.audit_copies import AuditRequest, audit_again
from dpsweep.orchestration.execution.backends import backend
from dpsweep.orchestration.execution.environment import EMBEDDED, IN_PROCESS
from dpsweep.orchestration.execution.in_process import nothing_left
from dpsweep.orchestration.execution.on_ray import embedded, on_cluster
from dpsweep.orchestration.pipeline import NoDisplay, Outcome, RunRequest, run_sweep
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.status import SweepStatus, TrialStatus
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.workers.own_code.imports import NO_CODE
from dpsweep.workers.spec import AuditSpec
from tests.orchestration.reference import assert_same_trial, run_undisturbed
from tests.orchestration.sample_grids import contents, in_process, key_in, small, trial_in
from tests.orchestration.told import Told

CHANGES = {"clipping": ["none", {"name": "flat", "bound": 1.0}], "noise": "constant", "seeds": 0}


def request(folder: Path, **changes: object) -> RunRequest:
    text = small(**{**CHANGES, **changes})
    return in_process(text, folder / "out", None)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_sweep(request(tmp_path_factory.mktemp("sweep")), NoDisplay())


def test_the_sweep_is_the_one_that_any_cluster_runs(outcome: Outcome, tmp_path: Path) -> None:
    assert not outcome.record.failed
    theirs = run_undisturbed(outcome.record.sweep, tmp_path)
    for point in outcome.record.points:
        assert_same_trial(outcome.files.trial(point.key), theirs.trial(point.key), point.is_private)


def test_a_finished_sweep_starts_no_cluster(outcome: Outcome, tmp_path: Path) -> None:
    plan = plan_sweep(outcome.record.sweep)
    assert backend(EMBEDDED, plan, outcome.files) is nothing_left
    assert backend(EMBEDDED, plan, SweepFiles(str(tmp_path))) is embedded
    assert backend("10.0.0.1:6379", plan, outcome.files) is on_cluster


def test_a_folder_with_this_very_sweep_is_continued_and_its_user_told(outcome: Outcome) -> None:
    folder = Path(outcome.files.root)
    before, told = contents(folder / "trials"), Told()
    again = run_sweep(replace(request(folder.parent), retry=("failed",)), told)
    assert f"--retry failed: no trial of {folder} has failed" in told.warnings
    assert told.keys == [], "nothing is trained again"
    assert contents(folder / "trials") == before
    (warning,) = [line for line in told.warnings if "is continued" in line]
    assert warning.startswith(
        f"{folder} holds this sweep, which is continued; 2 of 2 trials have results and keep them"
    )
    assert {status.state for status in again.record.statuses.values()} == {TrialState.FINISHED}


def test_nothing_is_trained_beside_results_of_other_data(outcome: Outcome, tmp_path: Path) -> None:
    shutil.copytree(outcome.files.root, tmp_path / "out")
    noted = trial_in(tmp_path / "out", "non-private-seed0").data_fingerprint
    digest = plan_sweep(outcome.record.sweep).trials[0].data_digest
    assert json.loads(read_sealed(noted, "") or b"")["data"] == digest
    assert stat.S_IMODE(Path(noted).stat().st_mode) == 0o600
    write_sealed(noted, json.dumps({"data": "0" * 64}).encode(), private=True)
    with pytest.raises(
        InvalidInput,
        match=r"'digits' have changed since trial non-private-seed0-.* are those of the earlier data",
    ):
        run_sweep(request(tmp_path))  # whose results would be shown as those of the new data
    shutil.rmtree(trial_in(tmp_path / "out", "flat-seed0").root)
    with pytest.raises(InvalidInput, match="'digits' have changed since trial non-private-seed0-"):
        run_sweep(request(tmp_path))


def test_warnings_and_ends_are_told(tmp_path: Path) -> None:
    told = Told()
    run_sweep(request(tmp_path, privacy={"noise_multiplier": 1.0, "delta": 0.01}), told)
    assert told.keys == [key_in(tmp_path / "out", name) for name in ("non-private-seed0", "flat-seed0")]
    assert any("delta is 0.01" in warning for warning in told.warnings)
    assert not any("continued" in warning for warning in told.warnings), "of a new folder"


class Replacing(NoDisplay):
    """Replaces the rows of a table when the sweep is planned and its trials are about to train."""

    def __init__(self, table: Path, rows: str) -> None:
        self._table, self._rows = table, rows

    @contextlib.contextmanager
    def watching(self, status: SweepStatus) -> Iterator[None]:
        self._table.write_text(self._rows)
        yield


def test_trials_on_data_that_change_meanwhile_do_not_train(tmp_path: Path) -> None:
    """With the data of then, the same command continues. Nor is a copy audited on others."""
    table = tmp_path / "people.csv"
    rows = [f"{number % 7},{'ab'[number % 2]}" for number in range(60)]
    before, after = ("x,y\n" + "\n".join(lines) + "\n" for lines in (rows, rows[::-1]))
    table.write_text(before)
    data = {"name": "csv", "path": str(table), "label": "y", "classes": ["a", "b"], "ranges": {"x": [0, 6]}}
    asked = request(tmp_path, data=data, model="logistic", sampling={"method": "poisson", "batch_size": 16})
    outcome = run_sweep(asked, Replacing(table, after))
    for status in outcome.record.statuses.values():
        assert status.state is TrialState.FAILED
        assert "the data 'people' are others than this trial is for: they have changed" in str(status.error)
        assert not Path(outcome.files.trial(status.key).spec).exists(), "nothing was begun"
    table.write_text(before)
    again = run_sweep(asked, NoDisplay())
    assert {status.state for status in again.record.statuses.values()} == {TrialState.FINISHED}
    table.write_text(after)
    auditing = AuditRequest((), AuditSpec(canaries=20), seed=0)
    with pytest.raises(InvalidInput, match="the data 'people' are others than this trial is for"):
        list(audit_again(again.files, again.record, auditing, NO_CODE, IN_PROCESS, lambda *_: None, lambda _: None))


class Removing(NoDisplay):
    """Removes the folder of the sweep when its first trial has ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_there = True

    def ended(self, trial: TrialStatus) -> None:
        if self._is_there:
            shutil.rmtree(self._folder)
        self._is_there = False


def test_a_sweep_whose_folder_was_removed_meanwhile_has_failed(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"was removed or moved while the sweep ran: .* run the sweep again"):
        run_sweep(in_process(small(**CHANGES), tmp_path / "out"), Removing(tmp_path / "out"))
    assert not (tmp_path / "out" / "report.html").exists()


class Moving(NoDisplay):
    """Moves the folder of the sweep when its report is written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def watching(self, status: SweepStatus) -> Iterator[None]:
        yield
        self._folder.rename(self._folder.with_name("moved"))


def test_a_sweep_whose_folder_was_moved_at_its_end_has_failed(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"was removed or moved while the sweep ran"):
        run_sweep(in_process(small(**CHANGES), tmp_path / "out"), Moving(tmp_path / "out"))


def test_a_scheduler_that_compares_trials_needs_a_cluster(tmp_path: Path) -> None:
    scheduler = {"name": "asha", "accept_unaccounted_selection": True}
    with pytest.raises(InvalidInput, match=r"runs one after the other; use scheduler fifo"):
        run_sweep(request(tmp_path, scheduler=scheduler), NoDisplay())
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.thinned(3)
@pytest.mark.parametrize("mode", ["token", "disabled", None])
def test_joining_a_cluster_without_authentication_warns(
    mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    told = Told()
    with pytest.raises(InvalidInput, match="no Ray cluster answers"):
        run_sweep(replace(request(tmp_path), address="127.0.0.1:1"), told)
    assert any("joined without authentication" in warning for warning in told.warnings) == (mode != "token")
