"""Follows the trials of a sweep: accounts each one when its training ends, records it in MLflow, writes the reports.

Handlers of training events run in Tune's thread and return at once. A thread per accounted trial waits for its parts
and summarises them; the recorder writes to MLflow in its own thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from dpsweep.accounting.errors import DataCorruption, DpsweepError, InvalidInput, StorageError
from dpsweep.accounting.jobs.examples import Part, PartwiseJob, Result
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.records.files import delete, delete_folder, exists, modified
from dpsweep.accounting.records.traces import read_trace
from dpsweep.orchestration.comparison import publishing
from dpsweep.orchestration.comparison.claims import unfounded
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.comparison.stored import candidate_attempts, stored_trials
from dpsweep.orchestration.execution.backend import Backend
from dpsweep.orchestration.execution.completion import (
    Times,
    account_stopped,
    complete_stopped,
    complete_trial,
    epsilon_so_far,
    is_left_to_account,
    shown_trace,
)
from dpsweep.orchestration.execution.publication import Publish, Published, empty_pages, published, steps
from dpsweep.orchestration.execution.storage_checks import PAUSES, patiently
from dpsweep.orchestration.store.attempts import Attempt, AttemptLog
from dpsweep.orchestration.store.integrity import met_other_data
from dpsweep.orchestration.store.later_results import read_accounts, read_audits
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import (
    PublishedAccount,
    PublishedAudit,
    PublishedEpoch,
    PublishedTrial,
    TrialState,
)
from dpsweep.orchestration.store.release_modes import record_failure
from dpsweep.orchestration.store.results import StoppedTrial, StoredResult, read_result_of
from dpsweep.orchestration.store.status import NOTHING_RECORDED, RecordingStatus, SweepStatus, TrialStatus, status_of
from dpsweep.orchestration.sweeps.manifest import Manifest
from dpsweep.orchestration.sweeps.planned import Plan, PlannedTrial
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.orchestration.tracking.recorder import TrackingRecorder
from dpsweep.orchestration.tracking.tracker import Tracker, tracked
from dpsweep.workers.machine.memory import read_device_use
from dpsweep.workers.training.history import Progress


class _Interrupted(Exception):
    """The sweep is ending early; a resume accounts the trial."""


class Coordinator:
    """A `TrainingObserver` that accounts and records every trained trial. Use it as a context manager.

    If the block ends with an exception, the sweep's MLflow runs are closed as killed; nothing on disk is lost, and the
    sweep can be resumed.
    `execution`: accounts the trials.
    `anew`: keys of trials that are trained from nothing although they have run before.
    `warn`: called with one sentence that the user should read.
    `publish`: writes the reports.
    """

    def __init__(
        self,
        sweep: SweepSpec,
        plan: Plan,
        manifest: Manifest,
        files: SweepFiles,
        tracker: Tracker,
        status: SweepStatus,
        execution: Backend,
        anew: Sequence[str] = (),
        warn: Callable[[str], None] = lambda message: None,
        publish: Publish = published,
    ) -> None:
        self._sweep, self._files, self._tracker = sweep, files, tracker
        self._planned: Mapping[str, PlannedTrial] = {planned.key: planned for planned in plan.trials}
        self._status, self._execution, self._anew = status, execution, anew
        self._warn, self._publish = warn, publish
        self._kept = stored_trials(files, plan.former, manifest, sweep)
        points = (*(planned.point for planned in plan.trials), *self._kept.points)
        self._points = {point.key: point for point in points}
        self._attempts = AttemptLog(files, self._planned)
        self._candidates = candidate_attempts(files, sweep)
        self._accounts: dict[str, tuple[PublishedAccount, ...]] = {}
        self._audits: dict[str, tuple[PublishedAudit, ...]] = {}
        begun = status.recording or NOTHING_RECORDED
        self._recorder = TrackingRecorder(tracker, self._shown, begun, self._note_recording)
        self._accountant = ThreadPoolExecutor(execution.trials_at_once, thread_name_prefix="dpsweep-accounting")
        self._interrupted = threading.Event()
        self._moment = object()
        """Another object after each change of a trial."""
        self._built: tuple[object, SweepRecord] | None = None
        self._completions: list[Future[None]] = []

    def __enter__(self) -> Self:
        """Restore results of an earlier run, account its trials that are trained but not accounted, and open MLflow.

        Raises: TrackingUnavailable if MLflow cannot be written. DataCorruption for a result that is damaged or claims
        less than its trace costs. InvalidInput if the data have changed since finished trials were trained on them.
        """
        for key in self._planned:
            result = read_result_of(key, self._files.trial(key).result)
            if result is not None:
                self._status.restore(result)
                self._accounts[key] = read_accounts(self._files.trial(key))
                self._audits[key] = read_audits(self._files, key)
            self._log_start(key, result)
        record = self._record()
        record.data(self._files)  # find damage to what the report reads before any trial trains
        if wrong := list(unfounded(self._files, record)):
            raise DataCorruption("\n".join(wrong))
        self._require_same_data()
        self._tracker.open_sweep(tracked(record, self._files), self._anew)
        self._recorder.start()
        for key in self._planned:
            if self._is_left_to_account(key):
                self.ended(key)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._interrupted.set()
            self._execution.give_up()  # parts may wait for resources that trials hold; nothing else ends the wait
            # first, as a part that is accounted in this process may take long
            have_ended = all(trial.state.has_ended for trial in self._status.trials)
            self._recorder.abandon([trial.key for trial in self._status.trials] if have_ended else ())
        self._accountant.shutdown(wait=True, cancel_futures=kind is not None)

    def _is_left_to_account(self, key: str) -> bool:
        """Return whether an earlier run trained the trial to its end, or to a stop, without accounting it."""
        result, files = self._status[key].result, self._files.trial(key)
        if result is None:
            return exists(files.training)
        return isinstance(result, StoppedTrial) and is_left_to_account(result, files)

    def _require_same_data(self) -> None:
        """Raise `InvalidInput` if planned trials use data that have changed since stored trials were trained on them.

        Also if every trial has its results: these would be shown as results of the new data. A trial that is no longer
        asked for counts too, unless its files do not tell on which data it was trained.
        """
        digests = {planned.spec.data: planned.data_digest for planned in self._planned.values()}
        statuses = self._statuses()
        for key, point in self._points.items():
            data, has_result = point.spec.data, key in statuses and statuses[key].result is not None
            if has_result and data in digests and self._met_other_data(key, digests[data]):
                raise InvalidInput(
                    f"the data {data.name!r} have changed since trial {key} was trained on them: its results are those "
                    "of the earlier data, and further trials would not compare with it; restore the data, or train all "
                    "trials on the new ones, in another folder with --output"
                )

    def _met_other_data(self, key: str, digest: str) -> bool:
        try:
            return met_other_data(self._files.trial(key), digest)
        except DataCorruption:
            if key in self._planned:
                raise
            return False

    @property
    def no_longer_asked(self) -> int:
        """Number of stored trials that only an earlier version of the sweep file asked for."""
        return len(self._kept.points)

    def pending(self) -> list[PlannedTrial]:
        """Return the trials still to be trained, up to the number that this run may train."""
        found = [planned for key, planned in self._planned.items() if self._status[key].state is TrialState.PENDING]
        return found[: self._status.trials_left]

    @property
    def must_stop(self) -> str | None:
        """The limit of this run that requires training to stop early, else None."""
        return self._status.must_stop

    def progressed(self, key: str, progress: Progress) -> None:
        """Add the epoch to the trial's history, with the epsilon so far."""
        planned, trace = self._planned[key], progress.trace
        epsilon = epsilon_so_far(planned, trace)
        # record the cost before showing the epoch, and show nothing while an object store does not take the record
        patiently(self._files.root, lambda: self._log_cost(key, trace))
        # a trial whose worker was lost repeats epochs
        seen = [epoch for epoch in self._status[key].history if epoch.step < progress.step]
        if progress.earlier:  # which another driver may have shown
            costs = (epsilon_so_far(planned, trace.until(record.step)) for record in progress.earlier)
            seen = [*map(publishing.recorded_epoch, progress.earlier, costs)]
        self._change(
            key,
            state=TrialState.TRAINING,
            progress=progress,
            epsilon_so_far=epsilon,
            history=(*seen, publishing.epoch(progress, epsilon)),
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

    def seen(self) -> Iterator[tuple[PlannedTrial, Sequence[PublishedEpoch]]]:
        """Yield every trial of the sweep with its epochs; see `TrainingObserver`."""
        record = self._record()
        for planned in self._planned.values():
            yield planned, record.trial(planned.point).history

    def starts_anew(self, key: str, why: str) -> bool:
        """Delete the trial's stored files, unless it has released something; see `TrainingObserver`."""
        if self._attempts.has_released(key):
            return False
        delete_folder(self._files.trial(key).root)
        self._attempts.take_up(key, continues=False)
        self._change(key, state=TrialState.PENDING, progress=None, epsilon_so_far=None, history=(), started=None)
        self._warn(f"trial {key} {why}")
        return True

    def _note_recording(self, recording: RecordingStatus) -> None:
        if self._status.recording is not None:
            self._status.recording = recording

    def finish(self) -> tuple[SweepRecord, Published]:
        """Wait until all trials are accounted, write the reports, and record all trials compared with their baselines.

        An unavailable tracker raises nothing: `SweepStatus.recording` says what is not recorded.
        """
        for completion in self._completions:
            completion.result()
        for trial in self._status.trials:
            if not trial.state.has_ended:  # a limit of this run has stopped its training
                self._change(trial.key, state=TrialState.PENDING)
        record = self._record()
        with empty_pages(self._files) as pages:
            shown = patiently(self._files.root, lambda: self._publish(self._files, record, pages))
            data = patiently(self._files.root, record.data)
            ended = [trial.key for trial in data.trials if trial.state.has_ended]
            self._tracker.compare_by(shown.compared)
            self._recorder.finish(ended, steps(record, data, shown, pages))
        return record, shown

    def _change(self, key: str, **changes: object) -> None:
        self._status.change(key, **changes)
        self._moment = object()  # after the change, as `_shown` takes it before it reads
        self._recorder.changed(key)

    def _complete(self, key: str) -> None:
        try:
            result = self._account_with_retries(key)
        except _Interrupted:
            return
        except Exception as error:
            if self._interrupted.is_set():
                return  # no failure of the trial: the next run accounts it
            self.failed(key, record_failure(error, self._files.trial(key), self._sweep.disclosure))
        else:
            self._change(key, state=status_of(result).state, result=result)

    def _account_with_retries(self, key: str) -> StoredResult:
        """Account the trial, retrying after storage errors; parts that were stored are not computed again."""
        for pause in PAUSES:
            try:
                return self._account(key)
            except StorageError:
                if self._interrupted.wait(pause):
                    raise _Interrupted from None
        return self._account(key)

    def _account(self, key: str) -> StoredResult:
        planned, files, status = self._planned[key], self._files.trial(key), self._status[key]
        delete(files.error)  # of an earlier attempt
        if isinstance(status.result, StoppedTrial):
            return self._account_stopped(planned, status.result)
        times = self._times(key)
        if exists(files.training):
            self._log_cost(key, trace := read_trace(files.trace), ended=True)
            releasing = functools.partial(self._log_release, key, trace, ended=True)
            return complete_trial(planned, files, self._sweep, times, self._until_interrupted, releasing)
        progress = status.progress
        if progress is None or progress.step == progress.total_steps:
            raise DataCorruption(f"the trial ended, but {files.training} is not there; is the storage shared?")
        stopped = complete_stopped(planned, files, self._sweep, times, progress, status.history)
        self._status.change(key, result=stopped)
        return self._account_stopped(planned, stopped)

    def _account_stopped(self, planned: PlannedTrial, stopped: StoppedTrial) -> StoredResult:
        """Account the examples of a stopped trial; where that fails, its worst case bounds each, as its result says."""
        files, scatter = self._files.trial(planned.key), self._until_interrupted
        self._log_cost(planned.key, stopped.trace)
        releasing = functools.partial(self._log_release, planned.key, stopped.trace)
        try:
            return account_stopped(
                planned, files, self._sweep, stopped, scatter, self._close_until_interrupted, releasing
            )
        except StorageError:
            raise
        except DpsweepError as error:
            if self._interrupted.is_set():
                raise _Interrupted from None
            reason = record_failure(error, files, self._sweep.disclosure)
            self._warn(
                f"the examples of {planned.key}, which the scheduler stopped, were not accounted, so that the worst "
                f"case bounds each; the same command tries again: {reason}"
            )
            return stopped

    def _times(self, key: str) -> Times:
        """Start and end of training; for a trial of an earlier run, from its last file and what its worker measured.

        Object stores know the times of files by the second.
        """
        status, files = self._status[key], self._files.trial(key)
        if status.progress is None and exists(files.training):
            ended, use = modified(files.training) or 0.0, read_device_use(files.device)
            return Times(ended - use.seconds if use else modified(files.spec) or 0.0, ended)
        return Times(status.started or 0.0, status.trained or 0.0)

    def _log_start(self, key: str, result: StoredResult | None) -> None:
        """Log whether the trial continues its last attempt, and add what old versions of dpsweep did not log."""
        trial = self._files.trial(key)
        continues = result is not None or exists(trial.checkpoint) or exists(trial.training)
        self._attempts.take_up(key, continues)
        if isinstance(result, StoppedTrial):
            self._log_cost(key, result.trace)
        elif result is not None and not self._attempts.all[key]:
            log = self._log_release if exists(trial.released) else self._log_cost
            log(key, read_trace(trial.trace), ended=True)

    def _log_cost(self, key: str, trace: Trace, ended: bool = False, statistics: Trace | None = None) -> None:
        """Log the cost of all that a private trial has shown so far; a baseline is not logged, as nothing bounds it."""
        planned = self._planned[key]
        spec, bound = planned.spec, shown_trace(trace, planned.trace)
        if spec.is_private:
            self._attempts.note(
                Attempt(spec.key, 0, spec.delta, bound, spec.known_seed, ended, statistics, planned.reasons)
            )

    def _log_release(self, key: str, trace: Trace, ended: bool = False) -> None:
        """Log that the trial is about to release its statistics, for the first time or once more."""
        planned = self._planned[key]
        alone = Trace(trace.dataset_size, releases=planned.releases, adjacency=trace.adjacency)
        if self._attempts.has_released_statistics(key):
            again = Attempt(key, 0, planned.spec.delta, alone, None, True, alone, planned.reasons)
            self._attempts.note_statistics(again)
        else:
            self._log_cost(key, trace, ended, statistics=alone)

    def _until_interrupted(self, job: PartwiseJob[Part, Result], parts: Sequence[Part]) -> Iterator[Result]:
        for result in self._execution.scatter(job, parts):
            if self._interrupted.is_set():
                raise _Interrupted
            self._status.accounted_part()
            yield result

    def _close_until_interrupted(self, planned: PlannedTrial, step: int) -> Iterator[None]:
        for _ in self._execution.close(planned, step):
            if self._interrupted.is_set():
                raise _Interrupted
            yield

    def _shown(self, key: str) -> PublishedTrial:
        """Return the trial as it is now. The record, which compares all baselines, is built once for trials that are
        asked for in a row.
        """
        moment, built = self._moment, self._built
        if built is None or built[0] is not moment:
            self._built = built = (moment, self._record())
        return built[1].trial(self._points[key])

    def _record(self) -> SweepRecord:
        return SweepRecord(
            self._kept.manifest,
            self._sweep,
            points=tuple(self._points.values()),
            statuses=self._statuses(),
            attempts={**self._attempts.all, **self._kept.attempts},
            accounts={**self._accounts, **self._kept.accounts},
            candidates=self._candidates,
            audits={**self._audits, **self._kept.audits},
        )

    def _statuses(self) -> dict[str, TrialStatus]:
        """Return the statuses of all trials, those that are no longer asked for included."""
        return {**self._kept.statuses, **{trial.key: trial for trial in self._status.trials}}


def initial_status(plan: Plan) -> list[TrialStatus]:
    """Return the status of every planned trial before the run: pending."""
    return [
        TrialStatus(
            planned.key,
            planned.trace.steps,
            shard_bytes=planned.shard_bytes,
            planned_reasons=planned.reasons,
            planned_unit=planned.spec.unit.name,
        )
        for planned in plan.trials
    ]
