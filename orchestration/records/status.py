"""Progress of a running sweep: read by the display, updated from the threads that train and account."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from accounting.errors import require_finite, require_whole
from orchestration.records.published import PublishedEpoch
from orchestration.records.results import StoredResult, TrialResult
from orchestration.records.states import TrialState
from workers.history import Progress


@dataclass(frozen=True)
class TrialStatus:
    """What has happened to one trial.

    progress: at the last epoch completed in this run of the sweep. epsilon_so_far: upper bound on epsilon at that
    epoch, by RDP. history: the epochs completed in this run. result: of a finished or stopped trial. started, trained,
    ended: when the trial started, ended training and ended in this run, in seconds since 1970 UTC.
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

    @property
    def step(self) -> int:
        """Steps trained so far."""
        if self.result is not None:
            return self.result.steps
        return self.progress.step if self.progress else 0

    @property
    def accuracy(self) -> float | None:
        """Accuracy on held-out test data; None before the first evaluation."""
        known = self.result or self.progress
        return known.evaluation.accuracy if known else None

    @property
    def epsilon(self) -> float | None:
        """Worst-case epsilon: of the whole trial once it has a result, else of the steps so far."""
        return self.result.worst_case.epsilon if self.result else self.epsilon_so_far


def status_of(result: StoredResult) -> TrialStatus:
    """The status of a trial whose result an earlier run of the sweep has stored."""
    state = TrialState.FINISHED if isinstance(result, TrialResult) else TrialState.STOPPED
    return TrialStatus(result.key, result.steps, state, result=result, started=result.started, ended=result.ended)


@dataclass(frozen=True)
class Limits:
    """When a run of a sweep stops early, to be continued; None: never.

    hours: since the run began. trials: how many it trains. failures: how many trials may fail.
    """

    hours: float | None = None
    trials: int | None = None
    failures: int | None = None

    def __post_init__(self) -> None:
        if self.hours is not None:
            require_finite("the maximum of hours", self.hours, above=0.0)
        for what, number in (("the maximum of trials", self.trials), ("the number of failures", self.failures)):
            if number is not None:
                require_whole(what, number, at_least=1)


NO_LIMITS: Final = Limits()


class SweepStatus:
    """The trials of a sweep. Thread-safe.

    on_end: called with each trial that ends, in the thread that called `change`.
    """

    def __init__(
        self, trials: Iterable[TrialStatus], on_end: Callable[[TrialStatus], None], limits: Limits = NO_LIMITS
    ) -> None:
        self.limits = limits
        self._trials = {trial.key: trial for trial in trials}
        self._lock = threading.Lock()
        self._on_end = on_end
        self._steps_at_start = 0
        self.began = time.time()

    @property
    def trials(self) -> tuple[TrialStatus, ...]:
        """All trials, as they are now, in the order of the grid."""
        with self._lock:
            return tuple(self._trials.values())

    def __getitem__(self, key: str) -> TrialStatus:
        with self._lock:
            return self._trials[key]

    def change(self, key: str, **changes: object) -> None:
        """Replace the named fields of one trial; ``started``, ``trained`` and ``ended`` follow from its state."""
        with self._lock:
            before = self._trials[key]
            after = replace(before, **changes)  # type: ignore[arg-type]
            now = time.time()
            if after.started is None and after.state is not TrialState.PENDING:
                after = replace(after, started=now)
            if after.trained is None and after.state is TrialState.ACCOUNTING:
                after = replace(after, trained=now)
            if after.state.has_ended and not before.state.has_ended:
                after = replace(after, ended=now)
            self._trials[key] = after
        if after.state.has_ended and not before.state.has_ended:
            self._on_end(after)

    def restore(self, result: StoredResult) -> None:
        """Restore the result of an earlier run without announcing it or counting it in the time estimate."""
        with self._lock:
            self._trials[result.key] = replace(status_of(result), total_steps=self._trials[result.key].total_steps)
            self._steps_at_start += self._trials[result.key].total_steps

    def counts(self) -> Mapping[TrialState, int]:
        """Number of trials by state; 0 for a state that no trial is in."""
        return Counter(trial.state for trial in self.trials)

    @property
    def must_stop(self) -> str | None:
        """Why no trial may train any further in this run, if so: its hours are over, or too many trials have failed."""
        limits, failed = self.limits, self.counts()[TrialState.FAILED]
        if limits.hours is not None and self.elapsed >= 3600.0 * limits.hours:
            return f"{limits.hours:g} hours are over (--max-hours)"
        if limits.failures is not None and failed >= limits.failures:
            return f"{failed} trials have failed (--stop-after-failures {limits.failures})"
        return None

    @property
    def stopped_by(self) -> str | None:
        """Why this run leaves trials for the next one, if it does."""
        left = sum(not trial.state.has_ended for trial in self.trials)
        if not left:
            return None
        reason = self.must_stop or f"it trains at most {self.limits.trials} trials (--max-trials)"
        return f"{reason}; {left} trials are left, and the same command continues"

    @property
    def elapsed(self) -> float:
        """Seconds since this run of the sweep began."""
        return time.time() - self.began

    def seconds_left(self) -> float | None:
        """Estimated seconds until the sweep ends, from the steps done in this run; None before the first step."""
        trials = self.trials
        done = sum(trial.total_steps if trial.state.has_ended else trial.step for trial in trials)
        remaining = sum(trial.total_steps for trial in trials) - done
        since_start = done - self._steps_at_start
        return self.elapsed * remaining / since_start if since_start > 0 else None
