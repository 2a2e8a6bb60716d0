"""Records trials in the tracker while a sweep runs, in its own thread, so that a slow tracker delays nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from orchestration.records.published import PublishedTrial
from orchestration.tracking.protocol import Tracker, TrackingUnavailable

INTERVAL, LONGEST_INTERVAL = 2.0, 30.0
"""Seconds between two updates; the interval doubles up to the second value while the tracker fails."""
LAST_PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds to wait before each attempt to record the remaining changes after the sweep has ended."""
LAST_BEGUN_WITHIN = 60.0
"""Seconds after the end of the sweep in which a further attempt begins; one at a server that never answers takes 40."""


class TrackingRecorder:
    """Updates the runs of changed trials every few seconds. Between `start` and `finish` only its thread writes.

    Each update is the whole current state of a trial, with all its epochs, not a single event. A slow tracker therefore
    gets fewer and larger updates, and a failed update is repeated until it succeeds. A trial is first recorded when it
    has run for one interval, so a shorter trial takes half as many requests.

    current: returns the trial with a given key as it is now; called from the recorder's thread.
    """

    def __init__(self, tracker: Tracker, current: Callable[[str], PublishedTrial]) -> None:
        self._tracker, self._current = tracker, current
        self._recorded: dict[str, PublishedTrial] = {}
        self._changed: set[str] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="dpsweep-recorder", daemon=True)
        self.failure: TrackingUnavailable | None = None
        """Why the last update failed, or None. Results on disk are complete either way."""

    def start(self) -> None:
        """Start recording."""
        self._thread.start()

    def changed(self, key: str) -> None:
        """Record the trial with the next update. Returns at once. Thread-safe."""
        self._changed.add(key)

    def finish(self, keys: Iterable[str], publish: Callable[[Tracker], None]) -> None:
        """Stop the thread, record the given trials and call ``publish``, with one attempt per pause in `LAST_PAUSES`.

        None begins later than `LAST_BEGUN_WITHIN`. If all attempts fail, `failure` holds the last error; nothing is
        raised.
        """
        self._end()
        self._changed.update(keys)
        deadline = time.monotonic() + LAST_BEGUN_WITHIN
        for pause in LAST_PAUSES:
            if time.monotonic() + pause > deadline:
                return
            time.sleep(pause)
            if self._attempt(publish):
                return

    def abandon(self) -> None:
        """Record the remaining changes and close the sweep's runs as killed; one attempt, nothing is raised."""
        self._end()
        self._attempt(lambda tracker: tracker.close("KILLED"))

    def _end(self) -> None:
        self._ending.set()
        self._thread.join()

    def _follow(self) -> None:
        pause = INTERVAL
        while not self._ending.wait(pause):
            pause = INTERVAL if self._attempt() else min(2.0 * pause, LONGEST_INTERVAL)

    def _attempt(self, then: Callable[[Tracker], None] = lambda tracker: None) -> bool:
        """Record every changed trial, then call ``then``. Returns whether all of it succeeded."""
        try:
            self._record_changed()
            then(self._tracker)
        except TrackingUnavailable as error:
            self.failure = error
            return False
        self.failure = None
        return True

    def _record_changed(self) -> None:
        begun = set[str]()
        try:
            while self._changed:
                trial = self._current(self._changed.pop())
                if self._has_just_begun(trial):
                    begun.add(trial.key)
                else:
                    self._record(trial)
        finally:
            self._changed.update(begun)

    def _has_just_begun(self, trial: PublishedTrial) -> bool:
        if self._ending.is_set() or not trial.state.is_running:
            return False
        return trial.key not in self._recorded and time.time() - (trial.started or 0.0) < INTERVAL

    def _record(self, trial: PublishedTrial) -> None:
        key = trial.key
        if self._recorded.get(key) == trial:
            return
        try:
            self._tracker.log_trial(trial)
        except TrackingUnavailable:
            self._changed.add(key)
            raise
        self._recorded[key] = trial
