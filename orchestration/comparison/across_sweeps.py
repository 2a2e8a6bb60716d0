"""Comparison of several sweeps: settings with the same parameters are matched, whatever their labels. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from accounting.errors import InvalidInput
from orchestration.comparison.entries import Metric, MetricTable
from orchestration.comparison.ledger import composed
from orchestration.comparison.metrics import columns
from orchestration.comparison.parameters import asked, varying
from orchestration.comparison.record import SweepRecord
from orchestration.comparison.settings import Setting, setting_name, shown_over_seeds
from orchestration.records.published import NON_PRIVATE, Label, PublishedTrial, task_of
from orchestration.records.release_modes import release_mode
from orchestration.records.states import TrialState
from orchestration.sweeps.combinations import BASELINE
from orchestration.sweeps.grid import GridPoint
from workers.spec import SPEED
from workers.tasks import task_called

_NO_SETTING = ("seed", *(f"execution.{name}" for name in SPEED))
_Identity = tuple[tuple[str, Label], ...]
_BySweep = Mapping[str, list[PublishedTrial]]
"""Trials of one setting, by the folder of their sweep."""


@dataclass(frozen=True)
class Compared:
    """A setting as one sweep ran it. folder: folder of the sweep."""

    folder: str
    setting: Setting

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with every metric that the report shows for settings."""
        columns = _shown(self.setting.trials)
        found = {metric.name: self.setting.over_seeds(metric.value) for metric in columns}
        shown = {metric.name: shown_over_seeds(metric, self.setting) for metric in columns}
        cost = self.setting.composition
        return {
            "sweep": self.folder,
            "seeds": [trial.labels["seed"] for trial in self.setting.trials],
            "trials": [trial.key for trial in self.setting.trials],
            "composed": cost and cost.as_dict(),
            "metrics": {
                name: {"shown": shown[name], **(asdict(spread) if spread else {})} for name, spread in found.items()
            },
        }


@dataclass(frozen=True)
class MatchedSetting:
    """Finished trials of all sweeps with the same parameters.

    parameters: the parameters that vary between the private settings, or between the baselines. lines: the setting as
    each sweep ran it.
    """

    name: str
    parameters: Mapping[str, Label]
    lines: tuple[Compared, ...]


@dataclass(frozen=True)
class Comparison:
    """The output of `dpsweep compare`.

    sweeps: names by folder. differences: reasons why numbers of these sweeps do not compare, and trials that are left
    out. trials: all trials of all sweeps, whose composed cost is the cost of publishing everything; empty if the sweeps
    have different data. is_sensitive: whether a sweep shows exact statistics of its training examples.
    """

    sweeps: Mapping[str, str]
    differences: tuple[str, ...]
    settings: tuple[MatchedSetting, ...]
    trials: tuple[PublishedTrial, ...]
    is_sensitive: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        whole = composed(self.trials)
        settings = [
            {"name": each.name, "parameters": dict(each.parameters), "sweeps": [line.as_dict() for line in each.lines]}
            for each in self.settings
        ]
        return {
            "sweeps": dict(self.sweeps),
            "differences": list(self.differences),
            "composed": whole and whole.as_dict(),
            "settings": settings,
        }


def compare(records: Mapping[str, SweepRecord]) -> Comparison:
    """Compare sweeps, given by folder. Raises: InvalidInput for fewer than two, and for two copies of one sweep."""
    if len(records) < 2:
        raise InvalidInput("a comparison needs two sweeps or more; give the folder of each once")
    _require_different(records)
    found: dict[_Identity, dict[str, list[PublishedTrial]]] = {}
    for folder, record in records.items():
        for point in record.points:
            trial = record.trial(point)
            if trial.state is TrialState.FINISHED:
                found.setdefault(_identity(point, record), {}).setdefault(folder, []).append(trial)
    data = list(_differences(records, "data", _data))
    return Comparison(
        sweeps={folder: record.sweep.name for folder, record in records.items()},
        differences=(
            *data,
            *_differences(records, "δ", _delta),
            *_differences(records, "adjacency", _adjacency),
            *_stopped(records),
        ),
        settings=(*_matched(found, is_private=False), *_matched(found, is_private=True)),
        trials=() if data else tuple(trial for record in records.values() for trial in record.data().trials),
        is_sensitive=any(release_mode(record.disclosure).is_sensitive for record in records.values()),
    )


def _require_different(records: Mapping[str, SweepRecord]) -> None:
    seen: dict[str, str] = {}
    for folder, record in records.items():
        other = seen.setdefault(record.manifest.sweep_id, folder)
        if other != folder:
            raise InvalidInput(f"{other} and {folder} hold the same sweep; give one of them")


def _identity(point: GridPoint, record: SweepRecord) -> _Identity:
    """All parameters of a trial except its seed and execution speed options; equal identities are one setting."""
    flat = {name: value for name, value in asked(point).items() if name not in _NO_SETTING}
    if point.is_private:
        release = record.sweep.release
        flat |= {"accountant": record.sweep.privacy.accountant, "release": release.name}
        flat |= {f"release.{name}": str(value) for name, value in release.params.items()}
    return tuple(sorted(flat.items()))


def _matched(found: Mapping[_Identity, _BySweep], is_private: bool) -> Iterator[MatchedSetting]:
    """The private settings or the baselines, each named by what distinguishes it from the others."""
    chosen = [identity for identity in found if (dict(identity)["clipping.name"] != BASELINE) == is_private]
    for identity, parameters in zip(chosen, varying([dict(identity) for identity in chosen]), strict=True):
        lines = tuple(
            Compared(folder, Setting(setting_name(trials[0]), trials[0].setting, tuple(trials)))
            for folder, trials in found[identity].items()
        )
        first = str(dict(identity)["clipping.name"]) if is_private else NON_PRIVATE
        others = {name: value for name, value in parameters.items() if name != "clipping.name"}
        yield MatchedSetting(", ".join([first, *itertools.starmap(_phrase, others.items())]), parameters, lines)


def _phrase(name: str, value: Label) -> str:
    spoken = _spoken(name)
    return f"{spoken} {value:g}" if isinstance(value, float) else f"{spoken} {value}"


def _spoken(name: str) -> str:
    return name.removesuffix(".name").replace(".params.", " ").replace("_", " ")


def _differences(records: Mapping[str, SweepRecord], what: str, of: Callable[[SweepRecord], str]) -> Iterator[str]:
    """A sentence if the sweeps differ in ``what``, on which every number depends. of: its value for a sweep."""
    found = {folder: of(record) for folder, record in records.items()}
    if len(set(found.values())) > 1:
        each = "; ".join(f"{records[folder].sweep.name} in {folder}: {value}" for folder, value in found.items())
        yield f"not the same {what}, so numbers of one sweep do not compare with those of another: {each}"


def _stopped(records: Mapping[str, SweepRecord]) -> Iterator[str]:
    for folder, record in records.items():
        keys = [trial.key for trial in record.data().trials if trial.state is TrialState.STOPPED]
        if keys:
            yield f"left out, because a scheduler stopped them early: {', '.join(keys)} in {folder}"


def _data(record: SweepRecord) -> str:
    """Specifications of all data sets, and their training set sizes as found by finished trials."""
    specs = dict.fromkeys(_spelt(asdict(data)) for data in record.sweep.data)
    sizes = sorted({
        f"{trial.dataset.name} of {trial.dataset.profile['train_size']}"
        for trial in record.data().trials if trial.dataset is not None
    })  # fmt: skip
    return ", ".join([*sorted(specs), *(f"{size} training examples" for size in sizes)])


def _spelt(data: Mapping[str, Any]) -> str:
    chosen = (f"{name} {value}" for name, value in data.items() if name != "name" and value not in ({}, 0.0))
    return f"{data['name']} ({', '.join(chosen)})"


def _delta(record: SweepRecord) -> str:
    return f"{record.sweep.privacy.delta:g}"


def _adjacency(record: SweepRecord) -> str:
    found = {trial.privacy.adjacency for trial in record.data().trials if trial.privacy and trial.privacy.is_private}
    return ", ".join(sorted(found)) or "none"


def _shown(trials: Iterable[PublishedTrial]) -> tuple[Metric, ...]:
    """Metrics of settings, with the main score as worst-group metric, whichever metric each sweep uses."""
    task = task_of(trials)
    return columns(MetricTable.SETTINGS, f"worst_group_{task_called(task).main}", task)


def shown_metrics(found: Comparison) -> tuple[Metric, ...]:
    """The metrics of all compared settings. Sweeps with different tasks have different data, which is reported."""
    settings = (line.setting for each in found.settings for line in each.lines)
    return tuple(dict.fromkeys(metric for setting in settings for metric in _shown(setting.trials)))


def cells(line: Compared, found: Comparison) -> Sequence[str]:
    """The table cells of one sweep's setting, after its name and sweep: number of seeds, composed ε, every metric."""
    return (
        str(len(line.setting.trials)),
        line.setting.composed_cost,
        *(shown_over_seeds(metric, line.setting) for metric in shown_metrics(found)),
    )


def heads(found: Comparison) -> tuple[str, ...]:
    """Headings of the table: setting, sweep, and the columns that `cells` fills."""
    return ("Setting", "Sweep", "Seeds", "Composed ε", *(metric.heading for metric in shown_metrics(found)))
