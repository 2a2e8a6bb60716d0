"""MLflow: the only module that imports it. The driver of a sweep is the only writer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from accounting.errors import DpsweepError
from orchestration.published import Label, ReportData, ReportTrial


class TrackingUnavailable(DpsweepError):
    """MLflow cannot be reached or refuses to write; results on disk are complete all the same."""


@dataclass(frozen=True)
class TrackedSweep:
    """A sweep as its parent run shows it. ``sweep_id`` is unique to the sweep and the same when it is resumed."""

    sweep_id: str
    name: str
    spec: str
    """The sweep's YAML."""
    manifest: Mapping[str, object] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    description: str = ""


@dataclass(frozen=True)
class TrackedDataset:
    """Training data by name and digest, never by content."""

    name: str
    digest: str
    source: str
    profile: Mapping[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrackedTrial:
    """A trial as its run shows it.

    params: flat; numbers where a number is meant (``epochs: 30``, ``noise.initial_noise_multiplier: 1.3``).
    started and ended: seconds since 1970, UTC.
    """

    shown: ReportTrial
    params: Mapping[str, Label] = field(default_factory=dict)
    dataset: TrackedDataset | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    started: float | None = None
    ended: float | None = None


class Tracker(Protocol):
    """Where a sweep is recorded. Every method may raise `TrackingUnavailable`; every method is idempotent."""

    def open_sweep(self, sweep: TrackedSweep) -> str:
        """Start or continue the sweep; runs that a killed driver left RUNNING are closed. Returns the run's id."""

    def log_trial(self, trial: TrackedTrial) -> str:
        """Bring the trial's run up to date: call it while the trial runs, and when it ended. Returns the run's id."""

    def log_report(self, page: str, data: ReportData) -> None:
        """Attach the rendered page and its figures to the sweep's run."""

    def close(self, status: Literal["FINISHED", "FAILED", "KILLED"] = "FINISHED") -> None:
        """Write the averages over seeds and end the sweep's run; no run of the sweep is RUNNING afterwards."""


def embedded_tracking_uri(folder: Path) -> str:
    """The SQLite store inside ``folder``."""
    raise NotImplementedError


class MlflowTracker:
    """A `Tracker` on any MLflow tracking URI: ``sqlite:///``, ``postgresql://``, ``http://``.

    artifact_root: absolute path or URI for artifacts where no server decides that (database URIs).
    Raises `TrackingUnavailable` at once when MLflow cannot be reached.
    """

    def __init__(self, tracking_uri: str, *, experiment: str = "dpsweep", artifact_root: str | None = None) -> None:
        raise NotImplementedError
