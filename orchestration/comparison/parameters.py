"""Parameters of a trial as flat names and values, by which MLflow can filter and compare runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from dpsweep.accounting.records.sealed import checksum
from dpsweep.orchestration.store.published import RUNS, Label, PublishedDataset, PublishedTrial
from dpsweep.orchestration.sweeps.grid import GridPoint
from dpsweep.orchestration.sweeps.identity import labelled
from dpsweep.workers.spec import Component, DataSpec, TrialSpec
from dpsweep.workers.training.history import TrainingResult


def parameters(spec: TrialSpec, labels: Mapping[str, Label]) -> dict[str, Label]:
    """Return the trial's specification as flat parameters ``spec.*``, without those that its labels already give.

    MLflow's comparison page preselects the first three parameters that differ, in alphabetical order; the prefix
    ``spec.`` makes it pick labels.
    """
    flat = flattened(asdict(spec))
    fields = {_FIELDS.get(axis, axis): label for axis, label in labels.items()}
    names = {**fields, **{f"{field}.name": label for field, label in fields.items()}}
    said = {"key", *labels, *(name for name, label in names.items() if flat.get(name) == label)}
    return {
        f"spec.{name}": value
        for name, value in flat.items()
        if name not in said and not any(f".{long}." in f".{name}." for long in _LONG)
    }


_LONG = ("ranges", "categories")
"""Data declarations with an entry per column. They would fill tables without distinguishing trials, so they are left to
the sweep file."""


_AXES: Final = {
    "noise.schedule": "schedule",
    "noise.initial_noise_multiplier": "sigma",
    "target_epsilon": "epsilon",
    "users.sampling": "user_sampling",
    "users.max_records": "max_records_per_user",
}
"""Axes of the grid, by the parameter that is called otherwise."""
_FIELDS: Final = {axis: field for field, axis in _AXES.items()}


def asked(point: GridPoint) -> dict[str, Label]:
    """Return all parameters of a trial as the sweep file gives them, flat; they identify it regardless of labels and
    key.

    ``target_epsilon`` replaces a calibrated noise multiplier; a baseline has neither.
    """
    flat = flattened(asdict(point.spec))
    del flat["key"]
    if point.target_epsilon is not None:
        flat["target_epsilon"] = point.target_epsilon
    if point.target_epsilon is not None or not point.is_private:
        del flat["noise.initial_noise_multiplier"]
    return flat


def varying(parameters: Sequence[Mapping[str, Label]]) -> list[dict[str, Label]]:
    """Return the entries of each mapping that are not the same in all mappings. A missing entry counts as different.

    >>> varying([{"epochs": 1, "seed": 0}, {"epochs": 1, "seed": 1}])
    [{'seed': 0}, {'seed': 1}]
    """
    names = dict.fromkeys(name for found in parameters for name in found)
    differ = [name for name in names if any(found.get(name) != parameters[0].get(name) for found in parameters)]
    return [{name: found[name] for name in differ if name in found} for found in parameters]


def labels_of_parameters(settings: Sequence[Mapping[str, Label]]) -> list[dict[str, Label]]:
    """Return the labels of settings as a sweep that ran them all would give them.

    settings: parameters by flat names, as `asked` returns them; parameters of a component become one label.

    >>> labels_of_parameters([
    ...     {"clipping.name": "flat", "clipping.params.bound": bound, "noise.schedule.name": "constant", "epochs": 5}
    ...     for bound in (0.5, 1.0)
    ... ])
    [{'clipping': 'flat (bound 0.5)', 'schedule': 'constant'}, {'clipping': 'flat (bound 1)', 'schedule': 'constant'}]
    """
    return labelled(list(map(_choice, settings)))


def _choice(parameters: Mapping[str, Label]) -> dict[str, Component | Label]:
    """Return the value of a setting on each axis: its components, with their parameters, and single values."""
    named = {
        place: str(value)
        for name, value in parameters.items()
        for place, _, last in (name.rpartition("."),)
        if place and last in ("name", "method") and ".params." not in name
    }
    found: dict[str, Component | Label] = {}
    params: dict[str, dict[str, Label]] = {place: {} for place in named}
    for name, value in parameters.items():
        place = max((each for each in named if name.startswith(f"{each}.")), key=len, default="")
        if not place:
            found[_AXES.get(name, parameter_in_words(name))] = value
        elif name.removeprefix(f"{place}.") not in ("name", "method"):
            params[place][name.removeprefix(f"{place}.").removeprefix("params.")] = value
    return {**{_AXES.get(place, place): Component(each, params[place]) for place, each in named.items()}, **found}


def choices(trials: Iterable[PublishedTrial]) -> list[dict[str, Label]]:
    """Return of each trial what was chosen differently in others, seeds apart, by the names of a sweep file.

    Each choice is there once. A label such as ``flat (bound 0.3)`` gives way to its name and parameters. A noise
    multiplier gives way to the target that it follows from; a given one is the label ``sigma``.
    """
    found = []
    for trial in trials:
        given = {name.removeprefix("spec.").replace(".params.", "."): value for name, value in trial.params.items()}
        labels = {name: value for name, value in trial.labels.items() if name not in _NOT_CHOSEN}
        for label in labels:
            field = f"{_FIELDS.get(label, label)}.name"
            labels[label] = given.pop(field, given.pop(f"{label}.method", labels[label]))
        given.pop("noise.initial_noise_multiplier", None)
        found.append({name.replace("_", " "): value for name, value in {**labels, **given}.items()})
    return varying(found)


_NOT_CHOSEN: Final = frozenset((*RUNS, "candidate"))
"""Labels that tell runs of one choice apart, or only count choices."""


def found_sizes(training: TrainingResult) -> dict[str, Label]:
    """Return the sizes known after training: numbers of training examples, test examples and model parameters."""
    return {**_sizes(training), "parameters": training.parameters}


def _sizes(training: TrainingResult) -> dict[str, int]:
    return {"train_size": training.train_size, "test_size": training.test_size}


def dataset_of(data: DataSpec, training: TrainingResult) -> PublishedDataset:
    """Return the training data by name, digest of its specification, and sizes."""
    return PublishedDataset(data.name, checksum(asdict(data))[:16], _sizes(training))


def parameter_in_words(name: str) -> str:
    """Return the name of a parameter as words.

    >>> parameter_in_words("clipping.params.count_memory"), parameter_in_words("data.name")
    ('clipping count memory', 'data')
    """
    return name.removesuffix(".name").replace(".params.", " ").replace("_", " ").replace(".", " ")


def value_text(value: Label) -> str:
    """Return the value of a parameter as text."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def flattened(value: Mapping[str, Any], prefix: str = "") -> dict[str, Label]:
    """Flatten nested parameters to dotted names; None values are left out."""
    flat: dict[str, Label] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= flattened(item, f"{prefix}{key}.")
        elif isinstance(item, str | int | float):
            flat[f"{prefix}{key}"] = item
        elif item is not None:
            flat[f"{prefix}{key}"] = json.dumps(item, ensure_ascii=False)
    return flat
