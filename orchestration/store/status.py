"""Progress of a running sweep: read by the display, updated from the threads that train and account."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from dpsweep.accounting.errors import count_of
from dpsweep.accounting.mechanism.reasons import Reason, union
from dpsweep.accounting.mechanism.units import EXAMPLE, UnitName
from dpsweep.orchestration.store.limits import NO_LIMITS, NOTHING_SPENT, Limits, Spent
from dpsweep.orchestration.store.published import PublishedEpoch, TrialState
from dpsweep.orchestration.store.results import StoredResult, TrialResult
from dpsweep.workers.evaluation.scores import Evaluation
from dpsweep.workers.machine.memory import DeviceUse
from dpsweep.workers.tasks import task_called
from dpsweep.workers.training.history import Progress

QUIET_FOR: Final = 300.0
"""Least seconds without an epoch after which a trial that has reported some is called quiet."""
QUIET_AT_FIRST: Final = 900.0
"""The same before its first epoch, after its last one and while it is accounted: how long that takes is not known."""
_TIMES_LONGEST: Final = 3.0
"""A trial is quiet after so many times the longest pause between two signs of progress before."""


@dataclass(frozen=True)
class RecordingStatus:
    """The number of trials of a sweep that are recorded in MLflow.

    `recorded`, `trials`: trials recorded as they ended, of those to record; both 0 until all trials have ended.
    `per_second`: recent pace.
    `store`: tracking URI with its secrets masked.
    `page`: address of the comparison of trials, on the server, or on the one that `mlflow ui` starts for a database.
    `experiment`: its name in MLflow.
    `is_complete`: whether all trials and their comparison are recorded.
    `is_closed`: whether no run of the sweep is RUNNING.
    `failure`: why the driver ended before all was recorded; None while it goes on.
    `trouble`: why the last attempt failed, while it goes on.
    `command`: records the rest.
    """

    recorded: int = 0
    trials: int = 0
    per_second: float = 0.0
    store: str = ""
    page: str = ""
    experiment: str = ""
    is_complete: bool = False
    is_closed: bool = False
    failure: str | None = None
    trouble: str | None = None
    command: str = ""

    @property
    def goes_on(self) -> bool:
        """Return whether all trials have ended, and their driver records what is left."""
        return self.trials > 0 and not self.is_complete and self.failure is None

    @property
    def count(self) -> str:
        """Return text such as ``39 of 300``."""
        return f"{self.recorded} of {self.trials}"

    def line(self) -> str:
        """Return how far it is, and why the last attempt failed.

        >>> RecordingStatus(39, 300, 4.2).line(), RecordingStatus(300, 300, 4.2).line()
        ('recording in MLflow, 39 of 300, 4 a second', 'recording in MLflow, 300 of 300, now their comparison')
        """
        pace = f"{self.per_second:.0f} a second" if self.per_second >= 1.0 else f"{60.0 * self.per_second:.0f} a minute"
        pace = "now their comparison" if self.recorded == self.trials else pace
        trouble = f"; the last attempt failed and is repeated: {self.trouble}" if self.trouble else ""
        return f"recording in MLflow, {self.count}, {pace}{trouble}"

    def missing(self) -> str:
        """Return what is not recorded, and the command that records it; "" if nothing is missing."""
        if self.is_complete or not self.trials:
            return ""
        what = f"{self.count} trials are recorded in MLflow"
        if self.recorded == self.trials:
            what += ", but not their comparison"
        why = f" ({self.failure})" if self.failure else ""
        return f"{what}{why}; `{self.command}` records the rest"


NOTHING_RECORDED: Final = RecordingStatus()


@dataclass(frozen=True)
class TrialStatus:
    """State and progress of one trial.

    `progress`: at the last epoch completed in this run of the sweep.
    `epsilon_so_far`: upper bound on epsilon at that epoch, by RDP.
    `history`: the epochs completed so far.
    `result`: set for a finished or stopped trial.
    `started`, `trained`, `ended`: when the trial started, ended training and ended in this run, in seconds since 1970
    UTC.
    `shard_bytes`: planned size of the norms of the whole trial, before compression.
    `planned_reasons`: why every epsilon of the trial is an estimate, whatever its course will be.
    `planned_unit`: whose privacy these epsilons are.
    """

    key: str
    total_steps: int
    state: TrialState = TrialState.PENDING
    progress: Progress | None = None
    epsilon_so_far: float | None = None
    history: tuple[PublishedEpoch, ...] = ()
    result: StoredResult | None = None
    error: str | None = None
    started: float | None = None
    trained: float | None = None
    ended: float | None = None
    shard_bytes: int = 0
    planned_reasons: tuple[Reason, ...] = ()
    planned_unit: UnitName = EXAMPLE.name

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Return why `epsilon` is an estimate: by the result, or by the plan before there is one."""
        return union((self.result.worst_case.reasons if self.result else (), self.planned_reasons))

    @property
    def unit(self) -> UnitName:
        """Whose privacy `epsilon` is."""
        return self.result.spec.unit.name if self.result else self.planned_unit

    @property
    def step(self) -> int:
        """Steps trained so far."""
        if self.result is not None:
            return self.result.steps
        return self.progress.step if self.progress else 0

    @property
    def evaluation(self) -> Evaluation | None:
        """Latest evaluation on held-out test data; None before the first one."""
        known = self.result or self.progress
        return known.evaluation if known else None

    @property
    def accuracy(self) -> float | None:
        """Accuracy on held-out test data; None before the first evaluation, and for another task."""
        return self.evaluation.accuracy if self.evaluation else None

    @property
    def scores(self) -> Mapping[str, float]:
        """The main score on held-out test data, with its name, for tasks other than classification."""
        found = self.evaluation
        main = task_called(found.task).main if found else ""
        return {main: found.scores[main]} if found and main in found.scores else {}

    @property
    def device(self) -> DeviceUse | None:
        """The device that trains or trained the trial; None before its first epoch."""
        known = self.result or self.progress
        return known.device if known else None

    @property
    def epsilon(self) -> float | None:
        """Worst-case epsilon of the whole trial if it has a result, else an upper bound for the steps so far."""
        return self.result.worst_case.epsilon if self.result else self.epsilon_so_far


def status_of(result: StoredResult) -> TrialStatus:
    """Return the status of a trial whose result an earlier run of the sweep has stored."""
    state = TrialState.FINISHED if isinstance(result, TrialResult) else TrialState.STOPPED
    return TrialStatus(result.key, result.steps, state, result=result, started=result.started, ended=result.ended)


class SweepStatus:
    """The trials of a sweep. Thread-safe.

    `on_end`: called with each trial that ends, in the thread that called `change`. `gpus`: GPUs that each trial holds
    while it trains, by key. `before`: amounts that earlier drivers of the same job have spent of its limits.
    """

    def __init__(
        self,
        trials: Iterable[TrialStatus],
        on_end: Callable[[TrialStatus], None],
        limits: Limits = NO_LIMITS,
        gpus: Mapping[str, float] = MappingProxyType({}),
        before: Spent = NOTHING_SPENT,
    ) -> None:
        self.limits, self._gpus, self._before = limits, gpus, before
        self._trials = {trial.key: trial for trial in trials}
        self._lock = threading.Lock()
        self._on_end = on_end
        self._begun = dict[str, float]()
        self._over = dict[str, float]()
        """When trials began and ended to train in this run, on a clock that nobody sets."""
        self._signs = dict[str, float]()
        self._pauses = dict[str, float]()
        """When a trial last showed progress, on the same clock, and its longest pause between two epochs."""
        self._steps_at_start = 0
        self._parts = 0
        self.began, self._began = time.time(), time.monotonic()
        self.adds_trials = False
        """Whether the run adds trials when these have ended."""
        self.recording: RecordingStatus | None = None
        """How far the recording in MLflow has come; None without MLflow."""

    @property
    def trials(self) -> tuple[TrialStatus, ...]:
        """All trials, as they are now, in the order of the grid."""
        with self._lock:
            return tuple(self._trials.values())

    def __getitem__(self, key: str) -> TrialStatus:
        with self._lock:
            return self._trials[key]

    def change(self, key: str, **changes: object) -> None:
        """Replace the named fields of one trial; ``started``, ``trained`` and ``ended`` follow from its state.

        A clock that is set meanwhile changes none of the times between them.
        """
        with self._lock:
            before = self._trials[key]
            after = replace(before, **changes)  # type: ignore[arg-type]
            if after.started is None and after.state is not TrialState.PENDING:
                after = replace(after, started=time.time())
                self._begun[key] = time.monotonic()
                self._over.pop(key, None)
            since = time.monotonic() - self._begun[key] if key in self._begun else None
            now = time.time() if since is None or after.started is None else after.started + since
            if after.trained is None and after.state is TrialState.ACCOUNTING:
                after = replace(after, trained=now)
            if after.state.has_ended and not before.state.has_ended:
                after = replace(after, ended=now)
            if after.trained or after.ended:
                self._over.setdefault(key, time.monotonic())
            if (after.state, after.step) != (before.state, before.step):
                self._note_sign(key, before.progress is not None and before.state is after.state)
            self._trials[key] = after
        if after.state.has_ended and not before.state.has_ended:
            self._on_end(after)

    def _note_sign(self, key: str, is_between: bool) -> None:
        """Note that a trial shows progress; with the lock held. is_between: the pause before was between two epochs."""
        now = time.monotonic()
        if is_between:
            pause = now - self._signs.get(key, now)
            self._pauses[key] = max(self._pauses.get(key, 0.0), pause)
        self._signs[key] = now

    def quiet(self, key: str) -> float | None:
        """Return the seconds without progress of a trial that runs; None as long as they are nothing unusual."""
        with self._lock:
            trial, longest = self._trials[key], self._pauses.get(key, 0.0)
            silent = time.monotonic() - self._signs.get(key, math.inf)
            any_longest = max(self._pauses.values(), default=0.0)
        between = trial.state is TrialState.TRAINING and longest and trial.step < trial.total_steps
        least, longest = (QUIET_FOR, longest) if between else (QUIET_AT_FIRST, any_longest)
        return silent if trial.state.is_running and silent > max(least, _TIMES_LONGEST * longest) else None

    def restore(self, result: StoredResult) -> None:
        """Restore the result of an earlier run without announcing it or counting it in the time estimate."""
        with self._lock:
            before = self._trials[result.key]
            self._trials[result.key] = replace(
                status_of(result),
                total_steps=before.total_steps,
                shard_bytes=before.shard_bytes,
                planned_reasons=before.planned_reasons,
            )
            self._steps_at_start += self._trials[result.key].total_steps

    def accounted_part(self) -> None:
        """Count one more accounted part."""
        with self._lock:
            self._parts += 1
            for trial in self._trials.values():
                if trial.state is TrialState.ACCOUNTING:
                    self._note_sign(trial.key, is_between=False)

    @property
    def parts(self) -> int:
        """Parts that this run has accounted."""
        return self._parts

    @property
    def steps(self) -> int:
        """Steps trained by all trials, including steps of earlier runs."""
        return sum(trial.step for trial in self.trials)

    @property
    def shard_bytes(self) -> int:
        """Bytes of norms stored so far, before compression, estimated from the plan and the steps trained."""
        return sum(trial.shard_bytes * trial.step // max(trial.total_steps, 1) for trial in self.trials)

    def counts(self) -> Mapping[TrialState, int]:
        """Return the number of trials by state; 0 for a state that no trial is in."""
        return Counter(trial.state for trial in self.trials)

    @property
    def must_stop(self) -> str | None:
        """The reason if no trial may train further in this run: its (GPU-)hours are over, or too many trials failed."""
        limits = self.limits
        if limits == NO_LIMITS:  # asked at every event of every trial
            return None
        failed, spent = self.counts()[TrialState.FAILED], self.spent
        if limits.hours is not None and spent.seconds >= 3600.0 * limits.hours:
            return f"its time is over (--max-hours {limits.hours:g})"
        if limits.gpu_hours is not None and spent.gpu_seconds >= 3600.0 * limits.gpu_hours:
            return f"its GPU-hours are used (--max-gpu-hours {limits.gpu_hours:g})"
        if limits.failures is not None and failed >= limits.failures:
            return f"{count_of(failed, 'trial has', 'trials have')} failed (--stop-after-failures {limits.failures})"
        return None

    @property
    def stopped_by(self) -> str | None:
        """The reason if this run leaves trials for the next one; None if all trials have ended."""
        left = sum(not trial.state.has_ended for trial in self.trials)
        if not left:
            return None
        reason = self.must_stop or f"it trains at most {self.limits.trials} of its trials (--max-trials)"
        return f"{reason}; {count_of(left, 'trial is', 'trials are')} left, and the same command continues"

    @property
    def trials_left(self) -> int | None:
        """Return how many trials this run may still begin; None means all."""
        most = self.limits.trials
        return None if most is None else max(0, most - self._before.trials)

    @property
    def spent(self) -> Spent:
        """Amounts spent so far by this run and by earlier drivers of its job."""
        now = time.monotonic()
        with self._lock:
            begun = [(self._trials[key], at) for key, at in self._begun.items() if self._trials[key].started]
            over = dict(self._over)
        held = sum(self._gpus.get(trial.key, 0.0) * (over.get(trial.key, now) - at) for trial, at in begun)
        ended = sum(trial.state.has_ended for trial, _ in begun)
        before = self._before
        return Spent(before.seconds + self.elapsed, before.gpu_seconds + held, before.trials + ended)

    @property
    def elapsed(self) -> float:
        """Seconds since this run of the sweep began, whatever was done to the clock meanwhile."""
        return time.monotonic() - self._began

    def seconds_left(self) -> float | None:
        """Return estimated seconds until the sweep ends, from the steps done in this run; None before the first step,
        and after the last one while trials are accounted, which takes no steps.
        """
        trials = self.trials
        done = sum(trial.total_steps if trial.state.has_ended else trial.step for trial in trials)
        remaining = sum(trial.total_steps for trial in trials) - done
        since_start = done - self._steps_at_start
        is_accounted = not remaining and not all(trial.state.has_ended for trial in trials)
        return self.elapsed * remaining / since_start if since_start > 0 and not is_accounted else None
