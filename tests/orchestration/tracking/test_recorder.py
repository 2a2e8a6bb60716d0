"""Recording while a sweep runs: nothing waits for a slow tracker, and nothing is lost to one that goes away."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dpsweep.orchestration.store.published import PublishedTrial, TrialState
from dpsweep.orchestration.store.status import RecordingStatus
from dpsweep.orchestration.tracking import recorder
from dpsweep.orchestration.tracking.addresses import reported
from dpsweep.orchestration.tracking.embedded import embedded_tracking_uri
from dpsweep.orchestration.tracking.mlflow import MlflowTracker
from dpsweep.orchestration.tracking.plain_comparison import NOTHING_COMPARED
from dpsweep.orchestration.tracking.recorder import TrackingRecorder
from dpsweep.orchestration.tracking.runs import MlflowRuns
from dpsweep.orchestration.tracking.tracker import Tracker, TrackingUnavailable
from tests.orchestration.processes import wait_until
from tests.orchestration.sample_sweeps import EPOCHS, sample_trial
from tests.orchestration.tracking.recordings import (
    NOTHING,
    SWEEP,
    client_of,
    content,
    one,
    opened,
    pages,
    runs_of,
    some_trials,
    tracked,
)


class GrowingTrial:
    """A trial that trains: every look at it finds the epochs done so far."""

    def __init__(self) -> None:
        self.whole = tracked(sample_trial(disclosure="none"))
        self.epochs = 0

    @property
    def key(self) -> str:
        return self.whole.key

    def __call__(self, key: str) -> PublishedTrial:
        assert key == self.key
        if self.epochs == EPOCHS:
            return self.whole
        seen = self.whole.history[: self.epochs]
        return replace(self.whole, state=TrialState.TRAINING, history=seen, privacy=None, quality=None, ended=None)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "INTERVAL", 0.01)
    monkeypatch.setattr(recorder, "PAUSES", (0.01, 0.02))
    monkeypatch.setattr(recorder, "SILENCE", 0.1)


def recorded_steps(folder: Path) -> list[int]:
    run = one(runs_of(client_of(folder)), kind="trial")
    return sorted(point.step for point in client_of(folder).get_metric_history(run.info.run_id, "test_accuracy"))


def test_a_trial_is_seen_while_it_trains(folder: Path) -> None:
    trial, following = GrowingTrial(), TrackingRecorder(opened(folder), lambda key: trial(key))
    following.start()
    for epochs in (0, 3, EPOCHS - 1):
        trial.epochs = epochs
        following.changed(trial.key)
        wait_until(lambda: bool(runs_of(client_of(folder))[1:]), "the run")
        wait_until(lambda done=epochs: len(recorded_steps(folder)) == done, "its epochs")  # type: ignore[misc]  # mypy infers no lambda with defaults
        run = one(runs_of(client_of(folder)), kind="trial")
        assert run.info.status == "RUNNING"
        assert run.data.params["model"] == "mlp"
    trial.epochs = EPOCHS
    following.finish([trial.key], [lambda tracker: tracker.close()])
    assert following.failure is None
    assert recorded_steps(folder) == [epoch.step for epoch in trial.whole.history]
    assert {run.info.status for run in runs_of(client_of(folder))} == {"FINISHED"}


def test_a_trial_that_is_over_at_once_is_recorded_as_it_ended_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has run for an interval is seen running, as above."""
    trial, seen = GrowingTrial(), list[TrialState]()

    class Noting(MlflowTracker):
        def log_trial(self, trial: PublishedTrial) -> str:
            seen.append(trial.state)
            return super().log_trial(trial)

    trial.whole = replace(trial.whole, started=time.time())
    tracker = Noting(embedded_tracking_uri(folder), artifact_root=str(folder / "artifacts"))
    tracker.open_sweep(SWEEP)
    following = TrackingRecorder(tracker, trial)
    monkeypatch.setattr(recorder, "INTERVAL", 60.0)
    following.changed(trial.key)
    assert following._attempt([])
    assert seen == []
    trial.epochs = EPOCHS
    assert following._attempt([]), "it was not forgotten"
    assert seen == [TrialState.FINISHED]
    assert recorded_steps(folder) == [epoch.step for epoch in trial.whole.history]


def test_a_clock_that_was_set_back_hides_no_trial_that_runs(folder: Path) -> None:
    trial = GrowingTrial()
    trial.whole, trial.epochs = replace(trial.whole, started=time.time() + 7200.0), EPOCHS - 1
    tracker = MlflowTracker(embedded_tracking_uri(folder), artifact_root=str(folder / "artifacts"))
    tracker.open_sweep(SWEEP)
    following = TrackingRecorder(tracker, trial)
    following.changed(trial.key)
    assert following._attempt([])
    assert recorded_steps(folder) == [epoch.step for epoch in trial.whole.history[:-1]]


class SlowTracker(MlflowTracker):
    """Takes nothing before it is released."""

    def __init__(self, folder: Path) -> None:
        super().__init__(embedded_tracking_uri(folder), artifact_root=str(folder / "artifacts"))
        self.released, self.updates = threading.Event(), 0

    def log_trial(self, trial: PublishedTrial) -> str:
        self.updates += 1
        self.released.wait()
        return super().log_trial(trial)


def test_a_slow_tracker_holds_nothing_up_and_gets_fewer_updates(folder: Path) -> None:
    tracker, trial = SlowTracker(folder), GrowingTrial()
    tracker.open_sweep(SWEEP)
    following = TrackingRecorder(tracker, trial)
    following.start()
    for epochs in range(1, EPOCHS + 1):
        trial.epochs = epochs
        following.changed(trial.key)
    tracker.released.set()
    following.finish([trial.key], [lambda tracker: tracker.close()])
    assert tracker.updates <= 3
    assert recorded_steps(folder) == [epoch.step for epoch in trial.whole.history]


def test_a_tracker_that_was_gone_for_a_while_has_everything_in_the_end(folder: Path) -> None:
    store, aside = folder / "mlflow.db", folder / "aside.db"
    trial, following = GrowingTrial(), TrackingRecorder(opened(folder), lambda key: trial(key))
    following.start()
    trial.epochs = 3
    following.changed(trial.key)
    wait_until(lambda: len(runs_of(client_of(folder))) == 2 and len(recorded_steps(folder)) == 3, "three epochs")
    shutil.move(store, aside)
    store.mkdir()
    trial.epochs = 20
    following.changed(trial.key)
    wait_until(lambda: following.failure is not None, "the failure to be noticed")
    assert trial.key in str(following.failure)
    store.rmdir()
    shutil.move(aside, store)
    trial.epochs = EPOCHS
    following.finish([trial.key], [lambda tracker: tracker.close()])
    assert following.failure is None
    assert recorded_steps(folder) == [epoch.step for epoch in trial.whole.history]
    before = content(client_of(folder))
    again = TrackingRecorder(opened(folder), trial)
    again.start()
    again.finish([trial.key], [lambda tracker: tracker.close()])
    assert content(client_of(folder)) == before


def test_a_tracker_that_fails_is_told_of_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "SILENCE", 1.0)  # longer than an attempt on a busy machine
    told: list[RecordingStatus] = []
    trial = GrowingTrial()
    trial.epochs = EPOCHS
    following = TrackingRecorder(opened(folder), lambda key: trial(key), on_progress=told.append)
    (folder / "mlflow.db").unlink()
    (folder / "mlflow.db").mkdir()
    following.finish([trial.key], [lambda tracker: tracker.close()])
    lines = [each.line() for each in told if each.goes_on]
    assert lines[0].endswith("0 of 1, 0 a minute")
    assert "0 of 1, 0 a minute; the last attempt failed and is repeated: cannot record trial" in lines[1]
    assert (told[-1].trouble, "cannot record trial" in told[-1].missing()) == (None, True)


def test_the_reason_is_told_and_not_the_preface_of_a_library() -> None:
    preface = "(raised as a result of Query-invoked autoflush; consider using a block)"
    found = pytest.raises(TrackingUnavailable, match="database or disk is full; free some space")
    with found as told, reported("cannot record a trial in", "sqlite:///mlflow.db"):
        raise ValueError(f"{preface}\n(sqlite3.OperationalError) database or disk is full\n[SQL: INSERT]")
    assert "autoflush" not in str(told.value)


class Clock:
    """Time as the recorder sees it, which passes only while it waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_recording_goes_on_as_long_as_the_tracker_answers_now_and_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses four requests of five, 20 s each, for far longer than it may be silent; then it falls silent."""
    clock, silence = Clock(), 180.0
    monkeypatch.setattr(recorder, "time", clock)
    monkeypatch.setattr(recorder, "SILENCE", silence)
    trials = {trial.key: trial for trial in (tracked(sample_trial(seed=seed, disclosure="none")) for seed in range(7))}
    asked: list[str] = []
    told: list[RecordingStatus] = []

    class Flapping(MlflowTracker):
        def log_trial(self, trial: PublishedTrial) -> str:
            asked.append(trial.key)
            if len(asked) % 5 or len(self._trials) == 5:
                clock.sleep(20.0)
                raise TrackingUnavailable("no answer")
            return super().log_trial(trial)

    tracker = Flapping(embedded_tracking_uri(folder), artifact_root=str(folder / "artifacts"))
    tracker.open_sweep(SWEEP)
    following = TrackingRecorder(tracker, lambda key: trials[key], RecordingStatus(command="the command"), told.append)
    following.finish(trials, [lambda tracker: tracker.close()])
    assert 3.0 * silence < clock.now < 5.0 * silence
    assert told[0].goes_on
    found = following.recording
    assert (found.count, found.is_complete, found.is_closed) == ("5 of 7", False, False)
    assert found.missing() == "5 of 7 trials are recorded in MLflow (no answer); `the command` records the rest"
    again = TrackingRecorder(opened(folder), lambda key: trials[key])
    again.finish(trials, [lambda tracker: tracker.close()])
    assert again.recording.is_complete
    assert Counter(run.info.status for run in runs_of(client_of(folder))) == {"FINISHED": 9}, "with the average"


def test_what_is_always_refused_ends_though_steps_before_it_succeed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(self: MlflowRuns, run_id: str, data: object) -> None:
        self._held.pop(run_id, None)
        raise TrackingUnavailable("the name of the data is too long")

    monkeypatch.setattr(MlflowRuns, "name_data", refuses)
    trial = tracked(sample_trial(disclosure="none"))
    following = TrackingRecorder(opened(folder), lambda key: trial)
    following.finish([trial.key], [lambda tracker: tracker.log_report(tmp_path, NOTHING)])
    assert "too long" in str(following.failure)


def test_a_silent_tracker_does_not_hold_up_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "LAST_MOMENTS", 0.1)
    tracker, trial = SlowTracker(folder), GrowingTrial()
    tracker.open_sweep(SWEEP)
    following = TrackingRecorder(tracker, trial)
    following.start()
    following.changed(trial.key)
    wait_until(lambda: tracker.updates > 0, "a request that is never answered")
    following.abandon([trial.key])
    assert not following.recording.is_closed
    assert following.recording.missing().startswith("0 of 1 trials are recorded in MLflow (interrupted)")
    tracker.released.set()


def test_an_abandoned_sweep_keeps_what_is_known_and_nothing_running(folder: Path) -> None:
    trial, following = GrowingTrial(), TrackingRecorder(opened(folder), lambda key: trial(key))
    following.start()
    trial.epochs = 5
    following.changed(trial.key)
    following.abandon()
    assert following.recording.is_closed
    assert len(recorded_steps(folder)) == 5
    runs = runs_of(client_of(folder))
    assert {run.info.status for run in runs} == {"KILLED"}
    assert one(runs, kind="trial").data.tags["dpsweep.outcome"] == "interrupted"


@pytest.mark.parametrize("is_for_good", [False, True])
@pytest.mark.parametrize("kind", ["sweep", "trial"])
def test_runs_that_somebody_deletes_meanwhile_are_recorded_anew(folder: Path, kind: str, is_for_good: bool) -> None:
    trials = {trial.key: trial for trial in some_trials()}
    compared = replace(NOTHING_COMPARED, numbers={key: {"setting/accuracy": 0.5} for key in trials})

    def delete(tracker: Tracker) -> None:
        client, runs = client_of(folder), runs_of(client_of(folder))
        run_id = next(run.info.run_id for run in runs if run.data.tags["dpsweep.kind"] == kind)
        client.delete_run(run_id)
        if is_for_good:
            client._tracking_client.store._hard_delete_run(run_id)  # as `mlflow gc`

    with pages("<html></html>") as report:
        steps: list[Callable[[Tracker], None]] = [
            lambda tracker: tracker.log_report(report, NOTHING),
            delete,
            lambda tracker: tracker.log_comparison(compared, []),
            lambda tracker: tracker.close(),
        ]
        recording = TrackingRecorder(opened(folder), trials.__getitem__)
        recording.finish(trials, steps)
    assert recording.failure is None
    runs = runs_of(client_of(folder))
    assert Counter(run.data.tags["dpsweep.kind"] for run in runs) == {"sweep": 1, "trial": 5, "average": 2}
    sweep = one(runs, kind="sweep").info.run_id
    assert {run.data.tags.get("mlflow.parentRunId", sweep) for run in runs} == {sweep}
