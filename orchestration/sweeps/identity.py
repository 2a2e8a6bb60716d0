"""Identity of a trial: the canonical content that defines it, the key made from that content, and its labels. Pure.

A key is a readable prefix and a hash of the trial's canonical content. It depends on the trial alone, never on the
other trials of its sweep, so a sweep that grows keeps the keys of its trials.

The content holds the fields that differ from the first defaults of `TrialSpec`, so a field that a later version adds,
or gives another default (`_FIRST_DEFAULTS`), renames no trial. The content leaves out the key, options that change only
speed, and everything that a sweep decides for all its trials: resources, scheduler, accounting of trained trials,
tracking. It includes the names of the user's own code, but not the code. The data of a trial have a separate
fingerprint, kept in ``private/`` (`dpsweep.accounting.records.TrialFiles.data_fingerprint`), because a noiseless hash
of data must not be shown.

Labels are words for the values in which the trials of a sweep differ. They depend on the values of other trials, so
files and folders are named by keys instead.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import PurePath
from typing import Any, Final

from dpsweep.accounting.jobs.release import ReleaseSpec
from dpsweep.orchestration.store.published import NON_PRIVATE, Label
from dpsweep.workers.own_code.own_sources import GIVEN
from dpsweep.workers.spec import Component, DataSpec, NormSpec, SamplingSpec, TrialSpec

LONGEST_KEY: Final = 120
"""Maximum length of a trial's key. It names a folder; file systems allow 255 bytes."""
_FIRST_DEFAULTS: Final[Mapping[tuple[type[Any], str], Any]] = {
    (NormSpec, "refreshes_per_epoch"): 1.0,
    (TrialSpec, "norms"): NormSpec(1.0),
}
"""First defaults of fields whose default has changed."""
_HASH: Final = 10
"""Hexadecimal digits of the hash in a key. The grid refuses two different trials with one key."""


def content(
    spec: TrialSpec, target_epsilon: float | None = None, accountant: str = "auto", release: ReleaseSpec | None = None
) -> str:
    r"""Canonical JSON of the trial's definition: equal for equal trials, whatever their keys.

    `target_epsilon`: the epsilon to which ``accountant`` calibrates the noise; it replaces the noise multiplier, which
    follows from it. `release`: the release of statistics after training.

    >>> from dpsweep.workers.spec import Component, DataSpec, ExecutionSpec, NoiseSpec, SamplingSpec
    >>> spec = TrialSpec("any", DataSpec("digits"), Component("mlp"), SamplingSpec("poisson", 64), Component("flat"),
    ...                  NoiseSpec(1.0), epochs=2, delta=1e-5, seed=0)
    >>> from dataclasses import replace
    >>> content(spec) == content(replace(spec, key="another", execution=ExecutionSpec(threads=2)))
    True
    >>> print(content(spec).replace(',"', ',\n "'))
    {"clipping":{"name":"flat"},
     "data":{"name":"digits"},
     "delta":1e-05,
     "epochs":2,
     "model":{"name":"mlp"},
     "noise":{"initial_noise_multiplier":1},
     "norms":{"refreshes_per_epoch":"auto"},
     "sampling":{"batch_size":64,
     "method":"poisson"},
     "seed":0}
    """
    found = _plain(spec)
    del found["key"]
    if execution := found.pop("execution", None):  # of these options, autocast alone changes results
        found |= {"execution": {"autocast": execution["autocast"]}} if "autocast" in execution else {}
    if target_epsilon is not None:
        del found["noise"]["initial_noise_multiplier"]
        found |= {"target_epsilon": _number(target_epsilon)}
        found |= {"accountant": accountant} if accountant != "auto" else {}
    if release is not None:
        found["release"] = _plain(release)
    return json.dumps(found, sort_keys=True, separators=(",", ":"), default=repr)


def trial_key(words: Sequence[str], canonical: str) -> str:
    """Return the key of a trial: descriptive ``words`` and the hash of its `content`; a valid file name everywhere."""
    digest = hashlib.sha256(canonical.encode()).hexdigest()[:_HASH]
    readable = re.sub(r"[^A-Za-z0-9_.=+-]+", "_", "-".join(words))
    return f"{readable[: LONGEST_KEY - _HASH - 1]}-{digest}"


def _plain(value: Any) -> Any:
    """JSON values: a dataclass becomes its fields that differ from their first defaults; 1.0 becomes 1."""
    if is_dataclass(value) and not isinstance(value, type):
        usual = _usual(type(value))
        return {name: _plain(each) for name in usual if (each := getattr(value, name)) != usual[name]}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _number(value)


@functools.cache
def _usual(kind: type[Any]) -> Mapping[str, Any]:
    """Return the first default of each field of a dataclass; `MISSING`, which equals no value, for one without."""
    found = {each.name: each.default if (make := each.default_factory) is MISSING else make() for each in fields(kind)}
    return found | {name: first for (owner, name), first in _FIRST_DEFAULTS.items() if owner is kind}


def _number(value: Any) -> Any:
    """Whole numbers as integers, because 1 and 1.0 mean the same; everything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


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
