"""Follows the trials of one run: accounts each as its training ends, records it, and closes the sweep.

Training is told about in Tune's thread. Everything that writes (accounting, results, MLflow) happens one trial at a
time in a single thread of its own, so that training never waits for it and MLflow has a single writer.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from accounting.actors import Scatter
from accounting.errors import DpsweepError
from accounting.storage import exists
from orchestration.completion import Times, complete_trial
from orchestration.grid import GridPoint, grid
from orchestration.layout import SweepFiles
from orchestration.manifest import Manifest
from orchestration.plan import Plan, PlannedTrial
from orchestration.publication import SweepRecord, write_reports
from orchestration.results import TrialResult, epsilon_after, read_result
from orchestration.status import SweepStatus, TrialStatus
from orchestration.sweep import SweepSpec
from orchestration.tracked import ForgivingTracker, TrackedSweep, TrackedTrial, Tracker
from orchestration.trainable import TrainingJob, TrialProgress


class Conductor:
    """A `TrainingObserver` that brings every trained trial to its result. Use it as a context manager.

    Leaving the block by an exception closes the sweep's MLflow runs as killed; nothing is lost, and the sweep can
    be resumed.
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
        self._sweep, self._manifest, self._files, self._tracker = sweep, manifest, files, ForgivingTracker(tracker)
        self._points: Mapping[str, GridPoint] = {point.trial.key: point for point in grid(sweep)}
        self._planned: Mapping[str, PlannedTrial] = {planned.spec.key: planned for planned in plan.trials}
        self._results: dict[str, TrialResult] = {}
        self._tracked: dict[str, TrackedTrial] = {}
        self._status, self._scatter = status, scatter
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dpsweep-writer")
        self._completions: list[Future[None]] = []

    def __enter__(self) -> Self:
        """Open the sweep in MLflow, and take up what an earlier run left: results, and trials trained but not
        accounted. Raises `TrackingUnavailable` when MLflow cannot be written."""
        self._writer.submit(self._tracker.open_sweep, self._tracked_sweep()).result()
        for key in self._planned:
            files = self._files.trial(key)
            result = read_result(files.result)
            if result is not None:
                self._results[key] = result
                self._status.assume(key, **_facts(result))
            elif exists(files.training):
                self.ended(key)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._writer.shutdown(wait=True, cancel_futures=True)
            self._tracker.close("KILLED")
        self._writer.shutdown(wait=True)

    def jobs(self) -> list[TrainingJob]:
        """The trials that are still to be trained."""
        return [
            TrainingJob(planned.spec, self._files.trial(key).root, planned.releases)
            for key, planned in self._planned.items()
            if self._status[key].state == "pending"
        ]

    def progressed(self, key: str, progress: TrialProgress) -> None:
        planned = self._planned[key]
        so_far = epsilon_after(planned.trace, progress.step, planned.spec.delta)
        self._status.change(
            key,
            state="training",
            epoch=progress.epoch,
            step=progress.step,
            accuracy=progress.test_accuracy,
            epsilon=min(so_far, planned.costs.worst_case.epsilon),
        )

    def started(self, key: str) -> None:
        self._status.change(key, state="training")

    def ended(self, key: str) -> None:
        if exists(self._files.trial(key).training):
            self._status.change(key, state="accounting")
            self._completions.append(self._writer.submit(self._complete, key))
        else:
            self._status.change(key, state="stopped")
            self._completions.append(self._writer.submit(self._track, key))

    def failed(self, key: str, error: str) -> None:
        self._status.change(key, state="failed", error=error)
        self._completions.append(self._writer.submit(self._track, key))

    @property
    def tracking_failure(self) -> str | None:
        """Why MLflow does not hold everything; results and reports on disk are complete all the same."""
        return str(self._tracker.failure) if self._tracker.failure else None

    def finish(self) -> SweepRecord:
        """Wait for the last accounting, record the comparison with the baselines, and write the reports."""
        for completion in self._completions:
            completion.result()
        return self._writer.submit(self._publish).result()

    def _complete(self, key: str) -> None:
        try:
            status = self._status[key]
            times = Times(status.started or 0.0, status.trained or 0.0)
            result = complete_trial(self._planned[key], self._files.trial(key), self._sweep, times, self._scatter)
        except DpsweepError as error:
            self._status.change(key, state="failed", error=str(error))
        except Exception:
            self._status.change(key, state="failed", error=traceback.format_exc(limit=-4).strip())
        else:
            self._results[key] = result
            self._status.change(key, **_facts(result))
        self._track(key)

    def _track(self, key: str) -> None:
        """Bring the trial's MLflow run up to date, unless it is."""
        tracked = self._record().tracked(self._points[key])
        if self._tracked.get(key) != tracked:
            self._tracker.log_trial(tracked)
            self._tracked[key] = tracked

    def _publish(self) -> SweepRecord:
        for key in self._points:
            self._track(key)
        record = self._record()
        self._tracker.log_report(write_reports(self._files, record), record.data())
        self._tracker.close("FAILED" if record.failed else "FINISHED")
        return record

    def _record(self) -> SweepRecord:
        statuses = {trial.key: trial for trial in self._status.trials}
        return SweepRecord(self._manifest, self._sweep, tuple(self._points.values()), dict(self._results), statuses)

    def _tracked_sweep(self) -> TrackedSweep:
        return TrackedSweep(
            sweep_id=self._manifest.sweep_id,
            name=self._sweep.name,
            spec=self._manifest.text,
            manifest=self._manifest.provenance(),
        )


def initial_status(plan: Plan) -> list[TrialStatus]:
    return [TrialStatus(planned.spec.key, total_steps=planned.trace.steps) for planned in plan.trials]


def _facts(result: TrialResult) -> dict[str, object]:
    """What the status of a finished trial shows."""
    return {
        "state": "finished",
        "step": result.training.steps,
        "accuracy": result.training.evaluation.accuracy,
        "epsilon": result.worst_case.epsilon,
    }
