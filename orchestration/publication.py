"""From stored results to what leaves the sweep: the report's data, MLflow's trials, the table on the terminal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from accounting.storage import write_bytes_atomically
from orchestration.grid import GridPoint
from orchestration.layout import SweepFiles
from orchestration.manifest import Manifest
from orchestration.published import Disclosure, IndividualStatistics, Label, ReportData, ReportTrial, Status
from orchestration.report import render
from orchestration.results import TrialResult, read_statistics, shown
from orchestration.settings import median_epsilon, worst_group
from orchestration.status import ENDED, State, TrialStatus
from orchestration.sweep import SweepSpec
from orchestration.tracked import TrackedDataset, TrackedTrial

_STATUSES: Mapping[State, Status] = {
    "pending": "pending",
    "training": "pending",
    "accounting": "pending",
    "finished": "finished",
    "stopped": "failed",
    "failed": "failed",
}
_STOPPED = "stopped early by the scheduler"

Statistics = Callable[[TrialResult], IndividualStatistics | None]
"""What is told about the training examples of a trial."""


def disclosed(result: TrialResult) -> IndividualStatistics | None:
    """What the sweep discloses."""
    return result.individuals


def exact(files: SweepFiles) -> Statistics:
    """The exact statistics, for the owner of the data."""
    return lambda result: read_statistics(files.trial(result.key).private_summary)


@dataclass(frozen=True)
class SweepRecord:
    """A sweep with everything that is known of its trials: results of complete ones, the state of the others."""

    manifest: Manifest
    sweep: SweepSpec
    points: tuple[GridPoint, ...]
    results: Mapping[str, TrialResult]
    statuses: Mapping[str, TrialStatus]

    @property
    def disclosure(self) -> Disclosure:
        return _DISCLOSURES[self.sweep.release.name]

    @property
    def failed(self) -> bool:
        return any(status.state == "failed" for status in self.statuses.values())

    def trial(self, point: GridPoint, statistics: Statistics = disclosed) -> ReportTrial:
        """One trial as shown, compared with its baseline where both are complete."""
        result = self.results.get(point.trial.key)
        if result is not None:
            return shown(result, self.results.get(point.baseline or ""), statistics(result))
        status = self.statuses.get(point.trial.key)
        state = status.state if status else "pending"
        error = _STOPPED if state == "stopped" else status.error if status else None
        return ReportTrial(point.trial.key, point.labels, _STATUSES[state], error)

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
        result = self.results.get(point.trial.key)
        spec = result.spec if result else point.trial
        training = result.training if result else None
        sizes = {"train_size": training.train_size, "test_size": training.test_size} if training else {}
        parameters = {"parameters": training.parameters} if training else {}
        digest = hashlib.sha256(json.dumps(asdict(spec.data), sort_keys=True).encode()).hexdigest()[:16]
        return TrackedTrial(
            shown=self.trial(point),
            params={**_flat(asdict(spec)), **sizes, **parameters},
            dataset=TrackedDataset(spec.data.name, digest, spec.data.name, sizes),
            tags={"baseline": point.baseline or "", "research_mode": str(bool(training and training.research_mode))},
            started=result.started if result else None,
            ended=result.ended if result else None,
        )


@dataclass(frozen=True)
class Outcome:
    """What came out of a run, and where to look at it."""

    record: SweepRecord
    files: SweepFiles
    tracking_uri: str
    seconds: float


_DISCLOSURES: Mapping[str, Disclosure] = {"none": "none", "private": "private", "raw": "raw"}


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
    result, status = record.results.get(key), record.statuses.get(key)
    stopped = status is not None and status.state == "stopped"
    row: dict[str, Any] = {
        "key": key,
        "labels": dict(trial.labels),
        "status": "stopped" if stopped else trial.status,
        "error": trial.error,
    }
    if result is None or trial.privacy is None or trial.quality is None:
        return row
    worst = worst_group(trial)
    return {
        **row,
        **result.worst_case.as_dict(),
        "groups": [estimate.as_dict() for estimate in result.groups],
        "noise_multiplier": result.spec.noise.initial_noise_multiplier,
        "steps": result.training.steps,
        "accuracy": trial.quality.accuracy,
        "accuracy_change": trial.quality.accuracy_change,
        "worst_group": worst.name if worst else None,
        "worst_group_accuracy": worst.accuracy if worst else None,
        "group_accuracies": {group.name: group.accuracy for group in trial.quality.groups},
        "median_example_epsilon": median_epsilon(trial),
        "seconds": trial.wall_seconds,
    }


def parse_statuses(table: Iterable[Mapping[str, Any]]) -> dict[str, TrialStatus]:
    """How the trials of an earlier run ended, from its stored table."""
    return {
        row["key"]: TrialStatus(row["key"], total_steps=0, state=row["status"], error=row["error"])
        for row in table
        if row["status"] in ENDED
    }
