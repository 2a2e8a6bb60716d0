"""The `Tracker` that records a sweep in MLflow; only `tracking` imports MLflow.

A sweep has one parent run. Its child runs are one per trial, and one per setting with the averages over its seeds. Only
the driver writes. It also initialises an embedded store, because several processes that open a new SQLite store at
the same time mostly fail. Runs are identified by their tags, so a resumed sweep continues its runs and duplicates none.

A finished trial takes three requests: its run with its tags, all its numbers, and its end. One that was recorded before
the last one ended takes a fourth, with the number by which its setting is compared. Data, groups and report belong to
the whole sweep and are recorded once, in the parent run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Final

from dpsweep.orchestration.tracking.embedded import client_of, every_page  # first, as it keeps MLflow quiet

# isort: split
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, Run
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS, MLFLOW_RUN_NAME

from dpsweep.orchestration.comparison.formats import for_markdown
from dpsweep.orchestration.comparison.metrics import final_metrics
from dpsweep.orchestration.comparison.sanity import without_changes
from dpsweep.orchestration.comparison.settings import Setting, finished_settings, setting_name
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import PublishedDataset, PublishedSweep, PublishedTrial, TrialState
from dpsweep.orchestration.store.release_modes import release_mode
from dpsweep.orchestration.tracking.addresses import experiment_name, is_server, probe, reported
from dpsweep.orchestration.tracking.logged_models import ModelLog
from dpsweep.orchestration.tracking.plain_comparison import (
    CHANGE,
    KIND,
    NOTHING_COMPARED,
    SETTING,
    SWEEP,
    TRIAL,
    TrackedComparison,
    rounded_values,
    shared_view,
    spreads,
    valid_name,
)
from dpsweep.orchestration.tracking.requests import each
from dpsweep.orchestration.tracking.runs import MlflowRuns, Point
from dpsweep.orchestration.tracking.tracker import (
    COMPOSED,
    RunStatus,
    TrackedSweep,
    composition_entries,
    epoch_metrics,
    group_rows,
)

Tags = Mapping[str, str]
_NO_TAGS: Tags = MappingProxyType({})

_GROUPS, _DATA = "dpsweep.groups_digest", "dpsweep.data"
_PARENT, _NOTE = "mlflow.parentRunId", "mlflow.note.content"
_EXPERIMENT_KIND, _MODEL_TRAINING = "mlflow.experimentKind", "custom_model_development"
"""Tag by which MLflow opens an experiment with runs and models, and not with traces of language models."""
_OUTCOME = "dpsweep.outcome"
_OUTCOMES: Mapping[RunStatus, str] = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "interrupted"}
"""Outcome of a sweep by the status of its MLflow run."""
_SEAL = "dpsweep.digest"
"""Tag with a digest of all that is recorded of a trial. MLflow stores tags last, so a run with its digest is whole."""
_MOST_TEXTS, _MOST_ENTRIES = 100, 1000
"""Most parameters, or tags, and most entries that MLflow's client sends in one request."""
_DEVIATION: Final = "deviation/"
_TABLE = "groups.json"
IN_FLIGHT: Final = 8
"""Most requests to a server or a database at a time; SQLite has one writer."""
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

    `artifact_root`: absolute path or URI for artifacts if ``tracking_uri`` is a database (a server chooses its own);
    used only when the experiment is created. Raises: TrackingUnavailable within seconds if MLflow cannot be reached.
    """

    def __init__(self, tracking_uri: str, *, experiment: str | None = None, artifact_root: str | None = None) -> None:
        self._uri = tracking_uri
        with reported("cannot use", tracking_uri):
            probe(tracking_uri)
            self._client = client_of(tracking_uri)
            location = None if is_server(tracking_uri) else artifact_root
            self._experiment = _experiment_id(self._client, experiment or experiment_name(), location)
        self.in_flight = 1 if tracking_uri.startswith("sqlite") else IN_FLIGHT
        self._written = MlflowRuns(self._client, self._experiment, tracking_uri)
        self._sweep_id = self._parent = ""
        self._runs: dict[tuple[str, str], str] = {}
        self._unsure: set[tuple[str, str]] = set()
        self._trials: dict[str, PublishedTrial] = {}
        self._compared = NOTHING_COMPARED

    @property
    def answered(self) -> int:
        return self._written.answered

    def open_sweep(self, sweep: TrackedSweep, anew: Sequence[str] = ()) -> str:
        self._sweep, self._sweep_id, self._files = sweep, sweep.sweep_id, SweepFiles(sweep.root)
        self._models = ModelLog(self._client, self._experiment, sweep.sweep_id, self._files, self.in_flight)
        with self._reported("cannot open the sweep in"):
            self._runs = {}
            for run in self._runs_of(f"tags.`{SWEEP}` = '{self._sweep_id}'"):
                self._adopt(run)
            for run_id in filter(None, (self._runs.pop(("trial", key), None) for key in anew)):
                self._written.delete(run_id)
            self._parent = self._runs.get(("sweep", "")) or self._create("sweep", "", sweep.name)
            for run_id in self._runs.values():
                if run_id != self._parent:  # writes only where somebody has deleted the run of the sweep
                    self._written.write(run_id, tags={_PARENT: self._parent})
            self._written.reopen(self._parent)
            self._written.write(self._parent, tags={_OUTCOME: "running", MLFLOW_RUN_NAME: sweep.name, **self._name})
            self._written.attach(
                self._parent,
                {"sweep.yaml": sweep.spec, "manifest.json": json.dumps(dict(sweep.manifest), indent=2)},
            )
        return self._parent

    @property
    def _name(self) -> dict[str, str]:
        """Tag by which the table of runs, charts and filters tell sweeps of one experiment apart."""
        return {"sweep": self._sweep.name[:_LONGEST_TAG]}

    def compare_by(self, compared: TrackedComparison) -> None:
        self._compared = compared

    def log_trial(self, trial: PublishedTrial) -> str:
        self._trials[trial.key] = trial
        if trial.state not in _STATUSES:
            return self._runs.get(("trial", trial.key), "")
        with self._reported(f"cannot record trial {trial.key} in"):
            run_id, status = self._trial_run(trial), _STATUSES[trial.state]
            params, tags, points = _params(trial), _tags(trial) | self._name, _points(trial)
            seal = _digest(params, tags, final_metrics(_alone(trial)), points)
            held = self._written.held(run_id)
            if held.status == status and held.tags.get(_SEAL) == seal:
                return run_id
            values = final_metrics(self._shown(trial))
            values = {
                **values,
                **rounded_values(values, self._compared.short),
                **self._compared.numbers.get(trial.key, {}),
            }
            count = len(params) + len(tags) + len(values) + len(points)
            if len(params) > _MOST_TEXTS or len(tags) >= _MOST_TEXTS or count >= _MOST_ENTRIES:
                # MLflow's client sends several requests, the tags before the last numbers
                self._written.write(run_id, params, tags, values, points, moment=trial.ended)
            self._written.write(run_id, params, {**tags, _SEAL: seal}, values, points, moment=trial.ended)
            if status != "RUNNING":
                self._written.end(run_id, status, trial.ended)
        return run_id

    def log_report(self, pages: Path, data: PublishedSweep) -> None:
        with self._reported("cannot attach the report in"):
            self._require_parent()
            self._written.attach_files(self._parent, pages)
            datasets = {each.digest: each for each in (trial.dataset for trial in data.trials) if each is not None}
            self._written.name_data(self._parent, [DatasetInput(_dataset(each)) for each in datasets.values()])
            tags = {"sensitive": "true"} if release_mode(data.disclosure).is_sensitive else {}
            self._written.write(self._parent, tags={**tags, **self._log_groups(data.trials)})

    def log_comparison(self, compared: TrackedComparison, sentences: Sequence[str]) -> None:
        with self._reported("cannot record the comparison in"):
            self._require_parent()
            for trial in self._trials.values():
                if self._known("trial", trial.key) is None:
                    self.log_trial(trial)
            runs = {key: run for (kind, key), run in self._runs.items() if kind == "trial"}
            self.compare_by(compared)
            shown = {key: self._shown(trial) for key, trial in self._trials.items()}
            self._models.record(compared, shown, runs)
            known = [
                (runs[key], {**self._taken_back(runs[key], [self._trials[key]]), **final_metrics(shown[key]), **values})
                for key, values in compared.numbers.items()
                if key in runs
            ]
            each(lambda pair: self._written.write(pair[0], values=pair[1]), known, self.in_flight)
            note = "\n\n".join(map(for_markdown, [*sentences, f"Report: {self._files.report}"]))
            tags, means = {_NOTE: note[:_LONGEST_TAG]}, dict[str, float]()
            if compared.best:
                tags["best_setting"] = compared.best[:_LONGEST_TAG]
                costs, _ = composition_entries(self._trials.values())  # the sweep's costs, which `close` writes
                means = {name: mean for name, mean in compared.best_means.items() if name not in costs}
            means |= self._taken_back(self._parent, list(self._trials.values()))
            self._written.write(self._parent, tags=tags, values=means)
            self._client.set_experiment_tag(
                self._experiment,
                f"mlflow.sharedViewState.{self._sweep_id}",
                shared_view(self._sweep_id, compared),
            )

    def address(self, sweep_id: str) -> str:
        view = f"viewStateShareKey={sweep_id}&compareRunsMode=TABLE"
        return f"#/experiments/{self._experiment}/runs?workflowType=machine_learning&{view}"

    def close(self, status: RunStatus = "FINISHED") -> None:
        with self._reported("cannot close the sweep in"):
            self._require_parent()
            settings = finished_settings(self._trials.values())
            each(self._log_average, [setting for setting in settings if len(setting.trials) > 1], self.in_flight)
            counts = {f"trials/{state.word}": float(self._count(state)) for state in TrialState if state.has_ended}
            values, tags = composition_entries(self._trials.values())
            tags = {**tags, _OUTCOME: _OUTCOMES[status]}
            self._written.write(self._parent, tags=tags, values={**counts, **values})
            self._remove_duplicates()
            self._interrupt_children()
            self._written.end(self._parent, status)

    def interrupt(self) -> None:
        with self._reported("cannot close the sweep in"):
            self._interrupt(self._parent)
            self._interrupt_children()

    def _shown(self, trial: PublishedTrial) -> PublishedTrial:
        """Return the trial, with its changes only where the whole sweep shows that its baseline bears them."""
        return trial if self._compared.knows_cost else _alone(trial)

    def _taken_back(self, run_id: str, trials: Sequence[PublishedTrial]) -> dict[str, float]:
        """Return NaN for each change of these trials that the run holds, if no baseline bears it any more.

        MLflow deletes no number of a run.
        """
        if self._compared.knows_cost:
            return {}
        lost = {name for trial in trials for name in final_metrics(trial).keys() - final_metrics(_alone(trial)).keys()}
        return {
            name: math.nan
            for name, value in self._written.held(run_id).metrics.items()
            if not math.isnan(value) and (name.removeprefix(_DEVIATION) in lost or name.startswith(CHANGE))
        }

    def _require_parent(self) -> None:
        """Create the sweep's run again, as the parent of the others, if somebody has deleted it meanwhile."""
        if self._written.held(self._parent).is_deleted:
            self.open_sweep(self._sweep)

    def _known(self, kind: str, key: str) -> str | None:
        """Return the run of a trial or of a setting; None if there is none, or somebody has deleted it meanwhile."""
        run_id = self._runs.get((kind, key))
        return None if run_id is None or self._written.held(run_id).is_deleted else run_id

    def _interrupt_children(self) -> None:
        each(self._interrupt, [run for run in self._runs.values() if run != self._parent], self.in_flight)

    def _remove_duplicates(self) -> None:
        """Delete runs that MLflow made of requests that seemed to have failed, and that were sent again."""
        if self._unsure:
            for run in self._runs_of(f"tags.`{SWEEP}` = '{self._sweep_id}'"):
                if self._runs.setdefault(_identity(run), run.info.run_id) != run.info.run_id:
                    self._written.delete(run.info.run_id)
            self._unsure.clear()

    def _count(self, state: TrialState) -> int:
        return sum(trial.state is state for trial in self._trials.values())

    def _runs_of(self, chosen: str) -> Iterator[Run]:
        """Yield the runs that the filter ``chosen`` finds, oldest first."""
        found = every_page(lambda token: self._client.search_runs([self._experiment], chosen, page_token=token), "runs")
        return iter(sorted(found, key=lambda run: int(run.info.start_time)))

    def _adopt(self, run: Run) -> None:
        """Register a run of an earlier driver; if it is still RUNNING, its driver was killed, and the run is ended."""
        identity = _identity(run)
        self._written.know(run)
        if identity in self._runs:
            self._written.delete(run.info.run_id)  # duplicate from two concurrent drivers: keep the older run
            return
        self._runs[identity] = run.info.run_id
        self._interrupt(run.info.run_id)

    def _interrupt(self, run_id: str) -> None:
        """Close a RUNNING run as killed, with the outcome interrupted."""
        held = self._written.held(run_id)
        if held.status == "RUNNING" and not held.is_deleted:
            self._written.write(run_id, tags={_OUTCOME: "interrupted"})
            self._written.end(run_id, "KILLED")

    def _create(self, kind: str, key: str, name: str, started: float | None = None, tags: Tags = _NO_TAGS) -> str:
        """Create a run together with its identifying tags, so that a resume finds it even after a kill.

        After a failed attempt, MLflow is asked first whether it has made the run nevertheless. A server that was held
        up may still make it after that answer: `close` removes it.
        """
        own = {SWEEP: self._sweep_id, KIND: kind}
        if kind != "sweep":
            own[SETTING if kind == "average" else TRIAL] = key
        if (kind, key) in self._unsure:
            chosen = " AND ".join(f"tags.`{tag}` = {quoted}" for tag, text in own.items() if (quoted := _quoted(text)))
            for run in self._runs_of(chosen):
                if _identity(run) == (kind, key):
                    self._written.know(run)
                    self._runs[kind, key] = str(run.info.run_id)
                    return self._runs[kind, key]
        is_first = (kind, key) not in self._unsure
        self._unsure.add((kind, key))
        parent = {} if kind == "sweep" else {_PARENT: self._parent}
        self._runs[kind, key] = self._written.create(name, {**tags, **own, **parent}, started)
        if is_first:
            self._unsure.discard((kind, key))
        return self._runs[kind, key]

    def _trial_run(self, trial: PublishedTrial) -> str:
        """Return the run of the trial. MLflow parameters are immutable, so a run with other parameters is replaced."""
        key = trial.key
        run_id = self._known("trial", key)
        if run_id is not None:
            params = _params(trial)
            if all(params.get(name, value) == value for name, value in self._written.held(run_id).params.items()):
                if trial.state.is_running:
                    self._written.reopen(run_id)
                return run_id
            self._written.delete(run_id)
        seed = f" · seed {trial.labels['seed']}" if "seed" in trial.labels else ""
        return self._create("trial", key, setting_name(trial) + seed, trial.started, _tags(trial))

    def _log_groups(self, trials: Sequence[PublishedTrial]) -> dict[str, str]:
        """Write the table of groups if it changed; returns the tags by which MLflow's page and a later run find it."""
        rows = group_rows(trials)
        columns = list(dict.fromkeys(name for row in rows for name in row))
        content = json.dumps({"columns": columns, "data": [[row.get(name) for name in columns] for row in rows]})
        digest = hashlib.sha256(content.encode()).hexdigest()
        if not rows or self._written.held(self._parent).tags.get(_GROUPS) == digest:
            return {}
        self._written.attach(self._parent, {_TABLE: content})
        return {_GROUPS: digest, MLFLOW_LOGGED_ARTIFACTS: json.dumps([{"path": _TABLE, "type": "table"}])}

    def _log_average(self, setting: Setting) -> None:
        """Write the run of a setting: means over seeds by metric, and standard deviations under ``deviation/``.

        A mean of epsilons is no privacy claim: publishing the means costs the composed epsilon.
        """
        name = f"{setting.name} · mean of {len(setting.trials)} seeds"
        members = [self._shown(self._trials[trial.key]) for trial in setting.trials]
        values: dict[str, float] = {}
        for metric, over in spreads(members).items():
            values |= {metric: over.mean, f"{_DEVIATION}{metric}": over.deviation}
        together, claims = composition_entries(members)
        values = {metric: value for metric, value in values.items() if not metric.endswith(COMPOSED)} | together
        tags = {
            **_shared([_tags(member) for member in members]),
            **self._name,
            **claims,
            "seeds": str(len(members)),
            "mlflow.runName": name,
        }
        run_id = self._known("average", setting.name) or self._create("average", setting.name, name, tags=tags)
        ordering = self._compared.numbers.get(setting.trials[0].key, {})  # the mean stands with its trials
        values |= {metric: value for metric, value in ordering.items() if metric.startswith("setting/")}
        values |= self._taken_back(run_id, [self._trials[trial.key] for trial in setting.trials])
        values |= rounded_values(values, self._compared.short)
        self._written.write(run_id, _shared([_params(member) for member in members]), tags, values)
        self._written.end(run_id, "FINISHED")

    @contextmanager
    def _reported(self, doing: str) -> Iterator[None]:
        """`reported` for this store; after an error, the models are requested again, as `MlflowRuns` does of runs."""
        try:
            with reported(doing, self._uri):
                yield
        except BaseException:
            self._models.forget()
            raise


def _alone(trial: PublishedTrial) -> PublishedTrial:
    """Return the trial without its changes against a baseline."""
    return without_changes([trial])[0]


def end_running(tracking_uri: str, sweep_id: str, experiment_of_sweep: str = "") -> None:
    """End all runs of a sweep that are RUNNING as killed; by default in `experiment_name`. Raises:
    TrackingUnavailable.
    """
    with reported("cannot close the sweep in", tracking_uri):
        probe(tracking_uri)
        client = client_of(tracking_uri)
        experiment = client.get_experiment_by_name(experiment_of_sweep or experiment_name())
        chosen = f"tags.`{SWEEP}` = '{sweep_id}' AND attributes.status = 'RUNNING'"
        for run in client.search_runs([experiment.experiment_id], chosen) if experiment else ():
            client.set_tag(run.info.run_id, _OUTCOME, "interrupted")
            client.set_terminated(run.info.run_id, "KILLED")


def _experiment_id(client: MlflowClient, name: str, artifact_location: str | None) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return str(client.create_experiment(name, artifact_location, {_EXPERIMENT_KIND: _MODEL_TRAINING}))
        except MlflowException:  # another sweep has just made it
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    return str(experiment.experiment_id)


def _identity(run: Run) -> tuple[str, str]:
    """Kind and key of a run of the sweep, by its tags."""
    kind = run.data.tags.get(KIND, "")
    return kind, run.data.tags.get(SETTING if kind == "average" else TRIAL, "")


def _quoted(text: str) -> str:
    """Return the text in quotes for a filter of MLflow, which knows no escapes; "" for one with both kinds."""
    return next((f"{quote}{text}{quote}" for quote in "'\"" if quote not in text), "")


def _params(trial: PublishedTrial) -> dict[str, str]:
    """Return the labels and parameters as MLflow's text values."""
    return {valid_name(key): str(value)[:_LONGEST_PARAM] for key, value in {**trial.labels, **trial.params}.items()}


def _tags(trial: PublishedTrial) -> dict[str, str]:
    tags = {**trial.tags, _OUTCOME: trial.state.word}
    if trial.dataset is not None:
        tags[_DATA] = f"{trial.dataset.name} {trial.dataset.digest[:36]}"
    if trial.privacy is not None:
        tags |= {"private": str(trial.privacy.is_private).lower()}
        tags |= {"accountant": trial.privacy.accountant, "adjacency": trial.privacy.adjacency}
        tags |= {"unit": trial.privacy.unit, "noise_strategy": trial.privacy.noise_strategy}
        tags |= {"epsilon_kind": trial.privacy.kind, "epsilon_reasons": ", ".join(trial.reasons)}
        tags |= {f"epsilon_kind_group_of_{size}": kind for size, kind in trial.privacy.group_kinds.items() if size > 1}
    if trial.individuals is not None:
        tags |= {"epsilon_i_kind": trial.individuals.kind, "disclosure": trial.individuals.disclosure}
        tags |= {"epsilon_i_reasons": ", ".join(trial.individuals.reasons)}
        tags |= {"sensitive": "true"} if release_mode(trial.individuals.disclosure).is_sensitive else {}
    remarks = [*([f"{trial.state.word.capitalize()}: {trial.error}"] if trial.error else []), *trial.notes]
    return {
        key: value[:_LONGEST_TAG] for key, value in {**tags, _NOTE: "\n\n".join(map(for_markdown, remarks))}.items()
    }


def _digest(*entries: object) -> str:
    return hashlib.sha256(json.dumps(entries, default=asdict).encode()).hexdigest()


def _points(trial: PublishedTrial) -> list[Point]:
    """Return the per-epoch series of a trial; time stamps are spread evenly over its duration."""
    start, epochs = trial.started or time.time(), len(trial.history)
    span = max((trial.ended or time.time()) - start, 0.0)
    return [
        Point(name, value, epoch.step, int(1000 * (start + span * (place + 1) / epochs)))
        for place, epoch in enumerate(trial.history)
        for name, value in epoch_metrics(epoch).items()
    ]


def _dataset(dataset: PublishedDataset) -> Dataset:
    profile = json.dumps(dict(dataset.profile))
    return Dataset(dataset.name, dataset.digest[:36], "dpsweep", json.dumps({"name": dataset.name}), None, profile)


def _shared(mappings: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the entries that all mappings have in common."""
    first, *others = mappings
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
