"""Record stored sweeps in MLflow, and write their reports again."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dpsweep.accounting.errors import DataCorruption, InvalidInput, StorageError
from dpsweep.accounting.records.files import exists
from dpsweep.orchestration.comparison.claims import checked_record
from dpsweep.orchestration.comparison.stored import owned_record
from dpsweep.orchestration.execution.publication import (
    decided_on,
    empty_pages,
    published,
    steps,
    stored_publication,
)
from dpsweep.orchestration.execution.upkeep import damaged_files
from dpsweep.orchestration.pipeline.stage import Outcome, recording_in
from dpsweep.orchestration.report.writing import write_reports
from dpsweep.orchestration.store.layout import SweepFiles, sweep_at
from dpsweep.orchestration.store.ownership import exclusive
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.release_modes import release_mode
from dpsweep.orchestration.store.status import NOTHING_RECORDED, RecordingStatus
from dpsweep.orchestration.store.status_snapshot import LOST, PERIOD, read_snapshot, write_snapshot
from dpsweep.orchestration.tracking.abandoned import end_abandoned
from dpsweep.orchestration.tracking.addresses import masked
from dpsweep.orchestration.tracking.embedded import embedded_tracking_uri, stored_tracking_uri
from dpsweep.orchestration.tracking.given_stores import given_experiment, given_store
from dpsweep.orchestration.tracking.opening import open_tracker
from dpsweep.orchestration.tracking.recorder import TrackingRecorder
from dpsweep.orchestration.tracking.tracker import tracked

Show = Callable[[RecordingStatus], None]


def record_again(
    folder: str,
    tracking_uri: str | None,
    show: Show = lambda recording: None,
    warn: Callable[[str], None] = lambda sentence: None,
) -> RecordingStatus:
    """Record a stored sweep, and its tuning, in MLflow; what is there already is kept, and nothing is recorded twice.

    `tracking_uri`: by default the store that the sweep's driver recorded in, else the SQLite store in the sweep's
    folder. `show`: called with the progress. `warn`: called if another store, in which the sweep was recorded before,
    may still show it as running. Returns the outcome of the stage that is not recorded as a whole, else of the last.

    Raises: InvalidInput if the folder holds no sweep, a driver runs in it, or MLflow cannot be opened; DataCorruption
    for damaged files.
    """
    files = sweep_at(folder)
    stages = [each for each in (files.of_tuning, files) if exists(each.manifest)]
    if not stages:
        raise InvalidInput(f"{files.root} holds no sweep, so there is nothing to record; name one that ran there")
    with contextlib.ExitStack() as held:
        for each in {each.root: each for each in (files, *stages)}.values():  # a tuning has a driver of its own
            held.enter_context(exclusive(each))
        for stage in stages:
            uri = given_store(stage, tracking_uri)
            if problem := _end_elsewhere(stage, uri):
                warn(problem)
            found = _recorded(stage, uri, show)
            if found.missing():
                return found
    return found


def _end_elsewhere(files: SweepFiles, uri: str) -> str:
    """End runs that another store shows as running, of a driver that is gone, because nobody runs in a folder that is
    free. Returns a sentence if that store could not be asked, else "".
    """
    before = read_snapshot(files.status)
    if before is None or before.recording is None or before.recording.store == masked(uri):
        return ""
    return end_abandoned(files, replace(before, heartbeat=0.0))


def _recorded(files: SweepFiles, uri: str, show: Show) -> RecordingStatus:
    record = checked_record(files)
    data = record.data()
    trials = {trial.key: trial for trial in data.trials}
    ended = [key for key, trial in trials.items() if trial.state.has_ended]
    with empty_pages(files) as pages:
        shown = stored_publication(files, data, pages)
        experiment = given_experiment(uri, files)
        tracker = open_tracker(uri, files, experiment)
        begun = recording_in(uri, tracker, files, record.manifest.sweep_id, experiment)
        assert begun is not None, "there is a store"
        status = _Status(files, release_mode(record.disclosure).is_sensitive, show)
        status.begin(replace(begun, trials=len(ended)))
        recorder = TrackingRecorder(tracker, lambda key: trials[key], begun, status)
        try:
            tracker.open_sweep(tracked(record, files))
            tracker.compare_by(shown.compared)
            recorder.finish(ended, steps(record, data, shown, pages))
        except BaseException:
            recorder.abandon()
            raise
        finally:
            status.end(recorder.recording)
        return recorder.recording


class _Status:
    """Passes on the progress of a recording, and keeps the sweep's ``status.json``, where there is one, current."""

    def __init__(self, files: SweepFiles, is_sensitive: bool, show: Show) -> None:
        self._uri, self._is_sensitive, self._show = files.status, is_sensitive, show
        self._before = read_snapshot(files.status)
        self._last = NOTHING_RECORDED
        self._written = 0.0

    def __call__(self, recording: RecordingStatus) -> None:
        self._last = recording
        self._show(recording)
        if recording.goes_on and time.monotonic() - self._written >= PERIOD:
            self._written = time.monotonic()
            self._write("recording")

    def begin(self, recording: RecordingStatus) -> None:
        """Note where it is recorded before MLflow shows a run as running, so that after a kill whoever asks ends it."""
        self(recording)
        self._write("recording")

    def end(self, recording: RecordingStatus) -> None:
        """Note how the recording ended: an interrupted sweep stays interrupted."""
        before = self._before
        if before is None:
            return
        if not recording.trials and not recording.is_complete:  # MLflow did not open the sweep
            known = before.recording if before.recording and before.recording.store == self._last.store else self._last
            recording = replace(known, is_closed=False, failure=recording.failure)
        self._last = recording
        state = before.state
        if self._last.missing():
            state = "recording"
        elif all(trial.state.has_ended for trial in before.trials):
            state = "failed" if before.counts()[TrialState.FAILED] else "finished"
        elif state in ("running", "recording", LOST):  # of a killed driver: nobody runs in a folder that is free
            state = "interrupted"
        self._write(state)

    def _write(self, state: str) -> None:
        if self._before is not None:
            now = replace(
                self._before,
                state=state,
                heartbeat=time.time(),
                seconds_left=None,
                host=socket.gethostname(),
                pid=os.getpid(),
                job=None,
                recording=self._last,
            )
            with contextlib.suppress(StorageError):
                write_snapshot(self._uri, now, self._is_sensitive)


def show_accounts(folder: str, tracking_uri: str | None = None) -> None:
    """Write the reports of a sweep again, with the results of `dpsweep account`; under ``release: raw``, MLflow too.

    tracking_uri: None for the SQLite store in the sweep's folder. Raises: StorageError, TrackingUnavailable, and
    InvalidInput if MLflow cannot be opened.
    """
    files = sweep_at(folder)
    record = checked_record(files)
    with tempfile.TemporaryDirectory(prefix="dps-pages-") as folder:
        shown = published(files, record, Path(folder))
        if not release_mode(record.disclosure).is_sensitive:
            return
        uri, data = tracking_uri or embedded_tracking_uri(files.local_folder), record.data()
        tracker = open_tracker(uri, files, given_experiment(uri, files))
        tracker.open_sweep(tracked(record, files))
        for trial in data.trials:
            tracker.log_trial(trial)
        for step in steps(record, data, shown, Path(folder)):
            step(tracker)


def render_again(folder: str) -> Outcome:
    """Verify every file of the trained trials of a sweep, and write its reports again.

    Every epsilon is recomputed from the stored trace, because checksums detect damage but not tampering.

    Raises: InvalidInput if the folder holds no sweep, or one with another encryption key. DataCorruption, without a
    report, with one line per damaged file and per claim smaller than the cost of its trace.
    """
    files = sweep_at(folder)
    record = owned_record(files)
    wrong = damaged_files(files, record)
    if wrong:
        raise DataCorruption("\n".join(wrong))
    _, found = write_reports(files, record)
    decided = decided_on(record.data(), found)
    tracking = stored_tracking_uri(files.local_folder)
    return Outcome(record, files, tracking, 0.0, decision=decided, unknown_cost=found.unknown_cost)
