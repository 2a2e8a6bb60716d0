"""Keeps a sweep's ``status.json`` current while the sweep runs, so that it can be watched from anywhere."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from dpsweep.accounting.errors import DataCorruption, DpsweepError, StorageError
from dpsweep.accounting.records.local_files import UnsafeFile
from dpsweep.orchestration.comparison.values import finite
from dpsweep.orchestration.execution.notices import Notices
from dpsweep.orchestration.store.background import every
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.release_modes import Disclosure, release_mode
from dpsweep.orchestration.store.status import SweepStatus, TrialStatus
from dpsweep.orchestration.store.status_snapshot import (
    PERIOD,
    ClusterSnapshot,
    SweepSnapshot,
    TrialSnapshot,
    read_snapshot,
    write_snapshot,
)

JOB_VARIABLE: Final = "DPSWEEP_JOB"
"""Environment variable with the submission id of the Ray job that a driver runs in."""
_PACE_SNAPSHOTS: Final = 13
"""Number of snapshots over which the pace is measured: about a minute."""
_THREAD_TIMEOUT = 10.0
"""Seconds to wait, at the end, for the thread, which may be waiting for the cluster's answer."""


class StatusFile:
    """Writes snapshots of a sweep to ``uri``.

    `disclosure`: the release mode; a file that shows error texts is readable by its owner only.
    `cluster`: returns the state of the cluster, given the keys of waiting trials and the number of those that train.
    `warn`: called once, with a sentence, if trials wait for resources that no node has, and when the file can no longer
    be written: a full disk is seen here first.
    `show`: called with every snapshot.
    `notices`: told how the sweep ends, and whether it is stuck.
    Failures to write raise nothing, because the next snapshot may succeed.
    """

    def __init__(
        self,
        uri: str,
        name: str,
        sweep_id: str,
        disclosure: Disclosure,
        status: SweepStatus,
        cluster: Callable[[Sequence[str], int], ClusterSnapshot | None],
        warn: Callable[[str], None],
        show: Callable[[SweepSnapshot], None],
        notices: Notices,
    ) -> None:
        self._uri, self._name, self._sweep_id = uri, name, sweep_id
        self._is_sensitive = release_mode(disclosure).is_sensitive
        self._status, self._cluster, self._warn, self._show = status, cluster, warn, show
        self._notices = notices
        self._seen = deque([(status.began, status.steps)], maxlen=_PACE_SNAPSHOTS)
        self._lock = threading.Lock()
        self._has_warned = self._is_silent = False

    @contextlib.contextmanager
    def kept_current(self, period: float = PERIOD) -> Iterator[None]:
        """Write a snapshot at the start and the end of a ``with`` block and every ``period`` seconds within."""
        self._write("running", None)
        outcome, failure = "interrupted", None
        try:
            with every(period, self._look, _THREAD_TIMEOUT):
                yield
            over = "failed" if self._status.counts()[TrialState.FAILED] else "finished"
            outcome = "stopped" if self._status.stopped_by else over
        except BaseException as error:
            failure = error
            raise
        finally:
            recording = self._status.recording
            state = "recording" if recording is not None and recording.missing() else outcome
            if self._status.adds_trials and failure is None:
                self._write("running", None)
            else:
                self._notices.ended(self._write(state, None), failure)
                self._write(state, None)

    def _look(self, over: threading.Event) -> None:
        waiting = [trial.key for trial in self._status.trials if trial.state is TrialState.PENDING]
        cluster = self._cluster(waiting, self._status.counts()[TrialState.TRAINING])
        with self._lock:  # the last snapshot, which says how the sweep ended, must not be replaced
            if not over.is_set():
                recording = self._status.recording
                is_recording = recording is not None and recording.goes_on
                self._notices.watch(self._write_unlocked("recording" if is_recording else "running", cluster))
        self._warn_of_shortage(cluster)

    def _write(self, state: str, cluster: ClusterSnapshot | None) -> SweepSnapshot:
        with self._lock:
            return self._write_unlocked(state, cluster)

    def _write_unlocked(self, state: str, cluster: ClusterSnapshot | None) -> SweepSnapshot:
        snapshot = SweepSnapshot(
            name=self._name,
            sweep_id=self._sweep_id,
            state=state,
            heartbeat=time.time(),
            elapsed=self._status.elapsed,
            seconds_left=self._status.seconds_left() if state == "running" else None,
            host=socket.gethostname(),
            pid=os.getpid(),
            job=os.environ.get(JOB_VARIABLE),
            trials=tuple(_snapshot_of(trial, self._status.quiet(trial.key)) for trial in self._status.trials),
            cluster=cluster,
            reason=self._status.stopped_by if state == "stopped" else None,
            limits=self._status.limits.given(),
            spent=self._status.spent,
            steps=self._status.steps,
            steps_per_second=self._pace(),
            parts=self._status.parts,
            shard_bytes=self._status.shard_bytes,
            told=self._notices.told,
            recording=self._status.recording,
        )
        try:
            write_snapshot(self._uri, snapshot, self._is_sensitive)
            self._is_silent = False
        except (StorageError, UnsafeFile) as error:  # no file for others to read, but no reason to stop training
            if not self._is_silent:
                self._warn(f"`dpsweep status` cannot show this run: {error}")
            self._is_silent = True
        self._show(snapshot)
        return snapshot

    def _pace(self) -> float | None:
        """Return the steps per second over the last snapshots; trials report their steps at the end of an epoch."""
        (then, before), now, steps = self._seen[0], time.time(), self._status.steps
        self._seen.append((now, steps))
        return max(0.0, (steps - before) / (now - then)) if now > then else None

    def _warn_of_shortage(self, cluster: ClusterSnapshot | None) -> None:
        if cluster is not None and not self._has_warned and (shortage := cluster.shortage()):
            self._has_warned = True
            self._warn(shortage)


def earlier_driver(uri: str) -> SweepSnapshot | None:
    """Return the last snapshot at ``uri`` if it is whole and an earlier driver of this Ray job wrote it, else None."""
    job, found = os.environ.get(JOB_VARIABLE), None
    with contextlib.suppress(DataCorruption):
        found = read_snapshot(uri) if job else None
    return found if found is not None and found.job == job else None


def tell_failed(
    targets: Sequence[str], files: SweepFiles, sweep: str, message: str, warn: Callable[[str], None]
) -> None:
    """Tell ``targets`` that the sweep of this Ray job has failed, unless one of its drivers has told how it ended.

    For drivers that were refused before their sweep began, or that were killed.
    """
    earlier = None
    with contextlib.suppress(DpsweepError, OSError):  # the storage may be why it failed
        earlier = earlier_driver(files.status)
    told = earlier.told if earlier else ()
    if "finished" not in told:
        notices = Notices(targets, files.root, told, warn)
        notices.tell("failed", message, earlier, sweep)
        notices.wait()


def _snapshot_of(trial: TrialStatus, quiet: float | None) -> TrialSnapshot:
    """Return the part of a trial's status that may be shown; an infinite epsilon becomes ``private=False``."""
    epsilon = trial.epsilon
    return TrialSnapshot(
        key=trial.key,
        state=trial.state,
        step=trial.step,
        total_steps=trial.total_steps,
        epoch=trial.progress.epoch if trial.progress else None,
        accuracy=finite(trial.accuracy),
        epsilon=finite(epsilon),
        private=None if epsilon is None else epsilon < math.inf,
        error=trial.error,
        scores=trial.scores,
        reasons=trial.reasons,
        device=trial.device,
        unit=trial.unit,
        quiet=quiet,
    )
