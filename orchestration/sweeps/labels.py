"""Labels that distinguish the trials of a sweep from each other, for display only. Pure.

A label depends on the values of the other trials, so files and folders are named by keys instead
(`dpsweep.orchestration.sweeps.identity`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dpsweep.orchestration.records.published import Label
from dpsweep.orchestration.sweeps.identity import short_name
from dpsweep.workers.spec import Component, DataSpec, NormSpec, SamplingSpec

Choice = Mapping[str, Any]
"""The value of a trial on each grid axis that applies to it."""
Texts = Callable[[Sequence[Any]], list[str]]
"""A function that returns one text for each value of an axis."""
_ABSENT = object()


def shown_choice(choice: Choice) -> Choice:
    """Return the choice with the split seed of the data as its own axis, beside the training seed."""
    data = choice["data"]
    return {**choice, "data": replace(data, split_seed=0), "split_seed": data.split_seed}


def labels_by_axis(choices: Iterable[Choice]) -> Mapping[str, Mapping[Any, str]]:
    """For each axis with several values among ``choices``, a distinct text for each value, in order of appearance.

    >>> labels_by_axis([{"epochs": 1, "seed": 0}, {"epochs": 2, "seed": 0}])
    {'epochs': {1: 'epochs1', 2: 'epochs2'}, 'seed': {0: 'seed0'}}
    """
    values: dict[str, dict[Any, None]] = {}
    for choice in choices:
        for axis, value in choice.items():
            values.setdefault(axis, {})[value] = None
    several = {axis for axis, found in values.items() if len(found) > 1}
    several |= _LEVELS if values.keys() >= _LEVELS else set()
    return {axis: _texts(axis, list(found)) for axis, found in values.items() if axis in {*several, *_ALWAYS}}


def labels_of(choice: Choice, by_axis: Mapping[str, Mapping[Any, str]]) -> dict[str, Label]:
    """Return the labels of one trial; numbers stay numbers."""
    return {
        axis: value if isinstance(value, int | float) else by_axis[axis][value]
        for axis, value in choice.items()
        if axis in by_axis
    }


_ALWAYS = ("seed",)
"""Axes that are labelled even if they have only one value."""
_LEVELS = {"epsilon", "sigma"}
"""Axes that are both labelled if some trials have one and some the other."""


def _texts(axis: str, values: Sequence[Any]) -> dict[Any, str]:
    texts = _TEXTS.get(axis, varying_texts)(values)
    return {
        value: text if texts.count(text) == 1 else f"{text}.{texts[:index].count(text) + 1}"
        for index, (value, text) in enumerate(zip(values, texts, strict=True))
    }


def varying_texts(values: Sequence[Component | None]) -> list[str]:
    """Return one text per component: its name, with the parameters in which others of this name differ.

    >>> varying_texts([Component("flat", {"bound": 0.5, "x": 1}), Component("flat", {"bound": 2, "x": 1})])
    ['flat-bound0.5', 'flat-bound2']
    """

    def varies(value: Component, key: str) -> bool:
        namesakes = [each.params for each in values if each and each.name == value.name]
        return any(params.get(key, _ABSENT) != value.params[key] for params in namesakes)

    return [
        "-".join([short_name(value.name), *(f"{key}{value.params[key]}" for key in value.params if varies(value, key))])
        if value
        else "none"
        for value in values
    ]


def _sampling_texts(values: Sequence[SamplingSpec]) -> list[str]:
    def text(sampling: SamplingSpec) -> str:
        most = "" if sampling.max_batch_size is None else f"max{sampling.max_batch_size}"
        often = "" if sampling.per_epoch is None else f"x{sampling.per_epoch}"
        turns = "" if sampling.cycle_length is None else f"by{sampling.cycle_length}"
        return f"{sampling.method}{sampling.batch_size}{most}{often}{turns}"

    return [text(sampling) for sampling in values]


def _data_texts(values: Sequence[DataSpec]) -> list[str]:
    def text(data: DataSpec) -> str:
        return "-".join([short_name(data.name), *(f"{group}x{amount}" for group, amount in data.keep.items())])

    return [text(data) for data in values]


def _norm_texts(values: Sequence[NormSpec]) -> list[str]:
    return [f"norms_{norms.refreshes_per_epoch}" for norms in values]


def _numbered(word: str) -> Callable[[Sequence[float]], list[str]]:
    return lambda values: [f"{word}{value:g}" if isinstance(value, float) else f"{word}{value}" for value in values]


_TEXTS: Mapping[str, Texts] = {
    "data": _data_texts,
    "norms": _norm_texts,
    "split_seed": _numbered("split"),
    "sampling": _sampling_texts,
    "epochs": _numbered("epochs"),
    "seed": _numbered("seed"),
    "candidate": _numbered("candidate"),
    "epsilon": _numbered("epsilon"),
    "sigma": _numbered("sigma"),
    "user_sampling": list,
    "max_records_per_user": _numbered("rows"),
}
"""Functions that make the texts of an axis; axes that are missing here hold components."""
