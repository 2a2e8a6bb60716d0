"""The comparison of a sweep's settings as plain values that MLflow shows. Pure; does not import MLflow.

Another process can make them: they hold neither resampled outcomes nor functions.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dpsweep.orchestration.comparison.findings import Findings
from dpsweep.orchestration.comparison.metric_types import Metric as Measured
from dpsweep.orchestration.comparison.metrics import final_metrics, metric
from dpsweep.orchestration.comparison.parameters import varying
from dpsweep.orchestration.comparison.settings import Setting
from dpsweep.orchestration.comparison.statistics import Spread, spread
from dpsweep.orchestration.store.published import PublishedTrial

SWEEP, TRIAL, SETTING, KIND = "dpsweep.sweep", "dpsweep.trial_key", "dpsweep.setting", "dpsweep.kind"
COMPARED: Final = "view/"
"""Section of rounded numbers with short names. Without a section, ``epsilon`` is the series of epsilon so far."""
CHANGE: Final = f"{COMPARED}change_of_"
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
MAX_CHARTED: Final = 1000
"""Maximum number of runs in a chart."""
MOST_MODELS: Final = 5
"""Number of settings, by each metric of the headline, that have a logged model; each takes about nine requests."""


@dataclass(frozen=True)
class TrackedComparison:
    """The comparison of settings as a tracker records it.

    `numbers`: by trial, the numbers by which its setting is ordered and shown, under their names in MLflow.
    `short`: as `short_names`.
    `means`: by the first trial of each private setting, the means over its seeds.
    `best_models`: first trials of the settings whose models are logged.
    `best`: name of the best private setting, "" for none;
    `best_means`: the means of all its numbers.
    `view`: the state of MLflow's table of runs, without the filter of the sweep.
    `knows_cost`: whether a baseline tells what privacy costs, so that changes against it may be shown.
    """

    numbers: Mapping[str, Mapping[str, float]]
    short: Mapping[str, str]
    means: Mapping[str, Mapping[str, float]]
    best_models: frozenset[str]
    best: str
    best_means: Mapping[str, float]
    view: Mapping[str, Any]
    knows_cost: bool


def comparison(found: Findings) -> TrackedComparison:
    """Return the comparison of the settings of a sweep."""
    best = found.best(found.main.name)
    return TrackedComparison(
        _numbers(found),
        short_names(found),
        {setting.first_seed.key: _means(found, setting) for setting in found.private},
        frozenset(setting.first_seed.key for setting in best_settings(found)),
        "" if best is None else best.name,
        {} if best is None else {name: over.mean for name, over in spreads(best.trials).items()},
        _view(found),
        not found.unknown_cost,
    )


NOTHING_COMPARED: Final = TrackedComparison({}, {}, {}, frozenset(), "", {}, {}, False)


def _numbers(found: Findings) -> dict[str, dict[str, float]]:
    """By trial, the columns of the shared view: the `Findings.value` of its setting, by which runs are ordered, and
    what compares the trial, under short names."""
    name, short = found.worst_group.name, short_names(found)
    values: dict[str, dict[str, float]] = {}
    for setting in found.settings:
        value = found.value(setting, name)
        of_setting = {setting_value(name): value} if math.isfinite(value) else {}
        for trial in setting.trials:
            values[trial.key] = {**of_setting, **rounded_values({**final_metrics(trial), **of_setting}, short)}
    return values


def columns(found: Findings) -> tuple[str, ...]:
    """Return the columns of MLflow's table of runs in the shared view: what varies between settings, the seeds, and
    what compares them. Names of runs end in the seed, which MLflow cuts off; a mean has none.
    """
    known = {name for setting in found.settings for name in final_metrics(setting.trials[0])}
    # a baseline has no noise either
    baselines = ["tags.`private`", "params.`clipping`"] if len(found.private) < len(found.settings) else []
    shown = [short for name, short in short_names(found).items() if name in known or name == _corrected(found)]
    varied = [f"params.`{valid_name(name)}`" for name in (*_varied(found.private), *_seeds(found.settings))]
    return (*dict.fromkeys([*baselines, *varied]), *(f"metrics.`{name}`" for name in shown))


def short_names(found: Findings) -> dict[str, str]:
    """Return the names of the numbers in `columns`, of one section, by the names of the metrics that compare settings.

    MLflow's table shows the first thirteen letters of each, with the prefix.
    """
    main, worst = found.main.name, found.worst_group
    changes = {} if found.unknown_cost else {f"fairness/{main}_change": f"{CHANGE}{main}"}
    return {
        "privacy/epsilon": f"{COMPARED}epsilon",
        str(worst.tracked): f"{COMPARED}{worst.name}",
        _corrected(found): f"{COMPARED}corrected_{worst.name}",
        f"final/{main}": f"{COMPARED}{main}",
        f"fairness/{main}_gap": f"{COMPARED}gap_of_{main}",
        **changes,
    }


def _corrected(found: Findings) -> str:
    return setting_value(found.worst_group.name)


def rounded_values(values: Mapping[str, float], short: Mapping[str, str]) -> dict[str, float]:
    """Return the ``values`` that have a short name, by it, to four decimals; epsilons are rounded up.

    >>> rounded_values({"privacy/epsilon": 2.99991, "final/accuracy": 0.93456}, {"privacy/epsilon": "view/epsilon"})
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


def shared_view(sweep_id: str, compared: TrackedComparison) -> str:
    """Return the state of MLflow's table of runs that compares the trials of the sweep, the best by worst-group metric
    first.

    The run of the sweep itself, which has no row of the comparison, is left out.
    """
    chosen = f"tags.`{SWEEP}` = '{sweep_id}' AND tags.`{KIND}` != 'sweep'"
    return json.dumps({"searchFilter": chosen, **compared.view})


def _view(found: Findings) -> dict[str, Any]:
    """Return the rest of `shared_view`: columns for the parameters that vary and for the metrics that compare settings,
    and charts: parallel coordinates over these parameters, and the worst group against the main score.

    Settings are ordered by the value that is corrected for choosing the worst of noisy groups.
    """
    worst_group = found.worst_group
    return {
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


def _seeds(settings: Sequence[Setting]) -> list[str]:
    """Return the labels that differ between trials of one setting."""
    differing = [each for setting in settings for each in varying([trial.labels for trial in setting.trials])]
    return list(dict.fromkeys(name for each in differing for name in each))


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


def spreads(trials: Sequence[PublishedTrial]) -> dict[str, Spread]:
    """Return the mean and deviation of every final metric that all of these trials have."""
    found = [final_metrics(trial) for trial in trials]
    shared = [name for name in found[0] if all(name in other for other in found)]
    spreads = {name: spread(each[name] for each in found) for name in shared}
    return {name: over for name, over in spreads.items() if over is not None}
