"""The `Tracker` that records a sweep in MLflow; only `tracking` imports MLflow.

A sweep has one parent run. Its child runs are one per trial, and one per setting with the averages over its seeds. Only
the driver writes. It also initialises an embedded store, because several processes that open a new SQLite store at
the same time mostly fail. Runs are identified by their tags, so a resumed sweep continues its runs and duplicates none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from orchestration.tracking.embedded import client_of  # first, as it keeps MLflow quiet

# isort: split
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, Run
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

from orchestration.comparison.findings import Findings
from orchestration.comparison.metrics import final_metrics
from orchestration.comparison.plain_text import for_markdown
from orchestration.comparison.settings import Setting, finished_settings, setting_name
from orchestration.comparison.statistics import Spread, spread
from orchestration.records.layout import SweepFiles
from orchestration.records.published import PublishedDataset, PublishedSweep, PublishedTrial
from orchestration.records.release_modes import release_mode
from orchestration.records.states import TrialState
from orchestration.tracking.addresses import is_server, probe, reported
from orchestration.tracking.models import SETTING, SWEEP, TRIAL, ModelLog, shared_view, valid_name
from orchestration.tracking.protocol import (
    COMPOSED,
    EXPERIMENT,
    RunStatus,
    TrackedSweep,
    composition_entries,
    epoch_metrics,
    group_table,
)
from orchestration.tracking.runs import MlflowRuns, Point

Tags = Mapping[str, str]
_NO_TAGS: Tags = MappingProxyType({})

_KIND, _GROUPS = "dpsweep.kind", "dpsweep.groups_digest"
_PARENT, _NOTE = "mlflow.parentRunId", "mlflow.note.content"
_OUTCOME = "dpsweep.outcome"
_OUTCOMES: Mapping[RunStatus, str] = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "interrupted"}
"""Outcome of a sweep by the status of its MLflow run."""
_TABLE = "groups.json"
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # prints a traceback for what is raised anyway
_LONGEST_TAG, _LONGEST_PARAM = 5000, 500
_STATUSES: Mapping[TrialState, str] = {
    TrialState.TRAINING: "RUNNING",
    TrialState.ACCOUNTING: "RUNNING",
    TrialState.FINISHED: "FINISHED",
    TrialState.STOPPED: "FINISHED",  # not KILLED, which MLflow displays like a failure; the tag _OUTCOME says stopped
    TrialState.FAILED: "FAILED",
}


class MlflowTracker:
    """A `Tracker` on any MLflow tracking URI: ``sqlite:///``, ``postgresql://``, ``http://``.

    artifact_root: absolute path or URI for artifacts if ``tracking_uri`` is a database (a server chooses its own);
    used only when the experiment is created. Raises: TrackingUnavailable within seconds if MLflow cannot be reached.
    """

    def __init__(self, tracking_uri: str, *, experiment: str = EXPERIMENT, artifact_root: str | None = None) -> None:
        self._uri = tracking_uri
        with reported("cannot use", tracking_uri):
            probe(tracking_uri)
            self._client = client_of(tracking_uri)
            location = None if is_server(tracking_uri) else artifact_root
            self._experiment = _experiment_id(self._client, experiment, location)
        self._written = MlflowRuns(self._client, self._experiment, tracking_uri)
        self._sweep_id = self._parent = ""
        self._runs: dict[tuple[str, str], str] = {}
        self._trials: dict[str, PublishedTrial] = {}

    def open_sweep(self, sweep: TrackedSweep, anew: Sequence[str] = ()) -> str:
        self._sweep_id, self._files = sweep.sweep_id, SweepFiles(sweep.root)
        self._models = ModelLog(self._client, self._experiment, sweep.sweep_id, self._files)
        with self._reported("cannot open the sweep in"):
            self._runs = {}
            for run in self._runs_of_sweep():
                self._adopt(run)
            for run_id in filter(None, (self._runs.pop(("trial", key), None) for key in anew)):
                self._written.delete(run_id)
            self._parent = self._runs.get(("sweep", "")) or self._create("sweep", "", sweep.name)
            self._written.reopen(self._parent)
            self._written.write(self._parent, tags={_OUTCOME: "running"})
            self._client.log_text(self._parent, sweep.spec, "sweep.yaml")
            self._client.log_dict(self._parent, dict(sweep.manifest), "manifest.json")
        return self._parent

    def log_trial(self, trial: PublishedTrial) -> str:
        self._trials[trial.key] = trial
        if trial.state not in _STATUSES:
            return self._runs.get(("trial", trial.key), "")
        with self._reported(f"cannot record trial {trial.key} in"):
            run_id, params = self._trial_run(trial), _params(trial)
            if trial.dataset is not None:
                self._written.name_data(run_id, DatasetInput(_dataset(trial.dataset)))
            tags = {**_tags(trial), **self._log_groups(run_id, trial)}
            model = self._models.of_trial(run_id, trial) if trial.state is TrialState.FINISHED else None
            self._written.write(run_id, params, tags, final_metrics(trial), _points(trial), model)
            status = _STATUSES[trial.state]
            if status != "RUNNING":
                self._written.end(run_id, status, trial.ended)
        return run_id

    def log_report(self, page: str, data: PublishedSweep, figures: Mapping[str, str]) -> None:
        with self._reported("cannot attach the report in"):
            self._client.log_text(self._parent, page, "report.html")
            for name, figure in figures.items():
                self._client.log_text(self._parent, figure, f"figures/{name}.html")
            if release_mode(data.disclosure).is_sensitive:
                self._written.write(self._parent, tags={"sensitive": "true"})

    def log_comparison(self, found: Findings, sentences: Sequence[str]) -> None:
        with self._reported("cannot record the comparison in"):
            runs = {key: run for (kind, key), run in self._runs.items() if kind == "trial"}
            self._models.record(found, runs)
            note = "\n\n".join(map(for_markdown, [*sentences, f"Report: {self._files.report}"]))
            tags, best, means = {_NOTE: note[:_LONGEST_TAG]}, found.best(found.main.name), dict[str, float]()
            if best is not None:
                tags["best_setting"] = best.name[:_LONGEST_TAG]
                costs, _ = composition_entries(self._trials.values())  # the sweep's costs, which `close` writes
                means = {name: over.mean for name, over in _spreads(best.trials).items() if name not in costs}
            self._written.write(self._parent, tags=tags, values=means)
            self._client.set_experiment_tag(
                self._experiment,
                f"mlflow.sharedViewState.{self._sweep_id}",
                shared_view(self._sweep_id, found),
            )

    @property
    def address(self) -> str:
        return f"#/experiments/{self._experiment}/runs?viewStateShareKey={self._sweep_id}&compareRunsMode=TABLE"

    def close(self, status: RunStatus = "FINISHED") -> None:
        with self._reported("cannot close the sweep in"):
            for setting in finished_settings(trial for trial in self._trials.values()):
                if len(setting.trials) > 1:
                    self._log_average(setting)
            counts = {f"trials/{state.word}": float(self._count(state)) for state in TrialState if state.has_ended}
            values, tags = composition_entries(self._trials.values())
            tags = {**tags, _OUTCOME: _OUTCOMES[status]}
            self._written.write(self._parent, tags=tags, values={**counts, **values})
            for run_id in self._runs.values():
                if run_id != self._parent:
                    self._interrupt(run_id)
            self._written.end(self._parent, status)

    def _count(self, state: TrialState) -> int:
        return sum(trial.state is state for trial in self._trials.values())

    def _runs_of_sweep(self) -> Iterator[Run]:
        """All runs of the sweep, oldest first."""
        found: list[Run] = []
        token = None
        while True:
            page = self._client.search_runs(
                [self._experiment], f"tags.`{SWEEP}` = '{self._sweep_id}'", page_token=token
            )
            found += page
            token = page.token
            if not token:
                return iter(sorted(found, key=lambda run: int(run.info.start_time)))

    def _adopt(self, run: Run) -> None:
        """Register a run of an earlier driver; if it is still RUNNING, its driver was killed, and the run is ended."""
        kind = run.data.tags.get(_KIND, "")
        key = (kind, run.data.tags.get(SETTING if kind == "average" else TRIAL, ""))
        self._written.know(run)
        if key in self._runs:
            self._written.delete(run.info.run_id)  # duplicate from two concurrent drivers: keep the older run
            return
        self._runs[key] = run.info.run_id
        self._interrupt(run.info.run_id)

    def _interrupt(self, run_id: str) -> None:
        """Close a RUNNING run as killed, with the outcome interrupted."""
        if self._written.held(run_id).status == "RUNNING":
            self._written.write(run_id, tags={_OUTCOME: "interrupted"})
            self._written.end(run_id, "KILLED")

    def _create(self, kind: str, key: str, name: str, started: float | None = None, tags: Tags = _NO_TAGS) -> str:
        """Create a run together with its identifying tags, so that a resume finds it even after a kill."""
        tags = {**tags, SWEEP: self._sweep_id, _KIND: kind}
        if kind != "sweep":
            tags |= {_PARENT: self._parent, SETTING if kind == "average" else TRIAL: key}
        run_id = self._written.create(name, tags, started)
        self._runs[kind, key] = run_id
        return run_id

    def _trial_run(self, trial: PublishedTrial) -> str:
        """The run of the trial. MLflow parameters are immutable, so a run with other parameters is replaced."""
        key = trial.key
        run_id = self._runs.get(("trial", key))
        if run_id is not None:
            params = _params(trial)
            if all(params.get(name, value) == value for name, value in self._written.held(run_id).params.items()):
                if trial.state.is_running:
                    self._written.reopen(run_id)
                return run_id
            self._written.delete(run_id)
        seed = f" · seed {trial.labels['seed']}" if "seed" in trial.labels else ""
        return self._create("trial", key, setting_name(trial) + seed, trial.started, _tags(trial))

    def _log_groups(self, run_id: str, trial: PublishedTrial) -> dict[str, str]:
        """Write the table of groups if it changed; returns the tags by which MLflow's page and a later run find it."""
        table = group_table(trial)
        content = {"columns": list(table), "data": [list(row) for row in zip(*table.values(), strict=True)]}
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        if not content["data"] or self._written.held(run_id).tags.get(_GROUPS) == digest:
            return {}
        self._written.attach(run_id, _TABLE, content)
        return {_GROUPS: digest, MLFLOW_LOGGED_ARTIFACTS: json.dumps([{"path": _TABLE, "type": "table"}])}

    def _log_average(self, setting: Setting) -> None:
        """Write the run of a setting: means over seeds by metric, and standard deviations under ``deviation/``.

        A mean of epsilons is no privacy claim: publishing the means costs the composed epsilon.
        """
        name = f"{setting.name} · mean of {len(setting.trials)} seeds"
        members = [self._trials[trial.key] for trial in setting.trials]
        values: dict[str, float] = {}
        for metric, over in _spreads(members).items():
            values |= {metric: over.mean, f"deviation/{metric}": over.deviation}
        together, claims = composition_entries(members)
        values = {metric: value for metric, value in values.items() if not metric.endswith(COMPOSED)} | together
        tags = {
            **_shared([_tags(member) for member in members]),
            **claims,
            "seeds": str(len(members)),
            "mlflow.runName": name,
        }
        known = self._runs.get(("average", setting.name))
        run_id = known or self._create("average", setting.name, name, tags=tags)
        self._written.write(run_id, _shared([_params(member) for member in members]), tags, values)
        self._written.end(run_id, "FINISHED")

    @contextmanager
    def _reported(self, doing: str) -> Iterator[None]:
        """`reported` for this store; after an error, the state of runs and models is read again."""
        try:
            with reported(doing, self._uri):
                yield
        except BaseException:
            self._written.forget()
            self._models.forget()
            raise


def _experiment_id(client: MlflowClient, name: str, artifact_location: str | None) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return str(client.create_experiment(name, artifact_location))
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    return str(experiment.experiment_id)


def _params(trial: PublishedTrial) -> dict[str, str]:
    """Labels and parameters as MLflow's text values."""
    return {valid_name(key): str(value)[:_LONGEST_PARAM] for key, value in {**trial.labels, **trial.params}.items()}


def _tags(trial: PublishedTrial) -> dict[str, str]:
    tags = {**trial.tags, _OUTCOME: trial.state.word}
    if trial.privacy is not None:
        tags |= {"private": str(trial.privacy.is_private).lower()}
        tags |= {"accountant": trial.privacy.accountant, "adjacency": trial.privacy.adjacency}
        tags |= {"epsilon_kind": trial.privacy.kind, "epsilon_reasons": ", ".join(trial.reasons)}
    if trial.individuals is not None:
        tags |= {"epsilon_i_kind": trial.individuals.kind, "disclosure": trial.individuals.disclosure}
        tags |= {"epsilon_i_reasons": ", ".join(trial.individuals.reasons)}
        tags |= {"sensitive": "true"} if release_mode(trial.individuals.disclosure).is_sensitive else {}
    remarks = [*([f"{trial.state.word.capitalize()}: {trial.error}"] if trial.error else []), *trial.notes]
    return {
        key: value[:_LONGEST_TAG] for key, value in {**tags, _NOTE: "\n\n".join(map(for_markdown, remarks))}.items()
    }


def _points(trial: PublishedTrial) -> list[Point]:
    """The per-epoch series of a trial; time stamps are spread evenly over its duration."""
    start, epochs = trial.started or time.time(), len(trial.history)
    span = max((trial.ended or time.time()) - start, 0.0)
    return [
        Point(name, value, epoch.step, int(1000 * (start + span * (place + 1) / epochs)))
        for place, epoch in enumerate(trial.history)
        for name, value in epoch_metrics(epoch).items()
    ]


def _dataset(dataset: PublishedDataset) -> Dataset:
    profile = json.dumps(dict(dataset.profile))
    return Dataset(dataset.name, dataset.digest[:36], "dpsweep", json.dumps({"name": dataset.source}), None, profile)


def _shared(mappings: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The entries that all mappings have in common."""
    first, *others = mappings
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def _spreads(trials: Sequence[PublishedTrial]) -> dict[str, Spread]:
    """Mean and deviation of every final metric that all of these trials have."""
    found = [final_metrics(trial) for trial in trials]
    spreads = {name: spread(each[name] for each in found) for name in _shared_names(found)}
    return {name: over for name, over in spreads.items() if over is not None}


def _shared_names(mappings: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for name in mappings[0] if all(name in other for other in mappings)]
