"""Logged models in MLflow of the best private settings, each by its first seed, and the registered best model."""

from __future__ import annotations

import json
import math
import platform
import re
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from dpsweep.orchestration.tracking.embedded import (  # first, as it keeps MLflow quiet
    client_of,
    embedded_tracking_uri,
    every_page,
    timed,
)

# isort: split
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelOutput, LoggedModelStatus, Metric
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.models.utils import EXAMPLE_FILENAME, SERVING_INPUT_FILENAME
from mlflow.store.artifact.mlflow_artifacts_repo import MlflowArtifactsRepository
from mlflow.types import ColSpec, DataType, Schema, TensorSpec
from mlflow.types.schema import Array
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.files import exists, list_files, read_bytes, read_range
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.comparison.best import Best
from dpsweep.orchestration.comparison.formats import PRECISE, at_most, for_markdown, number
from dpsweep.orchestration.comparison.metrics import final_metrics
from dpsweep.orchestration.comparison.settings import setting_name
from dpsweep.orchestration.comparison.wording import between
from dpsweep.orchestration.store.layout import SweepFiles, require_safe_tracking
from dpsweep.orchestration.store.published import PublishedPrivacy, PublishedTrial
from dpsweep.orchestration.tracking.addresses import masked, probe, reported, require_location
from dpsweep.orchestration.tracking.given_stores import given_experiment, given_store
from dpsweep.orchestration.tracking.plain_comparison import SETTING, SWEEP, TRIAL, TrackedComparison, valid_name
from dpsweep.orchestration.tracking.requests import each
from dpsweep.workers.training.history import TrainingResult, read_training_result

_CLAIMS: Final[tuple[str, ...]] = ("epsilon_kind", "epsilon_reasons", "unit", "adjacency")
_LONGEST_NAME: Final = 250
LARGEST_MODEL: Final = 100 * 2**20
"""Maximum size of a model in bytes; larger ones are not copied to MLflow, where a tag names their location."""


@dataclass
class LoggedNumbers:
    """A logged model, the data set it is linked to, and the numbers and claims that MLflow already stores for it.

    `location`: of its files. `is_complete`: whether it has its weights, if they are kept at all.
    """

    model_id: str
    location: str
    dataset: Mapping[str, str]
    numbers: dict[str, float] = field(default_factory=dict)
    claims: Mapping[str, str] = field(default_factory=dict)
    is_complete: bool = False

    def metric(self, name: str, value: float, run: str, ended: float | None) -> Metric:
        """Return an MLflow metric, recorded for both the model and its ``run``.

        `ended`: the time of the same number in the run, in seconds since 1970, so that MLflow sees one point, not two.
        """
        moment = int(1000 * (time.time() if ended is None or name in self.numbers else ended))
        return Metric(name, value, moment, 0, model_id=self.model_id, run_id=run, **self.dataset)


class ModelLog:
    """The logged models of one sweep in one experiment: the best private settings, each by its first seed.

    files: the sweep's files. The existing models are requested from MLflow once, and again after `forget`. A model is
    READY once MLflow has its weights, so that one whose driver was killed meanwhile is completed.
    """

    def __init__(self, client: MlflowClient, experiment: str, sweep_id: str, files: SweepFiles, in_flight: int) -> None:
        self._client, self._experiment, self._sweep_id, self._files = client, experiment, sweep_id, files
        self._in_flight = in_flight
        self._models: dict[str, LoggedNumbers] | None = None

    def forget(self) -> None:
        """Request the existing models again next time; to be called after an error."""
        self._models = None

    def record(
        self, compared: TrackedComparison, trials: Mapping[str, PublishedTrial], runs: Mapping[str, str]
    ) -> None:
        """Record the models of the best settings, with weights, and the numbers of all models that MLflow has.

        runs: run id by the key of the trial. The model of a setting is that of its first seed. It gets the means over
        seeds, such as ``setting/accuracy``, so that a search ordered by them finds settings and not lucky seeds.
        """
        known = self._known()
        shown = [
            (trials[key], means)
            for key, means in compared.means.items()
            if (key in compared.best_models or key in known) and key in runs and key in trials
        ]

        def keep(pair: tuple[PublishedTrial, Mapping[str, float]]) -> None:
            trial, means = pair
            self.keep(runs[trial.key], trial, {**final_metrics(trial), **means})

        each(keep, shown, self._in_flight)

    def keep(self, run: str, trial: PublishedTrial, values: Mapping[str, float]) -> LoggedNumbers:
        """Return the logged model of a finished trial, with ``values`` and, where the trial's folder has them, its
        weights.

        run: id of the trial's run.
        """
        known, claims = self._known(), _claims(trial)
        model = known.get(trial.key)
        if model is None:
            made = self._create(run, trial)
            model = known[trial.key] = LoggedNumbers(made.model_id, made.artifact_location, {}, claims=claims)
            self._client.log_outputs(run, [LoggedModelOutput(model.model_id, 0)])
        if model.claims != claims:
            self._client.set_logged_model_tags(model.model_id, claims)
            model.claims = claims
        if trial.dataset is not None:
            model.dataset = {"dataset_name": trial.dataset.name, "dataset_digest": trial.dataset.digest[:36]}
        self._log(run, model, values, trial.ended)
        files = self._files.trial(trial.key)
        if not model.is_complete and exists(files.model):
            require_location(model.location, model.model_id)
            self._attach(model.model_id, files)
        if not model.is_complete:
            self._client.finalize_logged_model(model.model_id, "READY")
            model.is_complete = True
        return model

    def _known(self) -> dict[str, LoggedNumbers]:
        if self._models is None:
            self._models = {model.tags[TRIAL]: _numbers_of(model) for model in self._existing()}
        return self._models

    def _existing(self) -> Iterator[LoggedModel]:
        experiments, chosen = [self._experiment], f"tags.`{SWEEP}` = '{self._sweep_id}'"
        search = self._client.search_logged_models
        return every_page(lambda token: search(experiments, chosen, page_token=token), "models")

    def _create(self, run: str, trial: PublishedTrial) -> LoggedModel:
        path, setting = self._files.trial(trial.key).model, setting_name(trial)
        tags = {SWEEP: self._sweep_id, TRIAL: trial.key, SETTING: setting[:5000], "path": path, **_claims(trial)}
        params = {str(name)[:250]: str(value)[:500] for name, value in {**trial.labels, **trial.params}.items()}
        name = re.sub(r"[/:.%\"']", "-", setting)[:_LONGEST_NAME]
        return self._client.create_logged_model(self._experiment, name, run, tags, params, "dpsweep")

    def _log(self, run: str, model: LoggedNumbers, values: Mapping[str, float], ended: float | None) -> None:
        """Log the model's numbers that are new or have changed."""
        named = {valid_name(name): value for name, value in values.items() if math.isfinite(value)}
        changed = {name: value for name, value in named.items() if model.numbers.get(name) != value}
        if changed:
            self._client.log_batch(run, metrics=[model.metric(*number, run, ended) for number in changed.items()])
            model.numbers |= changed

    def _attach(self, model_id: str, files: TrialFiles) -> None:
        """Copy weights, input preparation, spec and the user's own code, with the signature.

        Does nothing above `LARGEST_MODEL`.
        """
        if _size(files) > LARGEST_MODEL:
            return
        own = (f"{files.code}/{place}" for place in list_files(files.code))
        uris = (files.model, files.inputs, files.spec, *own)
        contents = {uri.removeprefix(f"{files.root}/"): read_bytes(uri) for uri in uris}
        trained = read_training_result(files.training)
        with tempfile.TemporaryDirectory() as folder:
            for name, content in contents.items():
                target = Path(folder, "trial", name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            _described(trained, model_id, Path(folder)).save(str(Path(folder, "MLmodel")))
            self._client.log_model_artifacts(model_id, folder)
        self._client.set_logged_model_tags(model_id, {MLFLOW_RUN_NOTE: _note(trained)})


def _described(trained: TrainingResult, model_id: str, folder: Path) -> Model:
    """Return the content of the MLmodel file, and store the example that it names in ``folder``.

    A model of a table takes its rows, any other one encoded examples. ``is_signature_from_type_hint`` leaves it to the
    model to check them: MLflow would refuse whole numbers for a column of numbers.
    """
    inputs = Schema([TensorSpec(np.dtype(trained.example_type), (-1, *trained.example_shape))])
    outputs = Schema([TensorSpec(np.dtype(np.float32), (-1,) * (1 + trained.output_axes))])
    example = None
    if trained.example_row is not None and trained.example_prediction is not None:
        inputs, outputs = _schema(trained.example_row), _schema(trained.example_prediction)
        rows = [trained.example_row]
        Path(folder, EXAMPLE_FILENAME).write_text(json.dumps(rows), encoding="utf-8")
        Path(folder, SERVING_INPUT_FILENAME).write_text(json.dumps({"inputs": rows}), encoding="utf-8")
        example = {
            "artifact_path": EXAMPLE_FILENAME,
            "type": "json_object",
            "serving_input_path": SERVING_INPUT_FILENAME,
        }
    signature = ModelSignature(inputs, outputs)
    described = Model(signature=signature, model_id=model_id, saved_input_example_info=example)
    described.add_flavor(
        "python_function",
        loader_module="dpsweep.orchestration.tracking.loading",
        data="trial",
        python_version=platform.python_version(),
    )
    return Model.from_dict({**described.to_dict(), "is_signature_from_type_hint": True})


def _note(trained: TrainingResult) -> str:
    """Return what the page of the model says of its inputs and outputs."""
    if trained.example_row is None or trained.example_prediction is None:
        return (
            f"Takes arrays of {trained.example_type}, as the data source stores its examples, of shape "
            f"{[-1, *trained.example_shape]}, and gives logits. It reads no table, because the data of the trial are "
            "neither a table that declares all of its columns nor texts with a label."
        )
    inputs, outputs = (", ".join(map(for_markdown, each)) for each in (trained.example_row, trained.example_prediction))
    return f"Takes rows of a table with the columns {inputs}. Gives {outputs}. Further columns are ignored."


def _schema(row: Mapping[str, object]) -> Schema:
    """Return the columns of a row by the types of its values."""
    return Schema([ColSpec(_TYPES[type(value)], name) for name, value in row.items()])


_TYPES: Final[Mapping[type, DataType | Array]] = {
    int: DataType.long,
    float: DataType.double,
    str: DataType.string,
    list: Array(DataType.double),
}


def _size(files: TrialFiles) -> int:
    """Return the bytes of the trial's weights; 0 if it has none."""
    return read_range(files.model, 0, 1)[1] if exists(files.model) else 0


def _numbers_of(model: LoggedModel) -> LoggedNumbers:
    claims = {name: model.tags[name] for name in _CLAIMS if name in model.tags}
    numbers = {metric.key: metric.value for metric in (model.metrics or [])}
    is_complete = model.status == LoggedModelStatus.READY
    return LoggedNumbers(model.model_id, model.artifact_location, {}, numbers, claims, is_complete)


def _claims(trial: PublishedTrial) -> dict[str, str]:
    """Tags that say what the epsilon of the trial claims, and why it is no guarantee."""
    privacy = trial.privacy or PublishedPrivacy(math.inf, 0.0, "none", "none")
    claim = (privacy.kind, ", ".join(trial.reasons), privacy.unit, privacy.adjacency)
    return dict(zip(_CLAIMS, claim, strict=True))


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
    name_there = given_experiment(uri, files)
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
        if model is None and _size(files.trial(found.trial.key)) > LARGEST_MODEL:
            raise InvalidInput(
                f"the weights of {found.trial.key} have more than the {LARGEST_MODEL >> 20} MiB that MLflow gets at "
                f"most; load them from Python: dpsweep.open({files.root!r}).trials[{found.trial.key!r}].model()"
            )
        if model is None:
            raise InvalidInput(
                f"MLflow at {masked(uri)} keeps no weights of the model of {found.trial.key}; give the "
                "--tracking-uri that the sweep was recorded in, or record it there: "
                f"`dpsweep record {shlex.quote(files.root)}`"
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
    values = (found.kind, ", ".join(found.reasons), found.unit, found.privacy.adjacency)
    facts = {
        "by": found.by,
        found.by: number(found.value, 4),
        "epsilon": at_most(found.privacy.epsilon),
        "delta": f"{found.privacy.delta:g}",
        **dict(zip(_CLAIMS, values, strict=True)),
    }
    if found.interval is None:
        return facts
    return {**facts, "interval": between(found.interval, PRECISE)}
