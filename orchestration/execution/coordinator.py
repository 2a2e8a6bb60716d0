"""Follows the trials of a sweep: accounts each one when its training ends, records it in MLflow, writes the reports.

Events of training arrive in Tune's thread and return at once. Accounting runs in a thread of its own, one trial at a
time; MLflow is written in another, the recorder's.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from accounting.errors import DataCorruption
from accounting.parallel import Scatter
from accounting.records.files import exists
from orchestration.comparison import shown
from orchestration.comparison.record import SweepRecord, exact
from orchestration.execution.completion import Times, complete_stopped, complete_trial, epsilon_so_far
from orchestration.records.failures import forget_failure, record_failure
from orchestration.records.integrity import stored_result
from orchestration.records.layout import SweepFiles
from orchestration.records.manifest import Manifest
from orchestration.records.published import PublishedTrial
from orchestration.records.results import StoredResult
from orchestration.records.states import TrialState
from orchestration.records.status import SweepStatus, TrialStatus, status_of
from orchestration.report.catalogue import figures_for_mlflow
from orchestration.report.writing import write_reports
from orchestration.sweeps.plan import Plan, PlannedTrial
from orchestration.sweeps.schema import SweepSpec
from orchestration.tracking.protocol import TrackedSweep, Tracker
from orchestration.tracking.recorder import Recorder
from workers.trial import Progress


class Coordinator:
    """A `TrainingObserver` that accounts and records every trained trial. Use it as a context manager.

    If the block ends with an exception, the sweep's MLflow runs are closed as killed; nothing on disk is lost, and the
    sweep can be resumed. scatter: how the parts of a trial are accounted.
    """

    def __init__(
        self,
        sweep: SweepSpec,
        plan: Plan,
        manifest: Manifest,
        files: SweepFiles,
        tracker: Tracker,
        status: SweepStatus,
        scatter: Scatter,
    ) -> None:
        self._sweep, self._manifest, self._files, self._tracker = sweep, manifest, files, tracker
        self._planned: Mapping[str, PlannedTrial] = {planned.key: planned for planned in plan.trials}
        self._status, self._scatter = status, scatter
        self._recorder = Recorder(tracker, self._shown)
        self._accountant = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dpsweep-accounting")
        self._completions: list[Future[None]] = []

    def __enter__(self) -> Self:
        """Restore results of an earlier run, account its trials that are trained but not accounted, and open MLflow.

        Raises: TrackingUnavailable when MLflow cannot be written, DataCorruption for a damaged result.
        """
        for key in self._planned:
            result = stored_result(self._files.trial(key))
            if result is not None:
                self._status.restore(result)
        self._record().data(exact(self._files))  # find damage to what the report reads before any trial trains
        self._tracker.open_sweep(self._tracked_sweep())
        self._recorder.start()
        for key in self._planned:
            if self._status[key].result is None and exists(self._files.trial(key).training):
                self.ended(key)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._accountant.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is not None:
            self._recorder.abandon()

    def pending(self) -> list[PlannedTrial]:
        """The trials that are still to be trained."""
        return [planned for key, planned in self._planned.items() if self._status[key].state is TrialState.PENDING]

    def progressed(self, key: str, progress: Progress) -> None:
        """Add the epoch to the trial's history, with the epsilon so far."""
        epsilon = epsilon_so_far(self._planned[key], progress.trace)
        # a trial whose worker was lost repeats epochs
        seen = [epoch for epoch in self._status[key].history if epoch.step < progress.step]
        self._change(
            key,
            state=TrialState.TRAINING,
            progress=progress,
            epsilon_so_far=epsilon,
            history=(*seen, shown.epoch(progress, epsilon)),
        )

    def started(self, key: str) -> None:
        """Mark the trial as training."""
        self._change(key, state=TrialState.TRAINING)

    def ended(self, key: str) -> None:
        """Queue the trial for accounting."""
        self._change(key, state=TrialState.ACCOUNTING)
        self._completions.append(self._accountant.submit(self._complete, key))

    def failed(self, key: str, error: str) -> None:
        """Mark the trial as failed; ``error`` is shown as it is."""
        self._change(key, state=TrialState.FAILED, error=error)

    @property
    def tracking_failure(self) -> str | None:
        """Why records are missing in MLflow, or None. Results and reports on disk are complete either way."""
        return str(self._recorder.failure) if self._recorder.failure else None

    def finish(self) -> SweepRecord:
        """Wait until all trials are accounted, write the reports, and record all trials compared with their baselines.

        An unavailable tracker is no error here: see `tracking_failure`.
        """
        for completion in self._completions:
            completion.result()
        record = self._record()
        page = write_reports(self._files, record)

        def publish(tracker: Tracker) -> None:
            data = record.data()
            tracker.log_report(page, data, figures_for_mlflow(data))
            tracker.close("FAILED" if record.failed else "FINISHED")

        self._recorder.finish(self._planned, publish)
        return record

    def _change(self, key: str, **changes: object) -> None:
        self._status.change(key, **changes)
        self._recorder.changed(key)

    def _complete(self, key: str) -> None:
        try:
            result = self._account(key)
        except Exception as error:
            self.failed(key, record_failure(error, self._files.trial(key), self._sweep.disclosure))
        else:
            self._change(key, state=status_of(result).state, result=result)

    def _account(self, key: str) -> StoredResult:
        planned, files, status = self._planned[key], self._files.trial(key), self._status[key]
        forget_failure(files)
        times = Times(status.started or 0.0, status.trained or 0.0)
        if exists(files.training):
            return complete_trial(planned, files, self._sweep, times, self._scatter)
        progress = status.progress
        if progress is None or progress.step == progress.total_steps:
            raise DataCorruption(f"the trial ended, but {files.training} is not there; is the storage shared?")
        return complete_stopped(planned, files, self._sweep, times, progress, status.history)

    def _shown(self, key: str) -> PublishedTrial:
        return self._record().trial(self._planned[key].point)

    def _record(self) -> SweepRecord:
        statuses = {trial.key: trial for trial in self._status.trials}
        points = tuple(planned.point for planned in self._planned.values())
        return SweepRecord(self._manifest, self._sweep, points, statuses)

    def _tracked_sweep(self) -> TrackedSweep:
        return TrackedSweep(
            sweep_id=self._manifest.sweep_id,
            name=self._sweep.name,
            spec=self._manifest.text,
            manifest=self._manifest.provenance(),
        )


def initial_status(plan: Plan) -> list[TrialStatus]:
    """The status of every planned trial before the run: pending."""
    return [TrialStatus(planned.key, total_steps=planned.trace.steps) for planned in plan.trials]
