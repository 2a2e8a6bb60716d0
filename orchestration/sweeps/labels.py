"""Labels: words for the values in which the trials of a sweep differ. Pure.

They depend on the values of other trials, so files and folders are named by keys instead (`identity`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, Final

from dpsweep.orchestration.store.published import NON_PRIVATE, Label
from dpsweep.workers.own_code.own_sources import GIVEN
from dpsweep.workers.spec import Component, DataSpec, SamplingSpec

Choice = Mapping[str, Any]
"""The value of a trial on each grid axis that applies to it."""
_ABSENT: Final = object()


def short_name(name: str) -> str:
    """Return a name without the folder and suffix of the user's own file; of an object, its name alone.

    >>> short_name("models/file.py:function"), short_name("given/Net.py:Net"), short_name("flat")
    ('file:function', 'Net', 'flat')
    """
    location, _, function = name.rpartition(":")
    if location == f"{GIVEN}/{function}.py":
        return function
    return f"{PurePath(location).stem}:{function}" if location.endswith(".py") else name


def labels_of(choices: Iterable[Choice]) -> list[dict[str, Label]]:
    """Return the labels of each trial: its values on the axes with several, and always clipping, schedule and seed.

    Numbers stay numbers. The split seed of the data is its own axis, beside the training seed.
    """
    shown = [
        {**each, "data": replace(each["data"], split_seed=0), "split_seed": each["data"].split_seed} for each in choices
    ]
    by_axis = labels_by_axis(shown)
    return [
        _always(choice)
        | {
            axis: value if isinstance(value, int | float) else by_axis[axis][value]
            for axis, value in choice.items()
            if axis in by_axis
        }
        for choice in shown
    ]


def _always(choice: Choice) -> dict[str, Label]:
    if "clipping" not in choice:
        return {"clipping": NON_PRIVATE, "schedule": "none"}
    return {"clipping": short_name(choice["clipping"].name), "schedule": choice["schedule"].name}


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


_ALWAYS = ("seed",)
"""Axes that are labelled even if they have only one value."""
_LEVELS = {"epsilon", "sigma"}
"""Axes that are both labelled if some trials have one and some the other."""


def _texts(axis: str, values: Sequence[Any]) -> dict[Any, str]:
    if axis not in _TEXTS and all(value is None or isinstance(value, Component) for value in values):
        texts = varying_texts(values)
    else:
        texts = list(map(_TEXTS.get(axis, _numbered("")), values))
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


_MARKS: Final = {"per_epoch": "x", "cycle_length": "by"}
"""Short words for numbers of samplings in labels."""


def _sampling_text(sampling: SamplingSpec) -> str:
    most = "" if sampling.max_batch_size is None else f"max{sampling.max_batch_size}"
    given = {name: value for name, value in sampling.numbers.items() if value is not None}
    own = "".join(f"{_MARKS.get(name, name)}{value}" for name, value in given.items())
    return f"{sampling.method}{sampling.batch_size}{most}{own}"


def _data_text(data: DataSpec) -> str:
    return "-".join([short_name(data.name), *(f"{group}x{amount}" for group, amount in data.keep.items())])


def _numbered(word: str) -> Callable[[Any], str]:
    return lambda value: f"{word}{value:g}" if isinstance(value, float) else f"{word}{value}"


_TEXTS: Final[Mapping[str, Callable[[Any], str]]] = {
    "data": _data_text,
    "norms": lambda norms: f"norms_{norms.refreshes_per_epoch}",
    "split_seed": _numbered("split"),
    "sampling": _sampling_text,
    "epochs": _numbered("epochs"),
    "seed": _numbered("seed"),
    "candidate": _numbered("candidate"),
    "epsilon": _numbered("epsilon"),
    "sigma": _numbered("sigma"),
    "user_sampling": str,
    "max_records_per_user": _numbered("rows"),
}
"""Functions that return the text of a value of an axis; axes that are missing here hold components."""
