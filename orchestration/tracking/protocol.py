"""The `Tracker` protocol and what a tracker records, as data. Pure; imports no MLflow.

Final metrics are scalars under ``final/`` (utility), ``privacy/`` (cost) and ``fairness/`` (differences between
groups). Per-epoch series have no prefix. Values per group are recorded as a table, not as one metric per group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from accounting.errors import DpsweepError
from orchestration.comparison.findings import Findings
from orchestration.comparison.ledger import composed
from orchestration.comparison.rate_metrics import GROUP_METRICS
from orchestration.comparison.record import SweepRecord
from orchestration.records.layout import SweepFiles
from orchestration.records.published import PublishedEpoch, PublishedSweep, PublishedTrial, task_of

EXPERIMENT = "dpsweep"
"""The experiment of all sweeps."""
COMPOSED = "privacy/composed_epsilon"
"""MLflow metric: epsilon of several trials together, or of a trial with its earlier attempts."""
RunStatus = Literal["FINISHED", "FAILED", "KILLED"]


class TrackingUnavailable(DpsweepError):
    """MLflow cannot be reached or cannot be written; results on disk are not affected."""


@dataclass(frozen=True)
class TrackedSweep:
    """What the parent run of a sweep shows.

    sweep_id: unique to the sweep, unchanged by a resume. spec: the sweep's YAML. root: folder or URI of its files.
    """

    sweep_id: str
    name: str
    spec: str
    root: str
    manifest: Mapping[str, object] = field(default_factory=dict)


def tracked(record: SweepRecord, files: SweepFiles) -> TrackedSweep:
    """The sweep of a record, as a tracker opens it."""
    manifest = record.manifest
    return TrackedSweep(manifest.sweep_id, record.sweep.name, manifest.text, files.root, manifest.provenance())


class Tracker(Protocol):
    """Where a sweep is recorded. Every method is idempotent, and may raise `TrackingUnavailable`."""

    @property
    def address(self) -> str:
        """Of the comparison of the sweep's trials, below the address of the tracker; "" where there is none."""

    def open_sweep(self, sweep: TrackedSweep, anew: Sequence[str] = ()) -> str:
        """Start or continue the sweep, closing runs that a killed driver left RUNNING. Returns the parent run's id.

        anew: keys of trials whose runs are deleted, as others will take their place.
        """

    def log_trial(self, trial: PublishedTrial) -> str:
        """Update the trial's run, and the model of a finished one; call it while the trial runs and when it has ended.
        Returns the run's id, or "" if the trial has not started."""

    def log_report(self, page: str, data: PublishedSweep, figures: Mapping[str, str]) -> None:
        """Attach the rendered page and its main figures to the parent run; tag the run if they are sensitive."""

    def log_comparison(self, found: Findings, sentences: Sequence[str]) -> None:
        """Record what the models of finished trials lack, and on the parent run the headline: the best private setting
        in numbers, and the ``sentences``."""

    def close(self, status: RunStatus = "FINISHED") -> None:
        """Write the averages over seeds and end the parent run; no run of the sweep is RUNNING afterwards."""


def epoch_metrics(epoch: PublishedEpoch) -> dict[str, float]:
    """The values of one epoch by name of series; only finite metrics and clipping bounds are included."""
    bounds = {
        "clipping_bound" if name == "all" else f"clipping_bound/{name}": bound
        for name, bound in epoch.clipping_bounds.items()
    }
    finite = {name: value for name, value in {**epoch.metrics, **bounds}.items() if math.isfinite(value)}
    return {**finite, "epoch": float(epoch.epoch), "noise_multiplier": epoch.noise_multiplier}


def composition_entries(trials: Iterable[PublishedTrial]) -> tuple[dict[str, float], dict[str, str]]:
    """Metrics and tags of what several trials cost together, for the run that shows them all."""
    found = composed(trials)
    if found is None:
        return {}, {}
    values = {COMPOSED: found.epsilon, "privacy/composed_release_epsilon": found.release_epsilon}
    kind = found.estimate.kind if found.estimate else "none"
    tags = {"composed_epsilon_kind": kind, "epsilon_kind": "of each trial apart; see composed_epsilon_kind"}
    finite = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
    return finite, {**tags, "composed_reason": found.reason}


def group_table(trial: PublishedTrial) -> dict[str, list[str | float | None]]:
    """Columns over the groups of the test data, for MLflow's table: name and `GROUP_METRICS`; if published, also the
    mean epsilon_i of its training examples, the success rate of the membership attack and the audit's lower bound."""
    groups, task = trial.quality.groups if trial.quality else (), task_of([trial])
    known = [metric for metric in GROUP_METRICS if metric.task in (None, task)]
    table: dict[str, list[str | float | None]] = {
        "group": [group.name for group in groups],
        **{metric.name: [metric.value(group) for group in groups] for metric in known},
    }
    if trial.individuals is not None and trial.individuals.groups:
        paid = {group.name: group for group in trial.individuals.groups}
        table["mean_epsilon_i"] = [paid[group.name].mean if group.name in paid else None for group in groups]
        table["standard_error"] = [paid[group.name].standard_error if group.name in paid else None for group in groups]
    if trial.attacks:
        attacks = {group.name: group for group in trial.attacks}
        found = [attacks.get(group.name) for group in groups]
        table["attack_success_rate"] = [attack.success_rate if attack else None for attack in found]
        table["attack_standard_error"] = [attack.standard_error if attack else None for attack in found]
    if trial.audit is not None:
        table["audited_epsilon"] = [trial.audit.groups.get(group.name) for group in groups]
    return table
