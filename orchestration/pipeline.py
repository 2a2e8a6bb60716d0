"""The composition root: a sweep from its file to its report. Reads as the data flows.

sweep file -> plan -> trials under Ray Tune -> accounting as each trial ends -> results -> MLflow -> report
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from accounting.errors import DataCorruption, InvalidInput
from orchestration.comparison.record import SweepRecord
from orchestration.comparison.stored import stored_record
from orchestration.execution.backend import backend
from orchestration.execution.coordinator import Coordinator, initial_status
from orchestration.execution.disk_space import require_space
from orchestration.execution.environment import EMBEDDED
from orchestration.records.failures import record_refusals
from orchestration.records.integrity import damages
from orchestration.records.layout import SweepFiles, absolute, default_output
from orchestration.records.manifest import open_manifest, write_manifest
from orchestration.records.ownership import claimed, exclusive
from orchestration.records.status import SweepStatus, TrialStatus
from orchestration.report.writing import write_reports
from orchestration.sweeps.plan import Plan, plan_sweep
from orchestration.sweeps.schema import SweepSpec
from orchestration.tracking.mlflow import MlflowTracker, embedded_tracking_uri
from orchestration.tracking.protocol import TrackingUnavailable
from workers.imports import NO_CODE, UserCode


@dataclass(frozen=True)
class Outcome:
    """What came out of a run, and where to look at it."""

    record: SweepRecord
    files: SweepFiles
    tracking_uri: str
    seconds: float


@dataclass(frozen=True)
class RunRequest:
    """What the user asked for: a sweep and its text, and where to run it.

    output None is runs/NAME; tracking_uri None is the SQLite store inside the sweep's folder. code is what of the
    user's own may be imported.
    """

    sweep: SweepSpec
    text: str
    output: str | None = None
    address: str = EMBEDDED
    resume: bool = False
    tracking_uri: str | None = None
    code: UserCode = NO_CODE


class Display(Protocol):
    """Where a run tells how it goes."""

    def warn(self, message: str) -> None: ...

    def ended(self, trial: TrialStatus) -> None:
        """A trial has ended; called in the thread that ended it."""

    def watching(self, status: SweepStatus) -> AbstractContextManager[None]:
        """Show the state of the sweep for the length of a ``with`` block."""


class NoDisplay:
    """Shows nothing: what `run_sweep` uses unless it is given another display."""

    def warn(self, message: str) -> None:
        return

    def ended(self, trial: TrialStatus) -> None:
        return

    def watching(self, status: SweepStatus) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


NO_DISPLAY = NoDisplay()


def run_sweep(request: RunRequest, display: Display = NO_DISPLAY) -> Outcome:
    """Run or resume a sweep to its end.

    Raises: InvalidInput, before any trial is started, for one that cannot run, for a folder that holds another
    sweep, and for a cluster or storage that cannot be used.
    """
    sweep = request.sweep
    files = SweepFiles(absolute(request.output or default_output(sweep.name)))
    manifest = open_manifest(files, sweep.plain(), request.text, request.resume)
    plan = accept(plan_sweep(sweep, request.code), files)
    require_space(files, plan)
    for warning in plan.warnings:
        display.warn(warning)
    status = SweepStatus(initial_status(plan), display.ended)
    tracking_uri = request.tracking_uri or embedded_tracking_uri(files.local_folder)
    with (
        exclusive(files.local_folder),
        claimed(files.claim),
        backend(request.address)(request.address, sweep, files, request.code) as execution,
    ):
        tracker = _tracker(tracking_uri, files)
        write_manifest(files, manifest)
        with (
            Coordinator(sweep, plan, manifest, files, tracker, status, execution.scatter) as coordinator,
            display.watching(status),
        ):
            execution.train(coordinator.pending(), coordinator, manifest.sweep_id)
            record = coordinator.finish()
        if coordinator.tracking_failure:
            display.warn(f"{coordinator.tracking_failure}; the same command with --resume records what is missing")
    return Outcome(record, files, tracking_uri, status.elapsed)


def _tracker(uri: str, files: SweepFiles) -> MlflowTracker:
    try:
        return MlflowTracker(uri, artifact_root=files.artifacts)
    except TrackingUnavailable as error:
        raise InvalidInput(f"{error}; nothing was started") from error


def accept(plan: Plan, files: SweepFiles) -> Plan:
    """The plan, if every trial can run; else `InvalidInput` with one line per reason."""
    where = record_refusals(plan.refusals, files)
    if plan.refusals:
        raise InvalidInput("\n".join(filter(None, (*plan.reasons(), where))))
    return plan


def render_again(folder: str) -> Outcome:
    """Write the reports of a sweep anew from what is on disk, and verify every file of its trained trials.

    Raises: DataCorruption with one line for each damaged file; no report is written then.
    """
    files = SweepFiles(absolute(folder))
    record = stored_record(files)
    trained = filter(None, (record.finished(point.key) for point in record.points))
    damaged = [line for result in trained for line in damages(files.trial(result.key), result)]
    if damaged:
        raise DataCorruption("\n".join(damaged))
    write_reports(files, record)
    return Outcome(record, files, embedded_tracking_uri(files.local_folder), 0.0)
