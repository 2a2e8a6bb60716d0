"""`dpsweep record`, and what `status` and `list` say and do of a sweep that is not recorded as a whole."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from dpsweep.accounting.errors import DpsweepError, InvalidInput
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.ownership import exclusive
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.status import RecordingStatus
from dpsweep.orchestration.store.status_snapshot import (
    STALE_AFTER,
    TrialSnapshot,
    read_snapshot,
    write_snapshot,
)
from dpsweep.orchestration.sweeps.manifest import read_manifest
from dpsweep.orchestration.tracking import recorder
from dpsweep.orchestration.tracking.embedded import embedded_tracking_uri
from dpsweep.orchestration.tracking.mlflow import MlflowTracker
from dpsweep.orchestration.tracking.runs import MlflowRuns
from dpsweep.orchestration.tracking.tracker import TrackedSweep, TrackingUnavailable
from tests.orchestration.invoking import invoked, printed, refused
from tests.orchestration.processes import PATIENCE, start, wait_until
from tests.orchestration.sample_grids import small
from tests.orchestration.sample_results import stored_sample
from tests.orchestration.tracking.recordings import content, runs_of
from tests.warm import FORKS

from mlflow import MlflowClient  # isort: skip
from tests.known import known
from tests.orchestration.sample_snapshots import snapshot_of


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepFiles:
    """A stored sweep that ran without MLflow."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return stored_sample(tmp_path / "sweep")


def client_of(files: SweepFiles) -> MlflowClient:
    return MlflowClient(embedded_tracking_uri(files.local_folder))


def left_by_a_driver(files: SweepFiles, **changes: object) -> None:
    """A status whose driver recorded in the sweep's own store, and was killed or gave up long ago."""
    uri, manifest = embedded_tracking_uri(files.local_folder), known(read_manifest(files))
    recording = RecordingStatus(1, 3, 0.5, uri, "http://127.0.0.1:5000/#/", command=f"dpsweep record {files.root}")
    snapshot = snapshot_of(
        *(TrialSnapshot(key, TrialState.FINISHED, 20, 20) for key in ("a", "b", "c")),
        age=2.0 * STALE_AFTER,
        sweep_id=manifest.sweep_id,
        state="recording",
        recording=replace(recording, **changes),  # type: ignore[arg-type]  # fields of a Recording
    )
    write_snapshot(files.status, snapshot, private=False)


def test_what_ran_without_mlflow_is_recorded_once(files: SweepFiles) -> None:
    said, page = printed("record", files.root).splitlines()
    assert said.startswith("4 of 4 trials are recorded in MLflow at sqlite:///")
    assert page.startswith("http://127.0.0.1:5000/#/experiments/")
    before = content(client_of(files))
    kinds = Counter(tags["dpsweep.kind"] for _, _, tags, *_ in before.values())
    assert kinds == {"sweep": 1, "trial": 4}
    again = json.loads(printed("record", files.root, "--json"))
    assert (again["recorded"], again["trials"], again["is_complete"]) == (4, 4, True)
    assert content(client_of(files)) == before


def test_a_store_that_falls_silent_ends_it_with_the_count_and_the_command(
    files: SweepFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "PAUSES", (0.01, 0.02))
    monkeypatch.setattr(recorder, "SILENCE", 0.1)
    left_by_a_driver(files)
    whole, log_trial = [0], MlflowTracker.log_trial

    def falls_silent(self: MlflowTracker, trial: object) -> str:
        whole[0] += 1
        if whole[0] > 2:
            raise TrackingUnavailable("no answer")
        return log_trial(self, trial)  # type: ignore[arg-type]  # a PublishedTrial

    with monkeypatch.context() as patch:
        patch.setattr(MlflowTracker, "log_trial", falls_silent)
        ended = invoked("record", files.root)
    assert ended.exit_code == 3
    missing = f"2 of 4 trials are recorded in MLflow (no answer); `dpsweep record {files.root}` records the rest"
    *_, last = ended.stderr.splitlines()  # on a busy machine there are lines of progress before
    assert last == f"error: {missing}"
    found = known(read_snapshot(files.status))
    assert (found.state, found.is_over) == ("recording", True)
    assert missing in printed("status", files.root)
    assert "RUNNING" not in {run.info.status for run in runs_of(client_of(files))}, "status has asked MLflow"
    assert invoked("record", files.root).exit_code == 0
    assert "small: finished, 3 of 3 trials done" in printed("status", files.root)
    runs = runs_of(client_of(files))
    assert len(runs) == 5
    assert {run.info.status for run in runs} <= {"FINISHED", "FAILED"}


@pytest.mark.parametrize("command", [("status",), ("list",)])
def test_what_a_killed_driver_left_running_is_ended_by_whoever_asks(files: SweepFiles, command: tuple[str]) -> None:
    tracker = MlflowTracker(embedded_tracking_uri(files.local_folder), artifact_root=files.artifacts)
    left_by_a_driver(files)
    snapshot = known(read_snapshot(files.status))
    tracker.open_sweep(TrackedSweep(snapshot.sweep_id, "small", "", files.root))
    assert [run.info.status for run in runs_of(client_of(files))] == ["RUNNING"]
    assert "stale" in printed(*command, files.root)
    (run,) = runs_of(client_of(files))
    assert (run.info.status, run.data.tags["dpsweep.outcome"]) == ("KILLED", "interrupted")


def test_a_tuning_that_runs_is_not_recorded_beside_its_driver(files: SweepFiles) -> None:
    shutil.copytree(files.root, files.tuning)
    with exclusive(files.of_tuning):
        assert f"another dpsweep writes to {files.tuning}" in refused(InvalidInput, "record", files.root)
    assert not Path(files.database).exists()


def test_a_kill_while_the_sweep_is_opened_is_ended_by_whoever_asks(
    files: SweepFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sweep that ran without MLflow, too: the status names the store before MLflow shows anything as running."""
    left_by_a_driver(files)
    before = known(read_snapshot(files.status))
    write_snapshot(files.status, replace(before, state="finished", recording=None), private=False)
    attach = MlflowRuns.attach

    def killed(self: MlflowRuns, run_id: str, texts: dict[str, str]) -> None:
        attach(self, run_id, texts)
        left = known(read_snapshot(files.status))
        write_snapshot(tmp_status, left, private=False)
        raise TrackingUnavailable("no answer")

    tmp_status = f"{files.root}/of-the-killed.json"
    with monkeypatch.context() as patch:
        patch.setattr(MlflowRuns, "attach", killed)
        patch.setattr(MlflowTracker, "interrupt", lambda self: None)  # a kill tells MLflow nothing
        assert "no answer" in refused(DpsweepError, "record", files.root)
    assert [run.info.status for run in runs_of(client_of(files))] == ["RUNNING"]
    then = known(read_snapshot(tmp_status))
    write_snapshot(files.status, replace(then, heartbeat=time.time() - 2.0 * STALE_AFTER), private=False)
    assert "lost" in printed("status", files.root)
    (run,) = runs_of(client_of(files))
    assert run.info.status == "KILLED"
    assert invoked("record", files.root).exit_code == 0
    assert "small: finished, 3 of 3 trials done" in printed("status", files.root)


def test_a_sweep_is_closed_where_it_was_recorded_before(files: SweepFiles, tmp_path: Path) -> None:
    tracker = MlflowTracker(embedded_tracking_uri(files.local_folder), artifact_root=files.artifacts)
    left_by_a_driver(files)
    snapshot = known(read_snapshot(files.status))
    tracker.open_sweep(TrackedSweep(snapshot.sweep_id, "small", "", files.root))
    assert invoked("record", files.root, "--tracking-uri", f"sqlite:///{tmp_path}/other.db").exit_code == 0
    assert [run.info.status for run in runs_of(client_of(files))] == ["KILLED"]


_WRITES = (
    "create_experiment",
    "create_run",
    "update_run",
    "set_terminated",
    "log_batch",
    "log_inputs",
    "create_logged_model",
    "log_outputs",
    "log_model_artifacts",
    "finalize_logged_model",
    "set_experiment_tag",
)
"""Calls of MLflow's client that `dpsweep record` writes with."""


def killed_after(root: str, requests: int) -> None:
    """Record a sweep, and end like a process that is killed once MLflow has taken so many requests."""
    taken = [0]

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def taking(*values: object, **named: object) -> object:
            answer = call(*values, **named)
            taken[0] += 1
            if taken[0] == requests:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return taking

    for name in _WRITES:
        setattr(MlflowClient, name, counted(getattr(MlflowClient, name)))
    assert invoked("record", root).exit_code == 0


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_kill_after_any_request_is_made_good(tmp_path: Path) -> None:
    """Two trials, their mean, their model and the sweep itself."""

    def sample(name: str) -> SweepFiles:
        return stored_sample(tmp_path / name, finished=(0, 1), clipping="flat", seeds=[0, 1])

    whole = sample("whole")
    assert invoked("record", whole.root).exit_code == 0
    expected, requests, exit_code = by_trial(client_of(whole)), 0, 1
    while exit_code:
        requests += 1
        files = sample(f"after-{requests}")
        left_by_a_driver(files)
        recording = FORKS.Process(target=killed_after, args=(files.root, requests))
        recording.start()
        recording.join()
        exit_code = recording.exitcode or 0
        snapshot = known(read_snapshot(files.status))
        write_snapshot(files.status, replace(snapshot, heartbeat=time.time() - 2.0 * STALE_AFTER), private=False)
        assert invoked("status", files.root).exit_code == 0
        assert "RUNNING" not in {run.info.status for run in runs_of(client_of(files))}, requests
        assert invoked("record", files.root).exit_code == 0
        assert by_trial(client_of(files)) == expected, requests
    assert requests > 15


def by_trial(client: MlflowClient) -> list[str]:
    """What the runs of a store hold, without the names of runs and folders in it."""
    found = []
    for status, params, tags, history, _ in content(client).values():
        kept = {tag: tags[tag] for tag in ("dpsweep.kind", "dpsweep.outcome", "dpsweep.trial_key") if tag in tags}
        found.append(repr((kept, status, sorted(params.items()), sorted(history.items()))))
    return sorted(found)


def test_a_driver_that_is_told_to_stop_while_it_records_says_what_is_missing(tmp_path: Path) -> None:
    """Its store takes nothing any more: `stop` is a SIGTERM, and Ray waits for two minutes before it kills."""
    text = small(clipping=["none", "flat"], noise="constant", seeds=0, epochs=5)
    (tmp_path / "sweep.yaml").write_text(text)
    files, log = SweepFiles(str(tmp_path / "out")), tmp_path / "log"
    run = ("run", tmp_path / "sweep.yaml", "--output", files.root, "--address", "in-process")
    driver = start(*run, log=log)
    wait_until(lambda: any(Path(files.root).rglob("checkpoint*")) or driver.poll() is not None, "a trial to train")
    with closing(sqlite3.connect(Path(files.root) / "mlflow.db", timeout=60.0, isolation_level=None)) as store:
        store.execute("BEGIN EXCLUSIVE")

        def records() -> bool:
            found = read_snapshot(files.status)
            return found is not None and found.state == "recording"

        wait_until(lambda: records() or driver.poll() is not None, "the driver to record", pause=0.2)
        shown = printed("status", files.root)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(PATIENCE) == 130, log.read_text()
    recorded = re.match("small: recording in MLflow, ([01]) of 2", shown)
    assert recorded is not None, shown
    missing = f"{recorded[1]} of 2 trials are recorded in MLflow (.*); `dpsweep record {files.root}` records the rest"
    assert re.search(f"interrupted; {missing}", log.read_text()), log.read_text()
    assert invoked("record", files.root).exit_code == 0
    assert {run.info.status for run in runs_of(client_of(files))} == {"FINISHED"}


def test_a_driver_that_records_is_left_alone(files: SweepFiles) -> None:
    left_by_a_driver(files, per_second=4.2)
    snapshot = known(read_snapshot(files.status))
    write_snapshot(files.status, replace(snapshot, heartbeat=time.time()), private=False)
    assert "small: recording in MLflow, 1 of 3, 4 a second" in printed("status", files.root)
    with exclusive(files):
        assert files.root in refused(InvalidInput, "record", files.root)


def test_it_says_what_it_needs(files: SweepFiles, tmp_path: Path) -> None:
    for arguments, reason in (
        ((tmp_path / "nothing",), "holds no sweep, so there is nothing to record"),
        ((files.root, "--tracking-uri", "none"), "give the --tracking-uri of one in place of 'none'"),
        ((files.root, "--tracking-uri", "http://127.0.0.1:9"), "cannot use MLflow at http://127.0.0.1:9"),
    ):
        assert reason in refused(InvalidInput, "record", *arguments)
    left_by_a_driver(files, store="postgresql://me:***@host/mlflow")
    assert "whose password is not stored" in refused(InvalidInput, "record", files.root)
    assert "set MLFLOW_TRACKING_URI to its address" in invoked("status", files.root).stderr
