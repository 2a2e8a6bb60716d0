"""Recording in MLflow; this module, `embedded` and `models` are the only ones that import it.

A sweep has one parent run; its child runs are one per trial, and one per setting with the averages over its seeds. Only
the driver writes. It also initialises an embedded store, because several processes that open a new SQLite store at
the same time mostly fail. Runs are identified by their tags, so a resumed sweep continues its runs and duplicates none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from orchestration.tracking.embedded import client_of  # first, as it keeps MLflow quiet

# isort: split
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, Metric, Param, Run, RunTag
from plotly.graph_objects import Figure

from accounting.errors import DpsweepError
from orchestration.comparison.findings import Findings
from orchestration.comparison.metrics import final_metrics
from orchestration.comparison.plain_text import for_markdown, masked
from orchestration.comparison.settings import Setting, finished_settings, setting_name
from orchestration.comparison.statistics import Spread, spread
from orchestration.records.layout import SweepFiles
from orchestration.records.published import PublishedDataset, PublishedSweep, PublishedTrial
from orchestration.records.release_modes import release_mode
from orchestration.records.states import TrialState
from orchestration.tracking.addresses import is_server, probe
from orchestration.tracking.models import SETTING, SWEEP, TRIAL, ModelLog, shared_view, valid_name
from orchestration.tracking.protocol import (
    COMPOSED,
    EXPERIMENT,
    RunStatus,
    TrackedSweep,
    TrackingUnavailable,
    composition_entries,
    epoch_metrics,
    group_table,
)

T = TypeVar("T")

_KIND, _GROUPS = "dpsweep.kind", "dpsweep.groups_digest"
_PARENT, _NOTE = "mlflow.parentRunId", "mlflow.note.content"
_OUTCOME = "dpsweep.outcome"
_OUTCOMES: Mapping[RunStatus, str] = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "interrupted"}
"""Of a sweep, by the status of its run."""
_SCALARS = ("final/", "privacy/", "fairness/", "deviation/", "trials/")
_ENTITIES_PER_BATCH, _PARAMS_OR_TAGS_PER_BATCH = 1000, 100
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
    used only when the experiment is created. Raises `TrackingUnavailable` within seconds if MLflow cannot be reached.
    """

    def __init__(self, tracking_uri: str, *, experiment: str = EXPERIMENT, artifact_root: str | None = None) -> None:
        self._uri = tracking_uri
        with self._reported("cannot use"):
            probe(tracking_uri)
            self._client = client_of(tracking_uri)
            location = None if is_server(tracking_uri) else artifact_root
            self._experiment = _experiment_id(self._client, experiment, location)
        self._sweep_id = self._parent = ""
        self._runs: dict[tuple[str, str], str] = {}
        self._trials: dict[str, PublishedTrial] = {}
        self._points: dict[str, set[tuple[str, int]]] = {}
        """Points already recorded, as (name, step), by run id."""

    def open_sweep(self, sweep: TrackedSweep, anew: Sequence[str] = ()) -> str:
        self._sweep_id = sweep.sweep_id
        with self._reported("cannot open the sweep in"):
            self._runs = {}
            for run in self._runs_of_sweep():
                self._adopt(run)
            for run_id in filter(None, (self._runs.pop(("trial", key), None) for key in anew)):
                self._client.delete_run(run_id)
            self._parent = self._runs.get(("sweep", "")) or self._create("sweep", "", sweep.name)
            self._client.update_run(self._parent, status="RUNNING")
            self._write(self._parent, tags={_OUTCOME: "running"})
            self._client.log_text(self._parent, sweep.spec, "sweep.yaml")
            self._client.log_dict(self._parent, dict(sweep.manifest), "manifest.json")
        return self._parent

    def log_trial(self, trial: PublishedTrial) -> str:
        self._trials[trial.key] = trial
        if trial.state not in _STATUSES:
            return self._runs.get(("trial", trial.key), "")
        with self._reported(f"cannot record trial {trial.key} in"):
            run = self._trial_run(trial)
            self._write(run.info.run_id, run, params=_params(trial), tags=_tags(trial))
            self._log_epochs(run, trial)
            self._log_final(run, final_metrics(trial))
            self._log_groups(run, trial)
            if trial.dataset is not None and not (run.inputs and run.inputs.dataset_inputs):
                self._client.log_inputs(run.info.run_id, [DatasetInput(_dataset(trial.dataset))])
            self._end(run, _STATUSES[trial.state], trial.ended)
        return str(run.info.run_id)

    def log_report(self, page: str, data: PublishedSweep, figures: Mapping[str, Figure]) -> None:
        with self._reported("cannot attach the report in"):
            self._client.log_text(self._parent, page, "report.html")
            for name, figure in figures.items():
                self._client.log_figure(
                    self._parent, figure, f"figures/{name}.html", save_kwargs={"include_plotlyjs": True}
                )
            if release_mode(data.disclosure).is_sensitive:
                self._write(self._parent, tags={"sensitive": "true"})

    def log_comparison(self, found: Findings, sentences: Sequence[str], files: SweepFiles) -> None:
        with self._reported("cannot record the comparison in"):
            runs = {key: run for (kind, key), run in self._runs.items() if kind == "trial"}
            ModelLog(self._client, self._experiment, self._sweep_id, files).record(found, runs)
            note = "\n\n".join(map(for_markdown, [*sentences, f"Report: {files.report}"]))
            tags, best = {_NOTE: note[:_LONGEST_TAG]}, found.best(found.main.name)
            if best is not None:
                tags["best_setting"] = best.name[:_LONGEST_TAG]
                costs, _ = composition_entries(self._trials.values())  # of the sweep, which `close` writes
                means = {name: over.mean for name, over in _spreads(best.trials).items() if name not in costs}
                self._log_final(self._client.get_run(self._parent), means)
            self._write(self._parent, self._client.get_run(self._parent), tags=tags)
            self._client.set_experiment_tag(
                self._experiment,
                f"mlflow.sharedViewState.{self._sweep_id}",
                shared_view(self._sweep_id, found),
            )

    @property
    def address(self) -> str:
        """Of the comparison of the sweep's trials, below the address of MLflow."""
        return f"#/experiments/{self._experiment}/runs?viewStateShareKey={self._sweep_id}&compareRunsMode=TABLE"

    def close(self, status: RunStatus = "FINISHED") -> None:
        with self._reported("cannot close the sweep in"):
            for setting in finished_settings(trial for trial in self._trials.values()):
                if len(setting.trials) > 1:
                    self._log_average(setting)
            counts = {f"trials/{state.word}": float(self._count(state)) for state in TrialState if state.has_ended}
            values, tags = composition_entries(self._trials.values())
            parent = self._client.get_run(self._parent)
            self._log_final(parent, {**counts, **values})
            self._write(self._parent, parent, tags={**tags, _OUTCOME: _OUTCOMES[status]})
            for run_id in self._runs.values():
                if run_id != self._parent:
                    self._interrupt(self._client.get_run(run_id))
            self._client.set_terminated(self._parent, status)

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
        """Register a run of an earlier driver; if it is still RUNNING, that driver was killed: end the run."""
        kind = run.data.tags.get(_KIND, "")
        key = (kind, run.data.tags.get(SETTING if kind == "average" else TRIAL, ""))
        if key in self._runs:
            self._client.delete_run(run.info.run_id)  # duplicate from two concurrent drivers: keep the older run
            return
        self._runs[key] = run.info.run_id
        self._interrupt(run)

    def _interrupt(self, run: Run) -> None:
        """Close a RUNNING run as killed, with the outcome interrupted."""
        if run.info.status == "RUNNING":
            self._write(run.info.run_id, tags={_OUTCOME: "interrupted"})
            self._client.set_terminated(run.info.run_id, "KILLED")

    def _create(self, kind: str, key: str, name: str, started: float | None = None) -> str:
        """A new run, created together with its identifying tags, so that a resume finds it even after a kill."""
        tags = {SWEEP: self._sweep_id, _KIND: kind}
        if kind != "sweep":
            tags |= {_PARENT: self._parent, SETTING if kind == "average" else TRIAL: key}
        run = self._client.create_run(self._experiment, _milliseconds(started), tags, name)
        self._runs[kind, key] = run.info.run_id
        return str(run.info.run_id)

    def _trial_run(self, trial: PublishedTrial) -> Run:
        """The run of the trial. MLflow parameters are immutable, so a run with different ones is replaced."""
        key = trial.key
        run_id = self._runs.get(("trial", key))
        if run_id is not None:
            run = self._client.get_run(run_id)
            params = _params(trial)
            if all(params.get(name, value) == value for name, value in run.data.params.items()):
                if run.info.status != "RUNNING" and trial.state.is_running:
                    self._client.update_run(run_id, status="RUNNING")
                return run
            self._client.delete_run(run_id)
        seed = f" · seed {trial.labels['seed']}" if "seed" in trial.labels else ""
        return self._client.get_run(self._create("trial", key, setting_name(trial) + seed, trial.started))

    def _log_epochs(self, run: Run, trial: PublishedTrial) -> None:
        """Append the points that are not recorded yet: new epochs, and series known only once the trial has ended."""
        history, run_id = trial.history, run.info.run_id
        recorded = self._points.pop(run_id, None)  # read again after a failed write, which may be partial
        if recorded is None:
            recorded = self._recorded_points(run)
        start = trial.started or time.time()
        span = max((trial.ended or time.time()) - start, 0.0)
        metrics = [
            Metric(valid_name(name), value, int(1000 * (start + span * (place + 1) / len(history))), epoch.step)
            for place, epoch in enumerate(history)
            for name, value in epoch_metrics(epoch).items()
            if (valid_name(name), epoch.step) not in recorded
        ]
        for chunk in _chunks(metrics, _ENTITIES_PER_BATCH):
            self._client.log_batch(run_id, metrics=chunk)
        self._points[run_id] = recorded | {(metric.key, metric.step) for metric in metrics}

    def _recorded_points(self, run: Run) -> set[tuple[str, int]]:
        series = (name for name in run.data.metrics if not name.startswith(_SCALARS))
        histories = (self._client.get_metric_history(run.info.run_id, name) for name in series)
        return {(metric.key, metric.step) for history in histories for metric in history}

    def _log_final(self, run: Run, values: Mapping[str, float]) -> None:
        """Write the scalars that are new or have changed, at step 0."""
        now = int(1000 * time.time())
        changed = [
            Metric(valid_name(name), value, now, 0)
            for name, value in values.items()
            if run.data.metrics.get(valid_name(name)) != value
        ]
        for chunk in _chunks(changed, _ENTITIES_PER_BATCH):
            self._client.log_batch(run.info.run_id, metrics=chunk)

    def _log_groups(self, run: Run, trial: PublishedTrial) -> None:
        """Write the table of groups. log_table would append to an existing table, so a changed one is overwritten."""
        table = group_table(trial)
        content = {"columns": list(table), "data": [list(row) for row in zip(*table.values(), strict=True)]}
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        if not content["data"] or run.data.tags.get(_GROUPS) == digest:
            return
        if "mlflow.loggedArtifacts" in run.data.tags:
            self._client.log_dict(run.info.run_id, content, "groups.json")
        else:
            self._client.log_table(run.info.run_id, table, "groups.json")
        self._write(run.info.run_id, tags={_GROUPS: digest})

    def _log_average(self, setting: Setting) -> None:
        """The run of a setting: means over seeds under the metrics' names, standard deviations under ``deviation/``.

        A mean of epsilons claims nothing: what the means cost is the composed epsilon.
        """
        name = f"{setting.name} · mean of {len(setting.trials)} seeds"
        run_id = self._runs.get(("average", setting.name)) or self._create("average", setting.name, name)
        members = [self._trials[trial.key] for trial in setting.trials]
        values: dict[str, float] = {}
        for metric, over in _spreads(members).items():
            values |= {metric: over.mean, f"deviation/{metric}": over.deviation}
        run = self._client.get_run(run_id)
        together, claims = composition_entries(members)
        values = {metric: value for metric, value in values.items() if not metric.endswith(COMPOSED)} | together
        tags = {
            **_shared([_tags(member) for member in members]),
            **claims,
            "seeds": str(len(members)),
            "mlflow.runName": name,
        }
        self._write(run_id, run, params=_shared([_params(member) for member in members]), tags=tags)
        self._log_final(run, values)
        self._end(run, "FINISHED", None)

    def _write(
        self,
        run_id: str,
        run: Run | None = None,
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Write parameters and tags, except those that ``run``, if given, already has."""
        known = {**run.data.params} if run else {}
        tagged = {**run.data.tags} if run else {}
        new = [Param(key, value) for key, value in (params or {}).items() if key not in known]
        changed = [RunTag(key, value) for key, value in (tags or {}).items() if tagged.get(key, "") != value]
        for some in _chunks(new, _PARAMS_OR_TAGS_PER_BATCH):
            self._client.log_batch(run_id, params=some)
        for some_tags in _chunks(changed, _PARAMS_OR_TAGS_PER_BATCH):
            self._client.log_batch(run_id, tags=some_tags)

    def _end(self, run: Run, status: str, ended: float | None) -> None:
        if status != "RUNNING" and run.info.status != status:
            self._client.set_terminated(run.info.run_id, status, _milliseconds(ended))

    @contextmanager
    def _reported(self, doing: str) -> Iterator[None]:
        """Turn any error of a store or artifact repository (each raises its own types) into `TrackingUnavailable`."""
        try:
            yield
        except DpsweepError:
            raise
        except Exception as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise TrackingUnavailable(masked(f"{doing} MLflow at {self._uri}: {reason}", self._uri)) from error


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
        tags |= {"epsilon_kind": trial.privacy.kind}
    if trial.individuals is not None:
        tags |= {"epsilon_i_kind": trial.individuals.kind, "disclosure": trial.individuals.disclosure}
        tags |= {"sensitive": "true"} if release_mode(trial.individuals.disclosure).is_sensitive else {}
    remarks = [*([f"{trial.state.word.capitalize()}: {trial.error}"] if trial.error else []), *trial.notes]
    return {
        key: value[:_LONGEST_TAG] for key, value in {**tags, _NOTE: "\n\n".join(map(for_markdown, remarks))}.items()
    }


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


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    remaining = list(items)
    while remaining:
        yield remaining[:size]
        remaining = remaining[size:]


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(1000 * seconds)
