"""Labels: what distinguishes the trials of a sweep from each other, for display only. Pure.

A label depends on which values the other trials have, so it names nothing on disk: see `orchestration.sweeps.identity`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from orchestration.records.published import Label
from orchestration.sweeps.identity import short_name
from workers.spec import Component, DataSpec, SamplingSpec

Choice = Mapping[str, Any]
"""The value of a trial on each axis of the grid that applies to it."""


def labels_by_axis(choices: Iterable[Choice]) -> Mapping[str, Mapping[Any, str]]:
    """For each axis with several values among ``choices``, a distinct text for each value, in order of appearance.

    >>> labels_by_axis([{"epochs": 1, "seed": 0}, {"epochs": 2, "seed": 0}])
    {'epochs': {1: 'epochs1', 2: 'epochs2'}, 'seed': {0: 'seed0'}}
    """
    values: dict[str, dict[Any, None]] = {}
    for choice in choices:
        for axis, value in choice.items():
            values.setdefault(axis, {})[value] = None
    return {axis: _texts(axis, list(found)) for axis, found in values.items() if len(found) > 1 or axis in _ALWAYS}


def labels_of(choice: Choice, by_axis: Mapping[str, Mapping[Any, str]]) -> dict[str, Label]:
    """The labels of one trial; numbers stay numbers."""
    return {
        axis: value if isinstance(value, int | float) else by_axis[axis][value]
        for axis, value in choice.items()
        if axis in by_axis
    }


_ALWAYS = ("seed",)
"""Axes that are labelled also where they have one value."""


def _texts(axis: str, values: Sequence[Any]) -> dict[Any, str]:
    texts = _TEXTS.get(axis, _component_texts)(values)
    return {
        value: text if texts.count(text) == 1 else f"{text}.{texts[:index].count(text) + 1}"
        for index, (value, text) in enumerate(zip(values, texts, strict=True))
    }


def _component_texts(values: Sequence[Component | None]) -> list[str]:
    """By name, and by parameters too where several have the same name."""
    names = [short_name(value.name) if value else "none" for value in values]

    def text(name: str, value: Component | None) -> str:
        params = value.params if value and names.count(name) > 1 else {}
        return "-".join([name, *(f"{key}{param}" for key, param in params.items())])

    return [text(name, value) for name, value in zip(names, values, strict=True)]


def _sampling_texts(values: Sequence[SamplingSpec]) -> list[str]:
    def text(sampling: SamplingSpec) -> str:
        most = "" if sampling.max_batch_size is None else f"max{sampling.max_batch_size}"
        return f"{sampling.method}{sampling.batch_size}{most}"

    return [text(sampling) for sampling in values]


def _data_texts(values: Sequence[DataSpec]) -> list[str]:
    def text(data: DataSpec) -> str:
        return "-".join([short_name(data.name), *(f"{group}x{amount}" for group, amount in data.keep.items())])

    return [text(data) for data in values]


def _numbered(word: str) -> Callable[[Sequence[float]], list[str]]:
    return lambda values: [f"{word}{value:g}" if isinstance(value, float) else f"{word}{value}" for value in values]


_TEXTS: Mapping[str, Callable[[Sequence[Any]], list[str]]] = {
    "data": _data_texts,
    "sampling": _sampling_texts,
    "epochs": _numbered("epochs"),
    "seed": _numbered("seed"),
    "epsilon": _numbered("epsilon"),
    "sigma": _numbered("sigma"),
}
"""Texts of the values of an axis; axes that are not here hold components."""
