"""Where a running sweep is: what the display shows, updated from the threads that train and account."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from orchestration.records.published import ReportEpoch

State = Literal["pending", "training", "accounting", "finished", "stopped", "failed"]
ENDED: frozenset[State] = frozenset({"finished", "stopped", "failed"})


@dataclass(frozen=True)
class TrialStatus:
    """One trial. accuracy is of held-out test data; epsilon is the worst case so far, by RDP; seconds are UTC.

    history: the epochs that this run of the sweep saw.
    """

    key: str
    total_steps: int
    state: State = "pending"
    epoch: int = 0
    step: int = 0
    accuracy: float | None = None
    epsilon: float | None = None
    started: float | None = None
    trained: float | None = None
    ended: float | None = None
    error: str | None = None
    history: tuple[ReportEpoch, ...] = ()


class SweepStatus:
    """The trials of a sweep; safe to read and change from several threads.

    on_end is called with each trial that ends, in the thread that ended it.
    """

    def __init__(self, trials: Iterable[TrialStatus], on_end: Callable[[TrialStatus], None]) -> None:
        self._trials = {trial.key: trial for trial in trials}
        self._lock = threading.Lock()
        self._on_end = on_end
        self._steps_at_start = 0
        self.began = time.time()

    @property
    def trials(self) -> tuple[TrialStatus, ...]:
        with self._lock:
            return tuple(self._trials.values())

    def __getitem__(self, key: str) -> TrialStatus:
        with self._lock:
            return self._trials[key]

    def change(self, key: str, **changes: object) -> None:
        """Replace the named fields of one trial; times of start and end are kept by this class."""
        with self._lock:
            before = self._trials[key]
            after = replace(before, **changes)  # type: ignore[arg-type]
            now = time.time()
            if after.started is None and after.state != "pending":
                after = replace(after, started=now)
            if after.trained is None and after.state == "accounting":
                after = replace(after, trained=now)
            if after.state in ENDED and before.state not in ENDED:
                after = replace(after, ended=now)
            self._trials[key] = after
        if after.state in ENDED and before.state not in ENDED:
            self._on_end(after)

    def assume(self, key: str, **facts: object) -> None:
        """Take a trial as an earlier run left it: not announced, and no part of this run's pace."""
        with self._lock:
            self._trials[key] = replace(self._trials[key], **facts)  # type: ignore[arg-type]
            self._steps_at_start += self._trials[key].total_steps

    def counts(self) -> Mapping[State, int]:
        return Counter(trial.state for trial in self.trials)

    @property
    def elapsed(self) -> float:
        return time.time() - self.began

    def seconds_left(self) -> float | None:
        """Estimated from the steps done since this run began; None before the first one."""
        trials = self.trials
        done = sum(trial.total_steps if trial.state in ENDED else trial.step for trial in trials)
        remaining = sum(trial.total_steps for trial in trials) - done
        since_start = done - self._steps_at_start
        return self.elapsed * remaining / since_start if since_start > 0 else None
