"""Identity of a trial: the canonical content that defines it, the key made from that content, and its labels. Pure.

A key is a readable prefix and a hash of the trial's canonical content. It depends on the trial alone, never on the
other trials of its sweep, so a sweep that grows keeps the keys of its trials.

The content holds the fields that differ from the first defaults of `TrialSpec`, so a field that a later version adds,
or gives another default (`_FIRST_DEFAULTS`), renames no trial. The content leaves out the key, options that change only
speed, and everything that a sweep decides for all its trials: resources, scheduler, accounting of trained trials,
tracking. It includes the names of the user's own code, but not the code. The data of a trial have a separate
fingerprint, kept in ``private/`` (`dpsweep.accounting.records.trial_files.TrialFiles.data_fingerprint`), because a
noiseless hash of data must not be shown.

Labels are words for the values in which the trials of a sweep differ. They depend on the values of other trials, so
files and folders are named by keys instead.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    return labelled(shown)


def labelled(shown: Sequence[Choice]) -> list[dict[str, Label]]:
    """As `labels_of`, of choices in which any two values of an axis are different settings."""
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
    own = _TEXTS.get(axis)
    texts = list(map(own, values)) if own else varying_texts([_component(value) for value in values])
    return {
        value: text if texts.count(text) == 1 else f"{text}.{texts[:index].count(text) + 1}"
        for index, (value, text) in enumerate(zip(values, texts, strict=True))
    }


def _component(value: Any) -> Component | None:
    """Return a value of an axis as a component: its name, and every parameter in which it can differ from others."""
    match value:
        case DataSpec():
            return Component(value.name, {**value.params, **_fields(value, "name", "params", "split_seed", "part")})
        case SamplingSpec():
            return Component(value.method, _fields(value, "method"))
        case NormSpec():
            return Component(_text(value.refreshes_per_epoch), _fields(value, "refreshes_per_epoch"))
        case Component() | None:
            return value
    return Component(_text(value))


def _fields(value: DataSpec | SamplingSpec | NormSpec, *left_out: str) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in fields(value) if each.name not in left_out}


def varying_texts(values: Sequence[Component | None]) -> list[str]:
    """Return one text per component: its name, with the parameters in which others of this name differ.

    >>> varying_texts([Component("flat", {"bound": 0.5, "x": 1}), Component("flat", {"bound": 2, "x": 1})])
    ['flat (bound 0.5)', 'flat (bound 2)']
    >>> varying_texts([Component("hugging_face", {"path": path, "adapter": {"name": "lora", "rank": rank}})
    ...                for path, rank in [("/models/tiny/first", 4), ("/models/small/first", 8)]])
    ['hugging_face (path tiny/first, adapter rank 4)', 'hugging_face (path small/first, adapter rank 8)']
    """
    flat = [dict(_leaves(value.params)) if value else {} for value in values]
    spellings: dict[str, dict[str, set[str]]] = {}
    for name in {value.name for value in values if value}:
        namesakes = [params for value, params in zip(values, flat, strict=True) if value and value.name == name]
        keys = dict.fromkeys(key for params in namesakes for key in params)
        spellings[name] = {key: {params.get(key, "") for params in namesakes} for key in keys}
    return [
        _varying_text(value.name, params, spellings[value.name]) if value else "none"
        for value, params in zip(values, flat, strict=True)
    ]


def _varying_text(name: str, params: Mapping[str, str], spellings: Mapping[str, set[str]]) -> str:
    """Return the name and those parameters that are not spelt alike everywhere."""
    own = [
        f"{words}{' ' if words[-1:].isalpha() else ': '}{_shortened(text, spellings[key])}"
        for key, text in params.items()
        if len(spellings[key]) > 1
        for words in (key.removesuffix(".name").replace("_", " ").replace(".", " "),)
    ]
    return _cut(f"{short_name(name)} ({', '.join(own)})" if own else short_name(name), _LONGEST_LABEL)


def _leaves(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of nested parameters as texts, by dotted names."""
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _text(value)


def _text(value: object) -> str:
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)


def _shortened(text: str, spellings: set[str]) -> str:
    """Return the last parts of a path that distinguish it from others; any other text cut in its middle."""
    parts = text.split("/")
    others = [each.split("/") for each in spellings if each != text] if len(parts) > 1 else []
    ends = (parts[-count:] for count in range(1, len(parts)) if any(parts[-count:]))
    return _cut("/".join(next((end for end in ends if all(each[-len(end) :] != end for each in others)), parts)))


def _cut(text: str, most: int = 40) -> str:
    half = most // 2
    return text if len(text) <= most else f"{text[: half - 1]}…{text[-half:]}"


_LONGEST_LABEL: Final = 120
"""Maximum length of the text of a component. Labels that are cut to the same text are numbered."""


def _numbered(word: str) -> Callable[[Any], str]:
    return lambda value: f"{word}{value:g}" if isinstance(value, float) else f"{word}{value}"


_TEXTS: Final[Mapping[str, Callable[[Any], str]]] = {
    "split_seed": _numbered("split"),
    "epochs": _numbered("epochs"),
    "seed": _numbered("seed"),
    "candidate": _numbered("candidate"),
    "epsilon": _numbered("epsilon"),
    "sigma": _numbered("sigma"),
    "user_sampling": str,
    "max_records_per_user": _numbered("rows"),
}
"""Functions that return the text of a value of an axis; axes that are missing here hold components."""
