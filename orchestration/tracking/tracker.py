"""The `Tracker` protocol, and the data that a tracker records. Pure; does not import MLflow.

Final metrics are scalars under ``final/`` (utility), ``privacy/`` (cost) and ``fairness/`` (differences between
groups). Per-epoch series have no prefix. Values per group are recorded as a table; of few groups the main
score and the mean epsilon_i are metrics, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol

from dpsweep.accounting.errors import DpsweepError
from dpsweep.orchestration.comparison.ledger import composed
from dpsweep.orchestration.comparison.rate_metrics import GROUP_METRICS
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.comparison.settings import group_attack, group_epsilon, group_epsilon_error
from dpsweep.orchestration.comparison.values import finite
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import (
    PublishedEpoch,
    PublishedGroup,
    PublishedSweep,
    PublishedTrial,
    task_of,
)
from dpsweep.orchestration.tracking.plain_comparison import TrackedComparison

EXPERIMENT = "dpsweep"
"""Name of the MLflow experiment of all sweeps."""
COMPOSED = "privacy/composed_epsilon"
"""MLflow metric: composed epsilon of several trials, or of one trial with its earlier attempts."""
RunStatus = Literal["FINISHED", "FAILED", "KILLED"]


class TrackingUnavailable(DpsweepError):
    """MLflow cannot be reached or cannot be written; results on disk are not affected."""


@dataclass(frozen=True)
class TrackedSweep:
    """The data that the parent run of a sweep shows.

    sweep_id: unique to the sweep, unchanged by a resume. spec: the sweep's YAML. root: folder or URI of its files.
    """

    sweep_id: str
    name: str
    spec: str
    root: str
    manifest: Mapping[str, object] = field(default_factory=dict)


def tracked(record: SweepRecord, files: SweepFiles) -> TrackedSweep:
    """Return the argument for `Tracker.open_sweep`, from the record of a sweep."""
    manifest = record.manifest
    name = manifest.title or record.sweep.name
    return TrackedSweep(manifest.sweep_id, name, manifest.text, files.root, manifest.provenance())


class Tracker(Protocol):
    """Records a sweep. Every method is idempotent, and may raise `TrackingUnavailable`.

    in_flight: number of threads that may call `log_trial` at the same time, each for another trial.
    """

    in_flight: int

    @property
    def answered(self) -> int:
        """Number of writes that the store has confirmed."""

    def address(self, sweep_id: str) -> str:
        """Return the address of the page that compares the sweep's trials, relative to the tracker's address; "" if
        none.
        """

    def open_sweep(self, sweep: TrackedSweep, anew: Sequence[str] = ()) -> str:
        """Start or continue the sweep, closing runs that a killed driver left RUNNING. Returns the parent run's id.

        `anew`: keys of trials that start again; their old runs are deleted.
        """

    def compare_by(self, compared: TrackedComparison) -> None:
        """Record with each trial from now on the number by which its setting is compared; `log_comparison` adds it to
        those that are recorded already. Sends nothing itself."""

    def log_trial(self, trial: PublishedTrial) -> str:
        """Update the trial's run. Call it while the trial runs and after it ended.

        Returns the run's id, or "" if the trial has not started.
        """

    def log_report(self, pages: Path, data: PublishedSweep) -> None:
        """Attach the files of a local folder, the report and its main figures, with data and groups to the parent run;
        tag the run if they are sensitive."""

    def log_comparison(self, compared: TrackedComparison, sentences: Sequence[str]) -> None:
        """Record the models of the best settings, and add the headline to the parent run.

        The headline is the best private setting with its numbers, and the ``sentences``.
        """

    def close(self, status: RunStatus = "FINISHED") -> None:
        """Write the averages over seeds and end the parent run; no run of the sweep is RUNNING afterwards."""

    def interrupt(self) -> None:
        """End the parent run and all others that are RUNNING as killed, and write nothing else."""


def epoch_metrics(epoch: PublishedEpoch) -> dict[str, float]:
    """Return the values of one epoch by name of series: finite metrics and clipping bounds, epoch and noise
    multiplier.
    """
    bounds = {
        "clipping_bound" if name == "all" else f"clipping_bound/{name}": bound
        for name, bound in epoch.clipping_bounds.items()
    }
    finite = {name: value for name, value in {**epoch.metrics, **bounds}.items() if math.isfinite(value)}
    return {**finite, "epoch": float(epoch.epoch), "noise_multiplier": epoch.noise_multiplier}


def composition_entries(trials: Iterable[PublishedTrial]) -> tuple[dict[str, float], dict[str, str]]:
    """Return metrics and tags for the composed cost of several trials, for a run that shows all of them."""
    found = composed(trials)
    if found is None:
        return {}, {}
    values = {COMPOSED: found.epsilon, "privacy/composed_release_epsilon": found.release_epsilon}
    values |= {f"{COMPOSED}_group_of_{group.group_size}": group.epsilon for group in found.groups}
    claim, tags = found.estimate, {"epsilon_kind": "of each trial apart; see composed_epsilon_kind"}
    tags |= {"composed_epsilon_kind": claim.kind if claim else "none"}
    if claim is not None:
        tags |= {"composed_delta": f"{claim.delta:g}", "composed_adjacency": claim.adjacency}
        tags |= {"composed_unit": claim.unit}
    of_groups = {group.group_size: group.estimate.kind for group in found.groups if group.estimate}
    tags |= {f"composed_epsilon_kind_group_of_{size}": kind for size, kind in of_groups.items()}
    finite = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
    return finite, {**tags, "composed_reasons": ", ".join(found.reasons), "composed_refusal": found.refusal}


def group_rows(trials: Iterable[PublishedTrial]) -> list[dict[str, str | float | None]]:
    """Return the rows of MLflow's table of the test groups of all trials: trial, clipping, group and `GROUP_METRICS`.

    If published, also the mean epsilon_i of the group's training examples, the success rate of the membership attack,
    and the audit's lower bound. A value is None where the group has no finite one, as JSON knows no other.
    """
    return [
        {"trial": trial.key, "clipping": str(trial.labels.get("clipping", "")), **_row(trial, group)}
        for trial in trials
        for group in (trial.quality.groups if trial.quality else ())
    ]


def _row(trial: PublishedTrial, group: PublishedGroup) -> dict[str, str | float | None]:
    known = (metric for metric in GROUP_METRICS if metric.task in (None, task_of([trial])))
    row: dict[str, float | None] = {metric.name: metric.value(group) for metric in known}
    if trial.individuals is not None and trial.individuals.groups:
        paid, error = group_epsilon(group.name), group_epsilon_error(group.name)
        row |= {"mean_epsilon_i": paid(trial), "standard_error": error(trial)}
    if trial.attacks:
        rate = group_attack(group.name, lambda attack: attack.success_rate)
        error = group_attack(group.name, lambda attack: attack.standard_error)
        row |= {"attack_success_rate": rate(trial), "attack_standard_error": error(trial)}
    if trial.audit is not None:
        row["audited_epsilon"] = trial.audit.groups.get(group.name)
    return {"group": group.name, **{name: finite(value) for name, value in row.items()}}


NO_TRACKING: Final = "none"
"""Given in place of a tracking URI to switch tracking off."""


class NoTracker:
    """A `Tracker` that records nothing. A later run of the sweep with MLflow records all trials of the sweep there."""

    answered: Final = 0

    def __init__(self) -> None:
        self.in_flight = 1

    def address(self, sweep_id: str) -> str:
        return ""

    def open_sweep(self, sweep: TrackedSweep, anew: Sequence[str] = ()) -> str:
        return ""

    def compare_by(self, compared: TrackedComparison) -> None:
        return

    def log_trial(self, trial: PublishedTrial) -> str:
        return ""

    def log_report(self, pages: Path, data: PublishedSweep) -> None:
        return

    def log_comparison(self, compared: TrackedComparison, sentences: Sequence[str]) -> None:
        return

    def close(self, status: RunStatus = "FINISHED") -> None:
        return

    def interrupt(self) -> None:
        return
