"""Records trials in the tracker, several at a time, while a sweep runs and until all are recorded."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from dpsweep.orchestration.store.published import PublishedTrial
from dpsweep.orchestration.store.status import NOTHING_RECORDED, RecordingStatus
from dpsweep.orchestration.tracking.requests import each, within_seconds
from dpsweep.orchestration.tracking.tracker import Tracker, TrackingUnavailable

INTERVAL, LONGEST_INTERVAL = 2.0, 30.0
"""Seconds between two updates; the interval doubles up to the second value while the tracker fails."""
PAUSES: Final = (1.0, 15.0)
"""Seconds between two attempts after the sweep has ended: the first pause, doubled up to the second."""
SILENCE = 180.0
"""Seconds without a single confirmed write after which recording is given up; any write starts them anew."""
LAST_MOMENTS = 2.0
"""Seconds that a driver takes, when it is told to stop, to record what it can and to close the sweep's runs."""
_PACE_SECONDS = 20.0


class TrackingRecorder:
    """Updates the runs of changed trials every few seconds. Between `start` and `finish` only its threads write.

    Each update is the whole current state of a trial, with all its epochs, not a single event. A slow tracker therefore
    gets fewer and larger updates, and a failed update is repeated until it succeeds. The trials that wait are a set of
    keys, which never outgrows the sweep. A trial is first recorded when it has run for one interval, so a shorter
    trial takes half as many requests.

    `current`: returns the trial with a given key as it is now; called from the recorder's threads. `begun`: where it is
    recorded. `on_progress`: called with the recording when it has changed, once all trials have ended.
    """

    def __init__(
        self,
        tracker: Tracker,
        current: Callable[[str], PublishedTrial],
        begun: RecordingStatus = NOTHING_RECORDED,
        on_progress: Callable[[RecordingStatus], None] = lambda recording: None,
    ) -> None:
        self._tracker, self._current, self._begun, self._on_progress = tracker, current, begun, on_progress
        self._recorded: dict[str, PublishedTrial] = {}
        self._changed: set[str] = set()
        self._failed: set[str] = set()
        self._busy: set[str] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="dpsweep-recorder", daemon=True)
        self._lock = threading.Lock()
        self._moments: deque[float] = deque(maxlen=1000)
        self._keys: frozenset[str] = frozenset()
        self._until = math.inf
        self.failure: TrackingUnavailable | None = None
        """Why the last update failed, or None. Results on disk are complete either way."""
        self._is_over = self._is_complete = self._is_closed = False

    def start(self) -> None:
        """Start recording."""
        self._thread.start()

    def changed(self, key: str) -> None:
        """Record the trial with the next update. Returns at once. Thread-safe."""
        self._changed.add(key)

    def finish(self, keys: Iterable[str], publish: Sequence[Callable[[Tracker], None]]) -> None:
        """Stop following, record the given trials, and take the steps of ``publish``; the last one closes the runs.

        As long as the tracker confirms a write now and then, this goes on until everything is recorded. After `SILENCE`
        it gives up: `failure` then holds the last error; nothing is raised.
        """
        self._keys = frozenset(keys)
        self._end()
        self._changed.update(self._keys)
        self._note_progress()  # that it goes on, also where the tracker takes nothing
        left = list(publish)
        pause, answered, last_answer = PAUSES[0], self._tracker.answered, time.monotonic()
        while not within_seconds(
            threading.TIMEOUT_MAX, lambda: self._attempt(left), ""
        ):  # a signal ends the wait for SQLite
            if self._tracker.answered != answered:
                pause, answered, last_answer = PAUSES[0], self._tracker.answered, time.monotonic()
            elif time.monotonic() - last_answer >= SILENCE:
                self._is_over = True
                self._note_progress()
                return
            self._note_progress()  # why, and that nothing was recorded since
            time.sleep(pause)
            pause = min(2.0 * pause, PAUSES[1])
        self._is_over = self._is_complete = self._is_closed = True
        self._note_progress()

    def abandon(self, keys: Iterable[str] = ()) -> None:
        """Record what can be in `LAST_MOMENTS`, and close the sweep's runs as killed; nothing is raised.

        keys: those that `finish` would be given, where all trials have ended before it was called. Then `recording`
        tells what is missing, too.
        """
        self._keys = self._keys or frozenset(keys)
        self._until = time.monotonic() + LAST_MOMENTS / 2.0
        self._ending.set()

        def end() -> None:
            try:
                self._end()
                self._round()
            except TrackingUnavailable as error:
                self.failure = error
            try:
                self._tracker.interrupt()
                self._is_closed = True
            except TrackingUnavailable as error:
                self.failure = error

        last = threading.Thread(target=end, name="dpsweep-recorder-end", daemon=True)
        last.start()
        last.join(LAST_MOMENTS)
        self._is_over = True
        self._on_progress(self.recording)

    @property
    def recording(self) -> RecordingStatus:
        """Return how many of the trials to record are recorded as they ended, the recent pace, and whether it is
        over.
        """
        with self._lock:
            done = sum(key in self._recorded and self._recorded[key].state.has_ended for key in self._keys)
            recent = [moment for moment in self._moments if moment > time.monotonic() - _PACE_SECONDS]
        took = max(time.monotonic() - recent[0], 1.0) if recent else 1.0
        ended_early = self._is_over and not self._is_complete
        return replace(
            self._begun,
            recorded=done,
            trials=len(self._keys),
            per_second=len(recent) / took,
            is_complete=self._is_complete,
            is_closed=self._is_closed,
            failure=str(self.failure or "interrupted") if ended_early else None,
            trouble=str(self.failure) if self.failure and not self._is_over else None,
        )

    def _end(self) -> None:
        self._ending.set()
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    def _follow(self) -> None:
        pause = INTERVAL
        while not self._ending.wait(pause):
            pause = INTERVAL if self._attempt([]) else min(2.0 * pause, LONGEST_INTERVAL)

    def _attempt(self, steps: list[Callable[[Tracker], None]]) -> bool:
        """Record every changed trial, then take ``steps``, removing each. Returns whether all of it succeeded."""
        try:
            self._round()
            while steps:
                steps[0](self._tracker)
                del steps[0]
        except TrackingUnavailable as error:
            self.failure = error
            return False
        self.failure = None
        return True

    def _round(self) -> None:
        """Record the trials that have changed; those that failed before come last, so that they hold up no other."""
        keys = sorted(self._changed.copy(), key=lambda key: key in self._failed)
        each(self._record, keys, self._tracker.in_flight)

    def _record(self, key: str) -> None:
        if time.monotonic() > self._until:
            return
        with self._lock:  # threads of an interrupted round may still be at work
            if key not in self._changed or key in self._busy:
                return
            self._changed.discard(key)
            self._busy.add(key)
        try:
            self._record_now(key)
        finally:
            self._busy.discard(key)

    def _record_now(self, key: str) -> None:
        trial = self._current(key)
        if self._has_just_begun(trial):
            self._changed.add(key)
            return
        if self._recorded.get(key) == trial:
            return
        try:
            self._tracker.log_trial(trial)
        except BaseException:
            self._changed.add(key)
            self._failed.add(key)
            raise
        self._failed.discard(key)
        with self._lock:
            self._recorded[key] = trial
            self._moments.append(time.monotonic())
        self._note_progress()

    def _note_progress(self) -> None:
        if self._keys:
            self._on_progress(self.recording)

    def _has_just_begun(self, trial: PublishedTrial) -> bool:
        if self._ending.is_set() or not trial.state.is_running:
            return False
        age = time.time() - (trial.started or 0.0)  # negative where the clock was set back
        return trial.key not in self._recorded and 0.0 <= age < INTERVAL
