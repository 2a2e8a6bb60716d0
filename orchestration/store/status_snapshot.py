"""Snapshots of a sweep's progress, which its driver writes to ``status.json`` every few seconds.

A snapshot holds the same as the terminal and MLflow show of a running sweep: configuration, counts, evaluations on test
data, upper bounds on epsilon. Error texts are cut to the part that the release mode shows. Nothing in it is computed
from the norms or epsilons of training examples.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Final

from pydantic import TypeAdapter

from dpsweep.accounting.errors import DataCorruption, count_of
from dpsweep.accounting.mechanism.reasons import Reason
from dpsweep.accounting.mechanism.units import EXAMPLE, UnitName
from dpsweep.accounting.records.local_files import is_locked
from dpsweep.accounting.records.sealed import read_sealed, write_sealed
from dpsweep.orchestration.store.layout import LOCK
from dpsweep.orchestration.store.limits import NOTHING_SPENT, Spent
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.status import RecordingStatus
from dpsweep.workers.machine.memory import DeviceUse

PERIOD = 5.0
"""Seconds between two snapshots."""
LOST: Final = "lost"
"""State of a sweep whose driver has ended without saying how: it was killed, or could not write."""
STALE_AFTER = 12 * PERIOD
"""Seconds without a new snapshot after which the driver of a running sweep is considered dead."""


@dataclass(frozen=True)
class TrialSnapshot:
    """One trial.

    `accuracy`: on test data, for classification.
    `scores`: the main score, for other tasks.
    `epsilon`: upper bound on the cost so far, or cost of the whole trial once it is over; None before the first epoch
    and for a trial that is not private.
    `unit`: whose privacy it is.
    `error`: the part of the error text that may be shown.
    `reasons`: why epsilon is an estimate.
    `quiet`: seconds without progress, if they are unusually many.
    """

    key: str
    state: TrialState
    step: int
    total_steps: int
    epoch: int | None = None
    accuracy: float | None = None
    epsilon: float | None = None
    private: bool | None = None
    error: str | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    reasons: tuple[Reason, ...] = ()
    device: DeviceUse | None = None
    unit: UnitName = EXAMPLE.name
    quiet: float | None = None


@dataclass(frozen=True)
class NodeSnapshot:
    """A node of the cluster, and the total amount of each of its resources, such as ``{"CPU": 8}``."""

    address: str
    resources: Mapping[str, float]


@dataclass(frozen=True)
class ClusterSnapshot:
    """The nodes that a sweep runs on, and the resources that its trials wait for.

    `trial`: resources that one trial reserves.
    `free`: unused resources over all nodes.
    `waiting`: number of trials that have not started, without those ``starting``, whose resources are reserved.
    `missing`: resources of ``trial`` that no single node has, so that it waits until such a node joins.
    """

    nodes: tuple[NodeSnapshot, ...]
    trial: Mapping[str, float]
    free: Mapping[str, float]
    waiting: int
    missing: Mapping[str, float]
    starting: int = 0

    def shortage(self) -> str:
        """Return how many trials wait for resources that no node has, and for which; "" if none does."""
        if not (self.missing and self.waiting):
            return ""
        wanted = ", ".join(f"{name} {amount:g}" for name, amount in self.missing.items())
        return (
            f"{count_of(self.waiting, 'trial waits', 'trials wait')}: no node can give a trial {wanted}; wait if an "
            "autoscaler starts one that can, else add one, or lower the sweep's resources"
        )


@dataclass(frozen=True)
class SweepSnapshot:
    """A sweep at ``heartbeat``, in seconds since 1970 UTC by the driver's clock.

    `state`: ``running``, ``recording`` (all trials have ended, and not all are recorded in MLflow), ``finished``,
    ``failed`` (over, with trials that failed), ``stopped`` (by a limit that ``reason`` names) or ``interrupted``; for a
    reader also `LOST`.
    `recording`: in MLflow; None without MLflow.
    `seconds_left`: None if it cannot be estimated.
    `job`: submission id of the Ray job that the driver runs in, if it does.
    `limits`: of this run, as command-line options.
    `spent`: amounts that count towards the limits.
    `steps`: trained by all trials.
    `steps_per_second`: recent speed of all trials together.
    `parts`: accounted by this driver.
    `shard_bytes`: planned size of the norms so far, before compression; the sizes of the written files are private.
    `told`: events that `notify` has sent.
    """

    name: str
    sweep_id: str
    state: str
    heartbeat: float
    elapsed: float
    seconds_left: float | None
    host: str
    pid: int
    job: str | None
    trials: tuple[TrialSnapshot, ...]
    cluster: ClusterSnapshot | None = None
    reason: str | None = None
    limits: tuple[str, ...] = ()
    spent: Spent = NOTHING_SPENT
    steps: int = 0
    steps_per_second: float | None = None
    parts: int = 0
    shard_bytes: int = 0
    told: tuple[str, ...] = ()
    recording: RecordingStatus | None = None

    def counts(self) -> Mapping[TrialState, int]:
        """Return the number of trials by state; 0 for a state that no trial is in."""
        return Counter(trial.state for trial in self.trials)

    def age(self, now: float | None = None) -> float:
        """Return the seconds since the heartbeat, by this machine's clock; negative where the driver's is ahead."""
        return (time.time() if now is None else now) - self.heartbeat

    def is_stale(self, now: float | None = None) -> bool:
        """Return whether the sweep claims to run, but its driver has written no snapshot for `STALE_AFTER` seconds."""
        return not self.is_over and self.age(now) > STALE_AFTER

    @property
    def is_over(self) -> bool:
        """Return whether the driver has ended, as it says: it neither runs trials nor records them."""
        is_recording = self.state == "recording" and self.recording is not None and self.recording.goes_on
        return self.state != "running" and not is_recording

    def may_run_in_mlflow(self) -> bool:
        """Return whether MLflow may show the sweep as running though its driver has ended, because it could not
        close it.

        Runs are ended by whoever asks. A lock may not reach between containers of one host name, so that of a `LOST`
        driver, which may live, the silence must tell too.
        """
        is_open = self.recording is not None and not self.recording.is_closed
        has_ended = self.age() > STALE_AFTER if self.state == LOST else self.is_over or self.is_stale()
        return is_open and has_ended


_SNAPSHOT = TypeAdapter(SweepSnapshot)


def write_snapshot(uri: str, snapshot: SweepSnapshot, private: bool) -> None:
    """Replace the snapshot at ``uri`` atomically: a reader finds the old or the new one.

    `private`: make the file readable by its owner only, because error texts in it may quote the data.
    Raises: StorageError.
    """
    write_sealed(uri, json.dumps(asdict(snapshot), allow_nan=False).encode(), private)


def read_snapshot(uri: str) -> SweepSnapshot | None:
    """Return the snapshot, or None if there is none.

    It says `LOST` if it claims that a driver of this host runs outside of a job, and none does, by the lock of the
    local folder. It is read twice if it seems damaged: an object that its driver replaces between the two requests of a
    read (for its size, and for its content) is cut. Raises: DataCorruption if it is damaged or cannot be parsed,
    StorageError.
    """
    found = _read(uri)
    if found is None or found.is_over or not _is_abandoned(uri, found):
        return found
    again = _read(uri)  # its driver may have said meanwhile how it ended, or another may have begun
    return replace(again, state=LOST) if again is not None and again.heartbeat == found.heartbeat else again


def _is_abandoned(uri: str, snapshot: SweepSnapshot) -> bool:
    """Return whether nobody holds the lock of the folder, where this host's drivers would; elsewhere locks may not
    reach. A job starts its driver again after a pause.
    """
    is_here = "://" not in uri and snapshot.host == socket.gethostname() and snapshot.job is None
    return is_here and is_locked(f"{os.path.dirname(uri)}/{LOCK}") is False


def _read(uri: str) -> SweepSnapshot | None:
    with contextlib.suppress(DataCorruption):
        return _read_once(uri)
    return _read_once(uri)


def _read_once(uri: str) -> SweepSnapshot | None:
    content = read_sealed(uri, _AGAIN)
    if content is None:
        return None
    try:
        found = _SNAPSHOT.validate_json(content)
        json.dumps(asdict(found), allow_nan=False)  # a driver writes finite numbers only
        datetime.datetime.fromtimestamp(found.heartbeat, datetime.UTC)
        return found
    except (ValueError, OverflowError, OSError) as error:  # the last two: no time that a calendar has
        raise DataCorruption(f"{uri} is no status of this version of dpsweep; {_AGAIN}") from error


_AGAIN = "a driver writes it every few seconds; of a sweep that has ended, the same dpsweep run writes it again"
