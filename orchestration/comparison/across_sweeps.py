"""Comparison of several sweeps: settings with the same parameters are matched, whatever their labels. Pure."""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from dpsweep.accounting.errors import InvalidInput, count_of
from dpsweep.orchestration.comparison.evidence import Evidence
from dpsweep.orchestration.comparison.findings import findings
from dpsweep.orchestration.comparison.formats import MISSING
from dpsweep.orchestration.comparison.ledger import composed
from dpsweep.orchestration.comparison.metric_types import Metric, MetricTable
from dpsweep.orchestration.comparison.metrics import columns
from dpsweep.orchestration.comparison.parameters import (
    asked,
    flattened,
    labels_of_parameters,
    parameter_in_words,
    value_text,
    varying,
)
from dpsweep.orchestration.comparison.record import SweepRecord, told
from dpsweep.orchestration.comparison.sanity import without_changes
from dpsweep.orchestration.comparison.settings import Setting, named, setting_name, shown_over_seeds
from dpsweep.orchestration.store.published import (
    Label,
    PublishedSweep,
    PublishedTrial,
    TrialState,
    task_of,
)
from dpsweep.orchestration.store.release_modes import release_mode
from dpsweep.orchestration.sweeps.grid import BASELINE, GridPoint
from dpsweep.workers.spec import SPEED, DataSpec
from dpsweep.workers.tasks import task_called

if TYPE_CHECKING:
    import pandas as pd

_Settings = Mapping[str, Sequence[Mapping[str, Label]]]
"""The parameters of the settings of each sweep, by its folder."""


@dataclass(frozen=True)
class BetweenSweeps:
    """A parameter in which sweeps differ, although no setting of one sweep differs from another one of it.

    `values`: by the folder of each sweep; several where the baselines have another value than the private settings,
    none where no setting has the parameter.
    """

    name: str
    values: Mapping[str, tuple[Label, ...]]

    def cells(self) -> tuple[str, ...]:
        """Return the table cells of the parameter: its name, and its value in each sweep."""
        return (
            parameter_in_words(self.name),
            *(", ".join(map(value_text, each)) or MISSING for each in self.values.values()),
        )


def between_sweeps(kinds: Sequence[_Settings]) -> tuple[BetweenSweeps, ...]:
    """Return the parameters in which sweeps differ, but no two settings of one kind in the same sweep.

    kinds: the settings to compare with each other: the private ones, and the baselines.
    """
    names = dict.fromkeys(name for kind in kinds for name in _names(kind))
    folders = dict.fromkeys(folder for kind in kinds for folder in kind)

    def values(name: str, folder: str) -> tuple[Label, ...]:
        found = (setting[name] for kind in kinds for setting in kind.get(folder, ()) if name in setting)
        return tuple(dict.fromkeys(found))

    return tuple(BetweenSweeps(name, {folder: values(name, folder) for folder in folders}) for name in names)


def _names(settings: _Settings) -> list[str]:
    differ = dict.fromkeys(
        name for found in varying([each for of_sweep in settings.values() for each in of_sweep]) for name in found
    )
    within = {name for of_sweep in settings.values() for found in varying(list(of_sweep)) for name in found}
    return [name for name in differ if name not in within]


def phrase(name: str, value: Label) -> str:
    """Return a parameter as words: ``clipping bound 0.5``."""
    return f"{parameter_in_words(name)} {value_text(value)}"


_NO_SETTING = ("seed", "data.split_seed", *(f"execution.{name}" for name in SPEED))
_Identity = tuple[tuple[str, Label], ...]
_CLIPPING, _SCHEDULE = "clipping.name", "noise.schedule.name"
_KEYS = {"noise.schedule": "noise"}
"""Key of the sweep file, where it differs from the name of the component's parameter."""
_BySweep = Mapping[str, list[PublishedTrial]]
"""Trials of one setting, by the folder of their sweep."""


@dataclass(frozen=True)
class SweepSetting:
    """A setting as one sweep ran it. folder: folder of the sweep. worst_group: the metric of groups by which the sweep
    compares its settings."""

    folder: str
    setting: Setting
    worst_group: str

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Return the metrics of settings.

        With several groups they include the worst one by the main score, as in every sweep, and by this sweep's metric.
        """
        trials = self.setting.trials
        groups = (f"worst_group_{name}" for name in (task_called(task_of(trials)).main, self.worst_group))
        return tuple(dict.fromkeys(each for name in groups for each in columns(MetricTable.SETTINGS, name, trials)))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with every metric that the report shows for settings."""
        found = {metric.name: self.setting.over_seeds(metric.value) for metric in self.metrics}
        texts = {metric.name: shown_over_seeds(metric, self.setting) for metric in self.metrics}
        cost = self.setting.composition
        return {
            "sweep": self.folder,
            "seeds": [trial.labels["seed"] for trial in self.setting.trials],
            "trials": [trial.key for trial in self.setting.trials],
            "composed": cost and cost.as_dict(),
            "reasons": list(self.setting.reasons),
            "metrics": {
                name: {"shown": texts[name], **(asdict(spread) if spread else {})} for name, spread in found.items()
            },
        }


@dataclass(frozen=True)
class MatchedSetting:
    """Finished trials of all sweeps with the same parameters.

    `parameters`: the parameters that vary between the private settings, or between the baselines.
    `name`: all of them in words.
    `short_name`: without those in which only whole sweeps differ (`BetweenSweeps`).
    `lines`: the setting as each sweep ran it.
    """

    name: str
    short_name: str
    parameters: Mapping[str, Label]
    lines: tuple[SweepSetting, ...]


@dataclass(frozen=True)
class Comparison:
    """The output of `dpsweep compare`.

    `sweeps`: names by folder.
    `differences`: what the numbers do not promise, reasons why they do not compare, and trials that are left out.
    `between`: parameters in which whole sweeps differ.
    `trials`: all trials of all sweeps, whose composed cost is the cost of publishing everything; empty if the sweeps
    have different data.
    `is_sensitive`: whether a sweep shows exact statistics of its training examples.
    """

    sweeps: Mapping[str, str]
    differences: tuple[str, ...]
    between: tuple[BetweenSweeps, ...]
    settings: tuple[MatchedSetting, ...]
    trials: tuple[PublishedTrial, ...]
    is_sensitive: bool

    def __repr__(self) -> str:
        sweeps, settings = count_of(len(self.sweeps), "sweep"), count_of(len(self.settings), "setting")
        return f"<Comparison of {sweeps}: {settings}; see table()>"

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{html.escape(each)}</p>" for each in self.differences)
        return f"{self.table().to_html(index=False, escape=True)}{notes}"

    def table(self) -> pd.DataFrame:
        """Return one row for each sweep of each setting, with the texts that `dpsweep compare` prints."""
        import pandas as pd

        return pd.DataFrame(rows_of(self), columns=list(heads(self)))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        whole = composed(self.trials)
        settings = [
            {"name": each.name, "parameters": dict(each.parameters), "sweeps": [line.as_dict() for line in each.lines]}
            for each in self.settings
        ]
        return {
            "sweeps": dict(self.sweeps),
            "differences": list(self.differences),
            "between_sweeps": {
                each.name: {folder: list(values) for folder, values in each.values.items()} for each in self.between
            },
            "composed": whole and whole.as_dict(),
            "settings": settings,
        }


def compare(records: Mapping[str, SweepRecord], evidence: Mapping[str, Evidence]) -> Comparison:
    """Compare sweeps, given by folder. Raises: InvalidInput for fewer than two, and for two copies of one sweep.

    Changes against a baseline that is no reference (`sanity.why_cost_is_unknown`) are left out, and said to be.
    """
    if len(records) < 2:
        raise InvalidInput("a comparison needs two sweeps or more; give the folder of each once")
    _require_different(records)
    published = {folder: record.data() for folder, record in records.items()}
    costs = {folder: findings(each, evidence[folder]).unknown_cost for folder, each in published.items()}
    finished = [
        (folder, _parameters(point, record), *(without_changes([trial]) if costs[folder] else [trial]))
        for folder, record in records.items()
        for point, trial in zip(record.points, published[folder].trials, strict=True)
        if trial.state is TrialState.FINISHED
    ]
    written = {(name, _component(name, given)) for _, given, _ in finished for name in given}
    found: dict[_Identity, dict[str, list[PublishedTrial]]] = {}
    for folder, parameters, trial in finished:
        identity = tuple(sorted({**_defaults(written, parameters), **parameters}.items()))
        found.setdefault(identity, {}).setdefault(folder, []).append(trial)
    data = _data_differences(records, published)
    baselines = {key: of for key, of in found.items() if dict(key)[_CLIPPING] == BASELINE}
    private = {key: of for key, of in found.items() if key not in baselines}
    worst_groups = {folder: record.worst_group for folder, record in records.items()}
    between = between_sweeps([_by_sweep(private), _by_sweep(baselines)])
    return Comparison(
        sweeps={folder: record.sweep.name for folder, record in records.items()},
        differences=(
            *_estimates(published),
            *data,
            *_differences(records, "δ", lambda folder: f"{records[folder].sweep.privacy.delta:g}"),
            *_differences(records, "adjacency", lambda folder: _adjacency(published[folder])),
            *_differences(records, "unit", lambda folder: records[folder].sweep.privacy.unit),
            *(f"{folder}: {why}" for folder, why in costs.items() if why),
            *_stopped(published),
            *(f"{folder} has no finished trial" for folder in records if folder not in {each[0] for each in finished}),
        ),
        between=between,
        settings=_beside(
            [
                *_matched(baselines, True, between, worst_groups),
                *_matched(private, False, between, worst_groups),
            ]
        ),
        trials=() if data else _together([each.trials for each in published.values()]),
        is_sensitive=any(release_mode(record.disclosure).is_sensitive for record in records.values()),
    )


def _together(sweeps: Sequence[Sequence[PublishedTrial]]) -> tuple[PublishedTrial, ...]:
    """Return the trials of all sweeps. Results of one may have decided that another with private trials was run."""
    is_private = [any(trial.attempts for trial in trials) for trials in sweeps]
    trials = (trial for each in sweeps for trial in each)
    return tuple(replace(trial, is_added=True) for trial in trials) if sum(is_private) > 1 else tuple(trials)


def _require_different(records: Mapping[str, SweepRecord]) -> None:
    seen: dict[str, str] = {}
    for folder, record in records.items():
        other = seen.setdefault(record.manifest.sweep_id, folder)
        if other != folder:
            raise InvalidInput(f"{other} and {folder} hold the same sweep; give one of them")


def _parameters(point: GridPoint, record: SweepRecord) -> dict[str, Label]:
    """Return all parameters of a trial except its seed and execution speed options, as its sweep gives them.

    Values that a private selection chose are a result of each seed, so its candidates replace them.
    """
    found = {name: value for name, value in asked(point).items() if name not in _NO_SETTING}
    tune = record.sweep.tune
    if tune is not None and tune.is_selection:
        tried = {name: tune.parameters.get(_place(name)) for name in found}
        found |= {name: f"one of {str(of).strip('[]')}" for name, of in tried.items() if of is not None}
        found.pop("data.part.place", None)
    if point.is_private:
        release = record.sweep.release
        found |= {"accountant": record.sweep.privacy.accountant, "release.name": release.name}
        found |= {f"release.params.{name}": str(value) for name, value in release.params.items()}
    return found


def _place(parameter: str) -> str:
    """Return the place of a parameter in a section ``tune``, such as ``clipping.bound``."""
    return parameter.replace("noise.schedule.", "noise.").replace(".params.", ".")


def _component(parameter: str, given: Mapping[str, Label]) -> str:
    """Return the name of the component to which a parameter of a trial belongs; "" if to none."""
    place, is_own, _ = parameter.partition(".params.")
    return str(given.get(f"{place}.name", "")) if is_own else ""


def _defaults(written: Set[tuple[str, str]], given: Mapping[str, Label]) -> dict[str, Label]:
    """Return the defaults of those parameters that a trial does not give, while others give the same component some.

    So ``flat`` is the same setting as ``{name: flat, bound: 1.0}``, and is called by its bound beside another.
    written: parameters of all trials, each with the name of its component.
    """
    found: dict[str, Label] = {}
    for name, component in written:
        if name in given or not component or component != _component(name, given):
            continue
        from dpsweep.orchestration.sweeps.components import COMPONENTS, parameters_of  # late: it loads torch

        place, _, param = name.partition(".params.")
        make = COMPONENTS.get(_KEYS.get(place, place), {}).get(component)
        for each in parameters_of(make) if make else ():
            if each.name == param and isinstance(each.default, str | int | float):
                found[name] = each.default
    return found


def _by_sweep(found: Mapping[_Identity, _BySweep]) -> dict[str, list[dict[str, Label]]]:
    """Return the parameters of the settings of each sweep, without clipping method and schedule, after which every
    setting is called.
    """
    sweeps: dict[str, list[dict[str, Label]]] = {}
    for identity, trials in found.items():
        named = {name: value for name, value in identity if name not in (_CLIPPING, _SCHEDULE)}
        for folder in trials:
            sweeps.setdefault(folder, []).append(named)
    return sweeps


def _matched(
    found: Mapping[_Identity, _BySweep],
    is_baseline: bool,
    between: Sequence[BetweenSweeps],
    worst_groups: Mapping[str, str],
) -> Iterator[MatchedSetting]:
    """Yield the settings, each named after the parameters that distinguish it from the others.

    `is_baseline`: of all of them. `worst_groups`: `SweepSetting.worst_group` by folder.
    """
    of_sweeps = {each.name for each in between}
    identities = [dict(key) for key in found]
    names = _names_of(identities, is_baseline)
    within = [{name: value for name, value in each.items() if name not in of_sweeps} for each in identities]
    every = zip(found.values(), varying(identities), names, _names_of(within, is_baseline), strict=True)
    for trials, parameters, name, short_name in every:
        lines = tuple(
            SweepSetting(
                folder, Setting(setting_name(of_sweep[0]), of_sweep[0].setting, tuple(of_sweep)), worst_groups[folder]
            )
            for folder, of_sweep in trials.items()
        )
        yield MatchedSetting(name, short_name, parameters, lines)


def _beside(settings: Sequence[MatchedSetting]) -> tuple[MatchedSetting, ...]:
    """Return the settings in their order, but those of one short name beside each other.

    Only whole sweeps differ in them, as a tuning and its sweep do in what they release.
    """
    by_name: dict[str, list[MatchedSetting]] = {}
    for each in settings:
        by_name.setdefault(each.short_name, []).append(each)
    return tuple(itertools.chain.from_iterable(by_name.values()))


def _names_of(settings: Sequence[Mapping[str, Label]], is_baseline: bool) -> list[str]:
    """Return the name of each setting, as a report of all of them would call it."""
    unlike = {_CLIPPING, _SCHEDULE} if is_baseline else set()
    given = [{name: value for name, value in each.items() if name not in unlike} for each in settings]
    return [named(labels, is_baseline) for labels in labels_of_parameters(given)]


def _differences(records: Mapping[str, SweepRecord], what: str, of: Callable[[str], str]) -> Iterator[str]:
    """Yield a sentence if the sweeps differ in ``what``, on which every number depends.

    of: its value by folder; "" for a sweep that has none, as its private trials have failed.
    """
    found = {folder: value for folder in records if (value := of(folder))}
    if len(set(found.values())) > 1:
        each = "; ".join(f"{records[folder].sweep.name} in {folder}: {value}" for folder, value in found.items())
        yield f"not the same {what}, so numbers of one sweep do not compare with those of another: {each}"


def _estimates(published: Mapping[str, PublishedSweep]) -> Iterator[str]:
    """Yield a sentence for each reason why epsilons are no guarantees, with the sweeps unless it holds for all."""
    by_sweep = {folder: told(each.trials) for folder, each in published.items()}
    for sentence in dict.fromkeys(itertools.chain.from_iterable(by_sweep.values())):
        folders = [folder for folder, sentences in by_sweep.items() if sentence in sentences]
        yield sentence if len(folders) == len(published) else f"{', '.join(folders)}: {sentence}"


def _stopped(published: Mapping[str, PublishedSweep]) -> Iterator[str]:
    for folder, data in published.items():
        keys = [trial.key for trial in data.trials if trial.state is TrialState.STOPPED]
        if keys:
            yield f"left out, because a scheduler stopped them early: {', '.join(keys)} in {folder}"


def _data_differences(records: Mapping[str, SweepRecord], published: Mapping[str, PublishedSweep]) -> list[str]:
    """Return a sentence if the sweeps specify other data, or found other numbers of training examples in the same.

    Data that no trial of a sweep has finished with have no known size there, and do not differ by it.
    """
    specs = {folder: sorted({*map(_spelt, record.sweep.data)}) for folder, record in records.items()}
    sizes = {
        folder: {
            each.digest: f"{each.name} of {each.profile['train_size']} training examples"
            for trial in data.trials
            if (each := trial.dataset) is not None
        }
        for folder, data in published.items()
    }
    found = {(digest, size) for known in sizes.values() for digest, size in known.items()}
    is_same = len({*map(tuple, specs.values())}) == 1 and len(dict(found)) == len(found)
    words = {folder: ", ".join([*specs[folder], *sorted({*sizes[folder].values()})]) for folder in records}
    return [] if is_same else list(_differences(records, "data", words.__getitem__))


def _spelt(data: DataSpec) -> str:
    given = {name.removeprefix("params."): value for name, value in flattened(asdict(data)).items() if value != 0}
    return f"{given.pop('name')} ({', '.join(itertools.starmap(phrase, given.items()))})"


def _adjacency(data: PublishedSweep) -> str:
    found = {trial.privacy.adjacency for trial in data.trials if trial.privacy and trial.privacy.is_private}
    return ", ".join(sorted(found))


def shown_metrics(found: Comparison) -> tuple[Metric, ...]:
    """Return the metrics of all compared settings. Sweeps with different tasks have different data, which is
    reported.
    """
    lines = (line for each in found.settings for line in each.lines)
    return tuple(dict.fromkeys(metric for line in lines for metric in line.metrics))


def headings(found: Comparison) -> tuple[str, ...]:
    """Return the headings of `shown_metrics`; of sweeps with different tasks, those of one task name it."""
    metrics = shown_metrics(found)
    if len({metric.task for metric in metrics if metric.task}) < 2:
        return tuple(metric.heading for metric in metrics)
    return tuple(f"{each.heading} ({each.task.replace('_', ' ')})" if each.task else each.heading for each in metrics)


def row_cells(line: SweepSetting, found: Comparison) -> Sequence[str]:
    """Return the table cells of one sweep's setting, after its name and sweep: number of seeds, composed ε, every
    metric.
    """
    return (
        str(len(line.setting.trials)),
        line.setting.composed_cost,
        *(shown_over_seeds(metric, line.setting) for metric in shown_metrics(found)),
    )


def rows_of(found: Comparison) -> list[tuple[str, ...]]:
    """Return the rows of the table under `heads`."""
    names = sweep_names(found)
    return [
        (each.short_name, names[line.folder], *row_cells(line, found)) for each in found.settings for line in each.lines
    ]


def heads(found: Comparison) -> tuple[str, ...]:
    """Return headings of the table: setting, sweep, and the columns that `row_cells` fills."""
    return ("Setting", "Sweep", "Seeds", "Composed ε", *headings(found))


def sweep_names(found: Comparison) -> dict[str, str]:
    """Return what to call each sweep in a table, by its folder: its name, or the folder where several have that
    name.
    """
    names = list(found.sweeps.values())
    return {folder: name if names.count(name) == 1 else folder for folder, name in found.sweeps.items()}


def between_heads(found: Comparison) -> tuple[str, ...]:
    """Return headings of the table of parameters in which whole sweeps differ (`BetweenSweeps.cells`)."""
    return ("What differs between the sweeps", *sweep_names(found).values())
