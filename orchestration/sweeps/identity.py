"""Identity of a trial: the canonical content that defines it, and the key made from that content. Pure.

A key is a readable prefix and a hash of the trial's canonical content. It depends on the trial alone, never on the
other trials of its sweep, so a sweep that grows keeps the keys of its trials.

The content holds the fields that differ from the first defaults of `TrialSpec`, so a field that a later version adds,
or gives another default (`_FIRST_DEFAULTS`), renames no trial. The content leaves out the key, options that change only
speed, and everything that a sweep decides for all its trials: resources, scheduler, accounting of trained trials,
tracking. It includes the names of the user's own code, but not the code. The data of a trial have a separate
fingerprint, kept in ``private/`` (`dpsweep.accounting.records.TrialFiles.data_fingerprint`), because a noiseless hash
of data must not be shown.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Final

from dpsweep.accounting.jobs.release import ReleaseSpec
from dpsweep.workers.spec import NormSpec, TrialSpec

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
