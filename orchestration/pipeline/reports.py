"""Writes the reports of a sweep that has run again."""

from __future__ import annotations

from dpsweep.accounting.errors import DataCorruption
from dpsweep.orchestration.comparison.claims import checked_record
from dpsweep.orchestration.comparison.stored import owned_record
from dpsweep.orchestration.execution.publication import decided_on, published, steps
from dpsweep.orchestration.execution.upkeep import damaged_files
from dpsweep.orchestration.pipeline.request import Outcome
from dpsweep.orchestration.records.layout import SweepFiles, absolute
from dpsweep.orchestration.records.release_modes import release_mode
from dpsweep.orchestration.records.status_snapshot import read_snapshot
from dpsweep.orchestration.report.writing import write_reports
from dpsweep.orchestration.tracking.embedded import embedded_tracking_uri, stored_tracking_uri
from dpsweep.orchestration.tracking.given_stores import given_experiment
from dpsweep.orchestration.tracking.opening import open_tracker
from dpsweep.orchestration.tracking.tracker import tracked


def show_accounts(folder: str, tracking_uri: str | None = None) -> None:
    """Write the reports of a sweep again, with the results of `dpsweep account`; under ``release: raw``, MLflow too.

    tracking_uri: None for the SQLite store in the sweep's folder. Raises: StorageError, TrackingUnavailable, and
    InvalidInput if MLflow cannot be opened.
    """
    files = SweepFiles(absolute(folder))
    record = checked_record(files)
    shown = published(files, record)
    if not release_mode(record.disclosure).is_sensitive:
        return
    uri, data = tracking_uri or embedded_tracking_uri(files.local_folder), record.data()
    tracker = open_tracker(uri, files, given_experiment(uri, read_snapshot(files.status), files))
    tracker.open_sweep(tracked(record, files))
    for trial in data.trials:
        tracker.log_trial(trial)
    for step in steps(record, data, shown):
        step(tracker)


def render_again(folder: str) -> Outcome:
    """Verify every file of the trained trials of a sweep, and write its reports again.

    Every epsilon is recomputed from the stored trace, because checksums detect damage but not tampering.

    Raises: InvalidInput if the folder holds no sweep, or one with another encryption key. DataCorruption, without a
    report, with one line per damaged file and per claim smaller than the cost of its trace.
    """
    files = SweepFiles(absolute(folder))
    record = owned_record(files)
    wrong = damaged_files(files, record)
    if wrong:
        raise DataCorruption("\n".join(wrong))
    _, found = write_reports(files, record)
    decided = decided_on(record.data(), found)
    return Outcome(record, files, stored_tracking_uri(files.local_folder), 0.0, decision=decided)
