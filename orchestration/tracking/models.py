"""Logged models in MLflow of the best private settings, each of them by its first seed."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import platform
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelOutput, LoggedModelStatus, Metric
from mlflow.models import Model, ModelSignature
from mlflow.types import Schema, TensorSpec

from dpsweep.accounting.mechanism.units import EXAMPLE
from dpsweep.accounting.records import TrialFiles, exists, list_files, read_bytes
from dpsweep.orchestration.comparison.entries import Metric as Measured
from dpsweep.orchestration.comparison.findings import Findings
from dpsweep.orchestration.comparison.metrics import final_metrics, metric
from dpsweep.orchestration.comparison.parameters import varying
from dpsweep.orchestration.comparison.settings import Setting, first_seed, setting_name
from dpsweep.orchestration.records.layout import SweepFiles
from dpsweep.orchestration.records.published import PublishedTrial
from dpsweep.orchestration.tracking.locations import MOST_PAGES, require_location
from dpsweep.orchestration.tracking.side_by_side import each
from dpsweep.orchestration.tracking.tracker import TrackingUnavailable
from dpsweep.workers.training.history import read_training_result

SWEEP, TRIAL, SETTING, KIND = "dpsweep.sweep", "dpsweep.trial_key", "dpsweep.setting", "dpsweep.kind"
COMPARED: Final = "view/"
"""Section of rounded numbers with short names. Without a section, ``epsilon`` is the series of epsilon so far."""
_LONGEST_NAME: Final = 250
_SECTION: Final = "dpsweep"
_WIDE_SECTION: Final = {
    "uuid": _SECTION,
    "name": "Comparison",
    "display": True,
    "isReordered": True,
    "columns": 2,
    "cardHeight": 420,
}
"""Section with two wide charts per row, because parallel coordinates are unreadable in MLflow's narrow cards."""
_CHOSEN: Final = ("spec.clipping.", "spec.optimizer.", "spec.sampling.", "spec.epochs")
_AXES: Final = 6
_CLAIMS: Final[tuple[str, ...]] = ("epsilon_kind", "epsilon_reasons", "unit")
MAX_CHARTED: Final = 1000
"""Maximum number of runs in a chart."""
MOST_MODELS: Final = 5
"""Number of settings, by each metric of the headline, that have a logged model; each takes about nine requests."""
LARGEST_MODEL: Final = 100 * 2**20
"""Maximum size of a model in bytes; larger ones are not copied to MLflow, where a tag names their location."""


def columns(found: Findings) -> tuple[str, ...]:
    """Return the columns of MLflow's table of runs in the shared view: what varies between settings, and what
    compares them.
    """
    known = {name for setting in found.settings for name in final_metrics(setting.trials[0])}
    # a baseline has no noise either
    baselines = ["tags.`private`", "params.`clipping`"] if len(found.private) < len(found.settings) else []
    shown = [short for name, short in short_names(found).items() if name in known or name == _corrected(found)]
    varied = [f"params.`{valid_name(name)}`" for name in _varied(found.private)]
    return (*dict.fromkeys([*baselines, *varied]), *(f"metrics.`{name}`" for name in shown))


def short_names(found: Findings) -> dict[str, str]:
    """Return the names of the numbers in `columns`, of one section, by the names of the metrics that compare settings.

    MLflow's table shows the first thirteen letters of each, with the prefix.
    """
    main, worst = found.main.name, found.worst_group
    names = {
        "privacy/epsilon": "epsilon",
        str(worst.tracked): worst.name,
        _corrected(found): f"corrected_{worst.name}",
        f"final/{main}": main,
        f"fairness/{main}_gap": f"gap_of_{main}",
        f"fairness/{main}_change": f"change_of_{main}",
    }
    return {name: f"{COMPARED}{short}" for name, short in names.items()}


def _corrected(found: Findings) -> str:
    return setting_value(found.worst_group.name)


def rounded(values: Mapping[str, float], short: Mapping[str, str]) -> dict[str, float]:
    """Return the ``values`` that have a short name, by it, to four decimals; epsilons are rounded up.

    >>> rounded({"privacy/epsilon": 2.99991, "final/accuracy": 0.93456}, {"privacy/epsilon": "view/epsilon"})
    {'view/epsilon': 3.0}
    """
    return {
        name: (math.ceil(1e4 * values[of]) / 1e4 if of == "privacy/epsilon" else round(values[of], 4))
        for of, name in short.items()
        if of in values and math.isfinite(values[of])
    }


def setting_value(name: str) -> str:
    """Return the name in MLflow of a worst-group metric of a whole setting, corrected for choosing the worst of noisy
    groups.
    """
    return f"setting/{name}_corrected"


def shared_view(sweep_id: str, found: Findings) -> str:
    """Return the state of MLflow's table of runs that compares the trials of the sweep, the best by worst-group metric
    first.

    Settings are ordered by the value that is corrected for choosing the worst of noisy groups. The run of the sweep
    itself, which has no row of the comparison, is left out.

    Its columns are what varies and the metrics that compare settings; its charts are parallel coordinates over what
    varies, and the worst group against the main score.
    """
    worst_group = found.worst_group
    return json.dumps(
        {
            "searchFilter": f"tags.`{SWEEP}` = '{sweep_id}' AND tags.`{KIND}` != 'sweep'",
            "orderByKey": f"metrics.`{setting_value(worst_group.name)}`",
            "orderByAsc": worst_group.better == "lower",
            "startTime": "ALL",
            "lifecycleFilter": "Active",
            "datasetsFilter": [],
            "modelVersionFilter": "All Runs",
            "selectedColumns": ["attributes.`Created`", *columns(found)],
            "compareRunSections": [_WIDE_SECTION],
            "isAccordionReordered": True,  # else MLflow sorts sections by name, and this one is not the first
            "runsHiddenMode": "SHOW_ALL",
            "compareRunCharts": _charts(_chosen(found.private), worst_group, found.main.name),
        }
    )


def _chosen(settings: Sequence[Setting]) -> list[str]:
    """Return the parameters of the parallel coordinates: labels and numbers that differ, such as a clipping bound.

    Only numbers that every setting has are used, because MLflow omits runs that lack one of the parameters.
    """
    differing = varying([setting.trials[0].params for setting in settings])
    names = dict.fromkeys(
        name
        for each in differing
        for name in each
        if all(isinstance(setting.trials[0].params.get(name), int | float) for setting in settings)
    )
    chosen = [*_varied(settings), *(name for name in names if name.startswith(_CHOSEN))]
    return [valid_name(name) for name in chosen[:_AXES]] or ["clipping"]  # MLflow draws none without a parameter


def _varied(settings: Sequence[Setting]) -> list[str]:
    """Return the labels that differ between private settings, but for the target epsilon, beside which the epsilon
    is shown.
    """
    differing = varying([setting.trials[0].setting for setting in settings])
    return [name for name in dict.fromkeys(name for each in differing for name in each) if name != "epsilon"]


def _charts(parameters: Sequence[str], worst_group: Measured, main: str) -> list[dict[str, Any]]:
    """Charts in the format in which MLflow's page of runs stores them."""
    common = {"metricSectionId": _SECTION, "deleted": False, "isGenerated": False, "runsCountToCompare": MAX_CHARTED}
    total, worst = f"final/{main}", str(worst_group.tracked)
    return [
        {
            **common,
            "uuid": "dpsweep-parallel",
            "type": "PARALLEL",
            "selectedParams": list(parameters),
            "selectedMetrics": ["privacy/epsilon", worst, total],
            "showAllRuns": True,
        },
        {
            **common,
            "uuid": "dpsweep-scatter",
            "type": "SCATTER",
            "xaxis": {"key": total, "type": "METRIC"},
            "yaxis": {"key": worst, "type": "METRIC"},
            "tooltipDisplayParams": list(parameters),
        },
    ]


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

    def record(self, found: Findings, runs: Mapping[str, str]) -> None:
        """Record the models of the best settings, with weights, and the numbers of all models that MLflow has.

        runs: run id by the key of the trial. The model of a setting is that of its first seed. It gets the means over
        seeds, such as ``setting/accuracy``, so that a search ordered by them finds settings and not lucky seeds.
        """
        known = self._known()
        chosen = {first_seed(setting).key for setting in best_settings(found)} | known.keys()
        shown = [
            (setting, first)
            for setting in found.private
            if (first := first_seed(setting)).key in chosen and first.key in runs
        ]

        def keep(pair: tuple[Setting, PublishedTrial]) -> None:
            setting, trial = pair
            self.keep(runs[trial.key], trial, final_metrics(trial) | _means(found, setting))

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
        token: str | None = None
        for _ in range(MOST_PAGES):
            page = self._client.search_logged_models(
                [self._experiment], f"tags.`{SWEEP}` = '{self._sweep_id}'", page_token=token
            )
            yield from page
            token = page.token
            if not token:
                return
        raise TrackingUnavailable("MLflow has no end of models of one sweep; look at what server it is")

    def _create(self, run: str, trial: PublishedTrial) -> LoggedModel:
        path, setting = self._files.trial(trial.key).model, setting_name(trial)
        tags = {SWEEP: self._sweep_id, TRIAL: trial.key, SETTING: setting[:5000], "path": path, **_claims(trial)}
        params = {str(name)[:250]: str(value)[:500] for name, value in {**trial.labels, **trial.params}.items()}
        return self._client.create_logged_model(self._experiment, None, run, tags, params, "dpsweep")

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
        own = (f"{files.code}/{place}" for place in list_files(files.code))
        uris = (files.model, files.inputs, files.spec, *own)
        contents = {uri.removeprefix(f"{files.root}/"): read_bytes(uri) for uri in uris}
        if sum(map(len, contents.values())) > LARGEST_MODEL:
            return
        trained = read_training_result(files.training)
        signature = ModelSignature(
            Schema([TensorSpec(np.dtype(trained.example_type), (-1, *trained.example_shape))]),
            Schema([TensorSpec(np.dtype(np.float32), (-1,) * (1 + trained.output_axes))]),
        )
        with tempfile.TemporaryDirectory() as folder:
            for name, content in contents.items():
                target = Path(folder, "trial", name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            described = Model(signature=signature, model_id=model_id)
            described.add_flavor(
                "python_function",
                loader_module="dpsweep.orchestration.tracking.loading",
                data="trial",
                python_version=platform.python_version(),
            )
            described.save(str(Path(folder, "MLmodel")))
            self._client.log_model_artifacts(model_id, folder)


def _numbers_of(model: LoggedModel) -> LoggedNumbers:
    claims = {name: model.tags[name] for name in _CLAIMS if name in model.tags}
    numbers = {metric.key: metric.value for metric in (model.metrics or [])}
    is_complete = model.status == LoggedModelStatus.READY
    return LoggedNumbers(model.model_id, model.artifact_location, {}, numbers, claims, is_complete)


def _claims(trial: PublishedTrial) -> dict[str, str]:
    """Tags that say what the epsilon of the trial claims, and why it is no guarantee."""
    kind, unit = (trial.privacy.kind, trial.privacy.unit) if trial.privacy else ("none", EXAMPLE.name)
    return dict(zip(_CLAIMS, (kind, ", ".join(trial.reasons), unit), strict=True))


def best_settings(found: Findings) -> list[Setting]:
    """Return the `MOST_MODELS` best private settings by the mean of each metric of the headline."""
    chosen: list[Setting] = []
    for name in found.headline:
        left = list(found.useful)
        for _ in range(MOST_MODELS):
            best = found.best(name, left)
            if best is None:
                break
            left.remove(best)
            chosen.append(best)
    return list({setting.name: setting for setting in chosen}.values())


def _means(found: Findings, setting: Setting) -> dict[str, float]:
    names = dict.fromkeys((*found.headline, f"worst_group_{found.main.name}", f"{found.main.name}_gap", "epsilon"))
    means = {name: setting.over_seeds(metric(name).value) for name in names}
    values = {f"setting/{name}": mean.mean for name, mean in means.items() if mean is not None}
    worst = found.value(setting, found.worst_group.name)
    return values | ({setting_value(found.worst_group.name): worst} if math.isfinite(worst) else {})


@functools.lru_cache(maxsize=4096)
def valid_name(text: str) -> str:
    """Return ``text`` as a valid MLflow name of a metric or parameter; a changed name gets a hash to keep it unique."""
    parts = re.sub(r"[^\w.\- /]", "_", text).split("/")
    name = "/".join(part if part.strip(".") else "_" * max(len(part), 1) for part in parts)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return text if name == text[:_LONGEST_NAME] else f"{name[: _LONGEST_NAME - 9]}.{digest}"
