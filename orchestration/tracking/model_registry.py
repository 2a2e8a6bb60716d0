"""Registers the best model of a sweep in MLflow's model registry, on request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mlflow import MlflowClient
from mlflow.entities import LoggedModel
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.mlflow_artifacts_repo import MlflowArtifactsRepository

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.comparison.best import Best
from dpsweep.orchestration.comparison.formats import masked, number
from dpsweep.orchestration.comparison.metrics import final_metrics
from dpsweep.orchestration.comparison.values import delta, epsilon
from dpsweep.orchestration.records.layout import SweepFiles, require_safe_tracking
from dpsweep.orchestration.records.published import PublishedTrial
from dpsweep.orchestration.records.status_snapshot import read_snapshot
from dpsweep.orchestration.tracking.addresses import probe, reported
from dpsweep.orchestration.tracking.embedded import client_of, embedded_tracking_uri, timed
from dpsweep.orchestration.tracking.given_stores import given_experiment, given_store
from dpsweep.orchestration.tracking.models import ModelLog
from dpsweep.orchestration.tracking.plain_comparison import SETTING, SWEEP, TRIAL

_MODEL: Final = "dpsweep.logged_model"
ALIAS: Final = "champion"
"""Default alias of the registered model."""


@dataclass(frozen=True)
class Registered:
    """A version of a registered model."""

    name: str
    version: str
    alias: str
    location: str
    """Where the model lies: ``mlflow.pyfunc.load_model`` loads it whatever the process's tracking URI is."""

    @property
    def address(self) -> str:
        """``models:/NAME@ALIAS``, which ``mlflow.pyfunc.load_model`` looks up at the process's tracking URI."""
        return f"models:/{self.name}@{self.alias}"


def register_best(
    found: Best, sweep_id: str, files: SweepFiles, name: str, alias: str = ALIAS, tracking_uri: str | None = None
) -> Registered:
    """Register the best model as a version of the registered model ``name``, and give this version the alias.

    A model that is already registered gets no new version, only the alias. tracking_uri: by default
    ``MLFLOW_TRACKING_URI``, else where the sweep was recorded. Raises: InvalidInput if tracking is off, for a store
    that only the sweep's folder names, if MLflow has no weights of the model, and for names that MLflow refuses;
    TrackingUnavailable.
    """
    uri = given_store(files, tracking_uri)
    if uri == embedded_tracking_uri(files.local_folder):
        require_safe_tracking(files)
    name_there = given_experiment(uri, read_snapshot(files.status), files)
    with reported("cannot register a model in", uri):
        probe(uri)
        client_of(uri)  # refuses a database that somebody else has changed
        client = timed(MlflowClient(tracking_uri=uri, registry_uri=uri), uri)
        experiment = client.get_experiment_by_name(name_there)
        ids = [experiment.experiment_id] if experiment is not None else []
        model = _logged(client, ids, sweep_id, found.trial.key)
        if model is None:
            _keep(client, ids, sweep_id, files, found.trial)
            model = _logged(client, ids, sweep_id, found.trial.key)
        if model is None:
            raise InvalidInput(
                f"MLflow at {masked(uri, uri)} keeps no weights of the model of {found.trial.key}; give the "
                f"--tracking-uri that the sweep was recorded in, or record it there: `dpsweep record {files.root}`"
            )
        try:
            version = _version(client, model, name, _facts(found))
            client.set_registered_model_alias(name, alias, version)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            raise InvalidInput(
                f"MLflow refuses the name {name!r} or the alias {alias!r}: {error.message}; choose another"
            ) from error
    return Registered(name, version, alias, _location(model, uri))


def _location(model: LoggedModel, uri: str) -> str:
    """Return the URI of the model's files; one that a server passes on is that server's address of them."""
    location = str(model.artifact_location)
    if not location.startswith("mlflow-artifacts:"):
        return location
    return str(MlflowArtifactsRepository.resolve_uri(location, uri))  # type: ignore[no-untyped-call]


def _logged(client: MlflowClient, experiments: list[str], sweep_id: str, key: str) -> LoggedModel | None:
    """Return the logged model of a trial, if MLflow has its weights. experiments: id of the sweep's, if any."""
    chosen = f"tags.`{SWEEP}` = '{sweep_id}' AND tags.`{TRIAL}` = '{key}'"
    found = client.search_logged_models(experiments, chosen) if experiments else ()
    return next((model for model in found if client.list_logged_model_artifacts(model.model_id)), None)


def _keep(
    client: MlflowClient, experiments: list[str], sweep_id: str, files: SweepFiles, trial: PublishedTrial
) -> None:
    """Make the logged model of a trial that is not among the best, if the trial has a run."""
    chosen = f"tags.`{SWEEP}` = '{sweep_id}' AND tags.`{TRIAL}` = '{trial.key}'"
    for experiment in experiments:
        for run in client.search_runs([experiment], chosen):
            models = ModelLog(client, experiment, sweep_id, files, 1)
            models.keep(run.info.run_id, trial, final_metrics(trial))


def _version(client: MlflowClient, model: LoggedModel, name: str, facts: Mapping[str, str]) -> str:
    """Return the version of a logged model under ``name``: the existing one, with these facts, or a new one."""
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    for version in client.search_model_versions(f"name = '{name}'"):
        if version.tags.get(_MODEL) == model.model_id:
            for key, value in facts.items():
                if version.tags.get(key) != value:
                    client.set_model_version_tag(name, version.version, key, value)
            return str(version.version)
    tags = {**facts, _MODEL: model.model_id, SETTING: model.tags.get(SETTING, ""), TRIAL: model.tags[TRIAL]}
    source, run = model.artifact_location, model.source_run_id
    return str(client.create_model_version(name, source, run, tags=tags, model_id=model.model_id).version)


def _facts(found: Best) -> dict[str, str]:
    """Tags of the version: the selecting metric with its value and interval, epsilon, delta and what they claim."""
    cost, least = epsilon(found.trial), delta(found.trial)
    claim = {"epsilon_kind": found.kind, "epsilon_reasons": ", ".join(found.reasons), "unit": found.unit}
    facts = {"by": found.by, found.by: number(found.value, 4), "epsilon": number(cost), "delta": f"{least:g}", **claim}
    if found.interval is None:
        return facts
    return {**facts, "interval": f"{number(found.interval.low, 4)} to {number(found.interval.high, 4)}"}
