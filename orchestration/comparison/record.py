"""From stored results to what leaves the sweep: the report's data, MLflow's trials, the table on the terminal."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from accounting.records.files import write_bytes_atomically
from orchestration.comparison.metrics import known, worst_group_name
from orchestration.records.layout import SweepFiles
from orchestration.records.manifest import Manifest
from orchestration.records.published import (
    Disclosure,
    IndividualStatistics,
    Label,
    ReportData,
    ReportPrivacy,
    ReportTrial,
    Status,
)
from orchestration.records.results import StoppedTrial, StoredResult, TrialResult, read_statistics, shown, shown_stopped
from orchestration.records.status import State, TrialStatus
from orchestration.report.page import render
from orchestration.sweeps.grid import GridPoint
from orchestration.sweeps.schema import SweepSpec
from orchestration.tracking.protocol import TrackedDataset, TrackedTrial
from workers.history import TrainingResult
from workers.spec import DataSpec, TrialSpec

_STATUSES: Mapping[State, Status] = {
    "pending": "pending",
    "training": "running",
    "accounting": "running",
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
}

Statistics = Callable[[TrialResult], IndividualStatistics | None]
"""What is told about the training examples of a trial."""


def disclosed(result: TrialResult) -> IndividualStatistics | None:
    """What the sweep discloses."""
    return result.individuals


def exact(files: SweepFiles) -> Statistics:
    """The exact statistics, for the owner of the data. Raises `DataCorruption` where they are damaged."""

    def statistics(result: TrialResult) -> IndividualStatistics | None:
        trial = files.trial(result.key)
        return read_statistics(trial.private_summary, f"delete {trial.result} and resume, which rebuilds both")

    return statistics


@dataclass(frozen=True)
class SweepRecord:
    """A sweep with everything that is known of its trials: results of those that are over, the state of the others."""

    manifest: Manifest
    sweep: SweepSpec
    points: tuple[GridPoint, ...]
    results: Mapping[str, StoredResult]
    statuses: Mapping[str, TrialStatus]

    @property
    def disclosure(self) -> Disclosure:
        return self.sweep.disclosure

    @property
    def failed(self) -> bool:
        return any(status.state == "failed" for status in self.statuses.values())

    def finished(self, key: str | None) -> TrialResult | None:
        """The result of a trial that trained to its end."""
        result = self.results.get(key or "")
        return result if isinstance(result, TrialResult) else None

    def trial(self, point: GridPoint, statistics: Statistics = disclosed) -> ReportTrial:
        """One trial as shown, compared with its baseline where both are complete."""
        key = point.trial.key
        match self.results.get(key):
            case TrialResult() as result:
                return shown(result, self.finished(point.baseline), statistics(result))
            case StoppedTrial() as stopped:
                return shown_stopped(stopped)
        status = self.statuses.get(key, TrialStatus(key, total_steps=0))
        privacy = None if point.is_private else ReportPrivacy(math.inf, point.trial.delta, accountant="none")
        return ReportTrial(key, point.labels, _STATUSES[status.state], status.error, privacy, history=status.history)

    def data(self, statistics: Statistics = disclosed) -> ReportData:
        """The whole sweep as shown."""
        return ReportData(
            name=self.sweep.name,
            trials=tuple(self.trial(point, statistics) for point in self.points),
            delta=self.sweep.privacy.delta,
            disclosure="raw" if statistics is not disclosed else self.disclosure,
            created=self.manifest.created,
            provenance=self.manifest.provenance(),
        )

    def tracked(self, point: GridPoint) -> TrackedTrial:
        """One trial as its MLflow run shows it: nothing but what the sweep discloses."""
        key, result = point.trial.key, self.finished(point.trial.key)
        spec = result.spec if result else point.trial
        timed = self.results.get(key) or self.statuses.get(key)
        return TrackedTrial(
            shown=self.trial(point),
            params={**_params(spec, point.labels), **(_found(result.training) if result else {})},
            dataset=_dataset(spec.data, result.training) if result else None,
            tags={
                "baseline": point.baseline or "",
                "research_mode": str(spec.noise_source == "seeded"),
                **({"sensitive": "true"} if self.disclosure == "raw" else {}),
            },
            started=timed.started if timed else None,
            ended=timed.ended if timed else None,
        )


@dataclass(frozen=True)
class Outcome:
    """What came out of a run, and where to look at it."""

    record: SweepRecord
    files: SweepFiles
    tracking_uri: str
    seconds: float


def _params(spec: TrialSpec, labels: Mapping[str, Label]) -> dict[str, Label]:
    """The trial's specification below ``spec.``, without what its labels say already.

    MLflow's comparison starts with the first three names that differ: with this prefix the labels come before them.
    """
    said = {"key", *labels, *(f"{_FIELDS.get(axis, axis)}.name" for axis in labels)}
    return {f"spec.{name}": value for name, value in _flat(asdict(spec)).items() if name not in said}


_FIELDS = {"schedule": "noise.schedule"}
"""Where the specification has what a label says, if not under the label's own name."""


def _found(training: TrainingResult) -> dict[str, Label]:
    """What the data and the model turned out to be."""
    sizes = {"train_size": training.train_size, "test_size": training.test_size}
    return {**sizes, "parameters": training.parameters}


def _dataset(data: DataSpec, training: TrainingResult) -> TrackedDataset:
    digest = hashlib.sha256(json.dumps(asdict(data), sort_keys=True).encode()).hexdigest()[:16]
    sizes = {"train_size": training.train_size, "test_size": training.test_size}
    return TrackedDataset(data.name, digest, data.name, sizes)


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Label]:
    """Nested parameters by dotted names; what is not set is left out."""
    flat: dict[str, Label] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{key}.")
        elif isinstance(item, str | int | float):
            flat[f"{prefix}{key}"] = item
        elif item is not None:
            flat[f"{prefix}{key}"] = json.dumps(item)
    return flat


def write_reports(files: SweepFiles, record: SweepRecord) -> str:
    """Write the report that the sweep discloses and, beside the private data, the exact one. Returns the first."""
    page = render(record.data())
    write_bytes_atomically(files.report, page.encode())
    write_bytes_atomically(files.private_report, render(record.data(exact(files))).encode(), private=True)
    write_bytes_atomically(files.results, json.dumps(rows(record), indent=2, allow_nan=False).encode())
    return page


def rows(record: SweepRecord) -> list[dict[str, Any]]:
    """One plain row for each trial, as ``--json`` prints them; infinite epsilons are null beside "private": false."""
    return [_row(record, point) for point in record.points]


def _row(record: SweepRecord, point: GridPoint) -> dict[str, Any]:
    key, trial = point.trial.key, record.trial(point)
    result = record.results.get(key)
    row: dict[str, Any] = {
        "key": key,
        "labels": dict(trial.labels),
        "status": trial.status,
        "error": trial.error,
    }
    if result is None or trial.quality is None:
        return row
    return {
        **row,
        **known(trial),
        **result.worst_case.as_dict(),
        "groups": [estimate.as_dict() for estimate in result.groups],
        "noise_multiplier": result.spec.noise.initial_noise_multiplier,
        "steps": result.steps,
        "worst_group": worst_group_name(trial),
        "group_accuracies": {group.name: group.accuracy for group in trial.quality.groups},
    }


def parse_failures(table: Iterable[Mapping[str, Any]]) -> dict[str, TrialStatus]:
    """The trials that failed in an earlier run, from its stored table: what no trial's own files tell."""
    return {
        row["key"]: TrialStatus(row["key"], total_steps=0, state="failed", error=row["error"])
        for row in table
        if row["status"] == "failed"
    }
