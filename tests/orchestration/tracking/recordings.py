"""Trials recorded in MLflow, and what its store then holds, for the tests of this room."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dpsweep.orchestration.report.catalogue import figures_for_mlflow
from dpsweep.orchestration.store.published import Label, PublishedDataset, PublishedSweep, PublishedTrial
from dpsweep.orchestration.store.release_modes import Disclosure
from dpsweep.orchestration.tracking.embedded import embedded_tracking_uri
from dpsweep.orchestration.tracking.mlflow import MlflowTracker
from dpsweep.orchestration.tracking.tracker import TrackedSweep
from tests.orchestration.sample_sweeps import EPOCHS, sample_sweep

from mlflow import MlflowClient  # isort: skip  (after dpsweep.orchestration.tracking.mlflow, which keeps it quiet)
from mlflow.entities import Run  # isort: skip
from tests.known import known

SWEEP = TrackedSweep("sweep-1", "quickstart", "name: quickstart\n", "runs/quickstart", {"python": "3.11"})
NOTHING = replace(sample_sweep("none"), trials=())
DATA = PublishedDataset("digits", "9a1f", {"train_size": 1438})


def opened(folder: Path) -> MlflowTracker:
    tracker = MlflowTracker(embedded_tracking_uri(folder), artifact_root=str(folder / "artifacts"))
    tracker.open_sweep(replace(SWEEP, root=str(folder / "sweep")))
    return tracker


def tracked(shown: PublishedTrial) -> PublishedTrial:
    first = shown.history[0].noise_multiplier if shown.history else 0.0
    params: dict[str, Label] = {"epochs": EPOCHS, "noise.initial_noise_multiplier": first, "model": "mlp"}
    tags = {"baseline": "none-none-0"}
    return replace(shown, params=params, dataset=DATA, tags=tags, started=1.7e9, ended=1.7e9 + 10.0)


def some_trials(disclosure: Disclosure = "none") -> list[PublishedTrial]:
    """Two settings of two seeds each, a baseline, and a failure."""
    sweep = sample_sweep(disclosure)
    chosen = [trial for trial in sweep.trials if trial.labels["clipping"] in ("none", "flat", "automatic")]
    return [tracked(trial) for trial in chosen if trial.labels["schedule"] != "exponential"]


def record(tracker: MlflowTracker, trials: list[PublishedTrial], data: PublishedSweep = NOTHING) -> None:
    for trial in trials:
        tracker.log_trial(trial)
    with pages("<html></html>", figures_for_mlflow(data)) as folder:
        tracker.log_report(folder, data)
    tracker.close()


@contextlib.contextmanager
def pages(report: str, figures: Mapping[str, str] = MappingProxyType({})) -> Iterator[Path]:
    """A folder with a report, and pages with a figure each, by name."""
    with tempfile.TemporaryDirectory() as name:
        (folder := Path(name) / "figures").mkdir()
        (Path(name) / "report.html").write_text(report)
        for figure, page in figures.items():
            (folder / f"{figure}.html").write_text(page)
        yield Path(name)


def client_of(folder: Path) -> MlflowClient:
    return MlflowClient(embedded_tracking_uri(folder))


def runs_of(client: MlflowClient, experiment_name: str = "dpsweep") -> list[Run]:
    experiment = known(client.get_experiment_by_name(experiment_name))
    return list(client.search_runs([experiment.experiment_id]))


def one(runs: list[Run], **tags: str) -> Run:
    (found,) = [run for run in runs if all(run.data.tags.get(f"dpsweep.{key}") == tag for key, tag in tags.items())]
    return found


def content(client: MlflowClient, experiment_name: str = "dpsweep") -> dict[str, Any]:
    """Everything recorded, without times: what must be the same after recording it again."""
    recorded = {}
    for run in runs_of(client, experiment_name):
        history = {
            name: sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, name))
            for name in run.data.metrics
        }
        inputs = [item.dataset.digest for item in run.inputs.dataset_inputs] if run.inputs else []
        recorded[run.info.run_id] = (run.info.status, run.data.params, run.data.tags, history, inputs)
    return recorded
