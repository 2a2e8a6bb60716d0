"""What makes two trials the same: everything that defines a trial, and the key made from it. Pure.

A key is a readable beginning and a hash of the trial's canonical content. It depends on the trial alone, never on the
other trials of its sweep, so a sweep that grows keeps the keys of the trials that it had.

The content holds what differs from the defaults of `TrialSpec`, so that a field added by a later version renames no
trial; the default of a field therefore never changes. It leaves out the key, how fast the trial runs, and everything
that a sweep decides about all its trials: resources, scheduler, accounting of trained trials, tracking. Names of the
user's own code are part of it, the code is not. The data that a trial met have a fingerprint of their own, kept in
``private/`` (`accounting.records.TrialFiles.data_fingerprint`), because a noiseless hash of data must not be shown.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import PurePath
from typing import Any, Final

from accounting.release import ReleaseSpec
from workers.spec import ExecutionSpec, TrialSpec, at_speed_of

LONGEST_KEY: Final = 120
"""Maximum length of a trial's key. It names a folder; file systems allow 255 bytes."""
_HASH: Final = 10
"""Hexadecimal digits of the hash in a key. Two trials of a sweep that share it are refused by the grid."""


def content(
    spec: TrialSpec, target_epsilon: float | None = None, accountant: str = "auto", release: ReleaseSpec | None = None
) -> str:
    r"""What defines the trial, as canonical JSON: equal for equal trials, whatever their keys.

    target_epsilon: calibrated to it by ``accountant``; it stands for the noise multiplier, which follows. release: of
    statistics, after training.

    >>> from workers.spec import Component, DataSpec, NoiseSpec, SamplingSpec
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
     "sampling":{"batch_size":64,
     "method":"poisson"},
     "seed":0}
    """
    found = _plain(at_speed_of(spec, ExecutionSpec()))
    del found["key"]
    if target_epsilon is not None:
        del found["noise"]["initial_noise_multiplier"]
        found |= {"target_epsilon": _number(target_epsilon)}
        found |= {"accountant": accountant} if accountant != "auto" else {}
    if release is not None:
        found["release"] = _plain(release)
    return json.dumps(found, sort_keys=True, separators=(",", ":"), default=repr)


def trial_key(words: Sequence[str], canonical: str) -> str:
    """The key of a trial: ``words`` that describe it, and the hash of its `content`; valid on every file system."""
    digest = hashlib.sha256(canonical.encode()).hexdigest()[:_HASH]
    readable = re.sub(r"[^A-Za-z0-9_.=+-]+", "_", "-".join(words))
    return f"{readable[: LONGEST_KEY - _HASH - 1]}-{digest}"


def short_name(name: str) -> str:
    """A name without the folder and suffix of the user's own file.

    >>> short_name("models/file.py:function"), short_name("flat")
    ('file:function', 'flat')
    """
    location, _, function = name.rpartition(":")
    return f"{PurePath(location).stem}:{function}" if location.endswith(".py") else name


def _plain(value: Any) -> Any:
    """Plain values for JSON: of a dataclass the fields that differ from their defaults, of equal numbers one."""
    if is_dataclass(value) and not isinstance(value, type):
        given = {field.name: getattr(value, field.name) for field in fields(value)}
        return {field.name: _plain(given[field.name]) for field in fields(value) if given[field.name] != _usual(field)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _number(value)


def _usual(field: Field[Any]) -> Any:
    """The default of a field, or `MISSING`, which equals no value."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _number(value: Any) -> Any:
    """Whole numbers as integers, because 1 and 1.0 mean the same; everything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
