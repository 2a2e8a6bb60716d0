"""Keeps the tracker up to date while a sweep runs, without ever holding it up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from orchestration.records.published import PublishedTrial
from orchestration.tracking.protocol import Tracker, TrackingUnavailable

INTERVAL, LONGEST_INTERVAL = 2.0, 30.0
"""Seconds between two updates, and at most that many while the tracker fails."""
LAST_PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds before each attempt to record what is missing when the sweep has ended."""


class Recorder:
    """Brings the runs of changed trials up to date every few seconds, in a thread of its own: the only one that writes.

    What is recorded is a trial as it is at that moment, all its epochs included, never an event that could be lost. So
    a slow tracker gets fewer and larger updates, and one that failed gets the same again, until it is there again.

    current: the trial of a key, as it is now; called from the recorder's thread.
    """

    def __init__(self, tracker: Tracker, current: Callable[[str], PublishedTrial]) -> None:
        self._tracker, self._current = tracker, current
        self._recorded: dict[str, PublishedTrial] = {}
        self._changed: set[str] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="dpsweep-recorder", daemon=True)
        self.failure: TrackingUnavailable | None = None
        """Why the tracker does not hold everything; what is on disk is complete all the same."""

    def start(self) -> None:
        self._thread.start()

    def changed(self, key: str) -> None:
        """Have the trial recorded soon. Returns at once; may be called from any thread."""
        self._changed.add(key)

    def finish(self, keys: Iterable[str], publish: Callable[[Tracker], None]) -> None:
        """Record the given trials and publish what belongs to the sweep, again until it is done or patience ends."""
        self._end()
        self._changed.update(keys)
        for pause in LAST_PAUSES:
            time.sleep(pause)
            if self._attempt(publish):
                return

    def abandon(self) -> None:
        """End the sweep's runs as killed, with what is known by now, if the tracker lets us."""
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
        """Record every changed trial, and go on with ``then``; whether the tracker took it all."""
        try:
            while self._changed:
                self._record(self._changed.pop())
            then(self._tracker)
        except TrackingUnavailable as error:
            self.failure = error
            return False
        self.failure = None
        return True

    def _record(self, key: str) -> None:
        trial = self._current(key)
        if self._recorded.get(key) == trial:
            return
        try:
            self._tracker.log_trial(trial)
        except TrackingUnavailable:
            self._changed.add(key)
            raise
        self._recorded[key] = trial
