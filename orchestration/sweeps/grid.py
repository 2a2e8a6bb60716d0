"""The grid of a sweep: all its trials. Pure.

Fields of a sweep file may hold a list instead of one value; the grid is the product of these lists. A trial without
clipping is a non-private baseline. Noise, schedule and target do not apply to it, so there is one baseline per
combination of the other fields; every private trial is compared with the baseline of its combination.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, TypeVar

from accounting.errors import InvalidInput
from orchestration.records.published import NON_PRIVATE, Label
from orchestration.sweeps.schema import SweepSpec
from workers.evaluation import MIN_GROUP_SIZE
from workers.spec import AttackSpec, Component, DataSpec, NoiseSpec, SamplingSpec, TrialSpec

T = TypeVar("T")
BASELINE = "none"
"""The clipping method of a non-private baseline."""
MAX_TRIALS = 10_000
"""Maximum number of trials of a sweep; Ray Tune, MLflow and the report handle thousands."""
LONGEST_KEY = 120
"""Maximum length of a trial's key. It names a folder; file systems allow 255 bytes."""


@dataclass(frozen=True)
class GridPoint:
    """One trial that the sweep asks for.

    target_epsilon: None if the noise multiplier of ``spec`` is final; otherwise the planner replaces it by a calibrated
    one.
    """

    spec: TrialSpec
    labels: dict[str, Label]
    """The values that distinguish the trials of the sweep; always clipping, schedule and seed."""
    target_epsilon: float | None = None
    baseline: str | None = None
    """Key of the trial's non-private baseline, if the sweep has one."""

    @property
    def key(self) -> str:
        """Unique name of the trial in its sweep; also that of its folder."""
        return self.spec.key

    @property
    def is_private(self) -> bool:
        """Whether the trial clips and adds noise, so is not a baseline."""
        return self.spec.is_private


def grid(sweep: SweepSpec) -> tuple[GridPoint, ...]:
    """Every trial of the sweep, baselines first, each with a unique, readable and stable key.

    Raises: InvalidInput if two trials get the same key, and for more than `MAX_TRIALS` trials.

    >>> from orchestration.sweeps.schema import parse_sweep
    >>> [point.key for point in grid(parse_sweep('''
    ... name: example
    ... data: breast_cancer
    ... model: logistic
    ... sampling: {method: poisson, batch_size: 64}
    ... epochs: 2
    ... clipping: [none, flat]
    ... privacy: {target_epsilon: [1, 3], delta: 1e-5}
    ... '''))]
    ['non-private-seed0', 'flat-epsilon1-seed0', 'flat-epsilon3-seed0']
    """
    _require_countable(sweep)
    shared = list(_combinations(_shared_axes(sweep)))
    with_baseline = any(clipping.name == BASELINE for clipping in sweep.clipping)
    baselines = [_baseline(sweep, choice) for choice in shared] if with_baseline else []
    private = [
        _private(sweep, choice, level, with_baseline)
        for choice in shared
        for level in _combinations(_private_axes(sweep))
    ]
    points = (*baselines, *private)
    counted = Counter(point.key for point in points)
    twice = [key for key, count in counted.items() if count > 1]
    if twice:
        raise InvalidInput(f"the sweep lists the same value of an axis twice; trials that coincide: {', '.join(twice)}")
    return points


def _require_countable(sweep: SweepSpec) -> None:
    levels = sweep.privacy.target_epsilon or sweep.privacy.noise_multiplier or ()
    axes = [len(getattr(sweep, axis)) for axis in ("data", *_COMPONENTS, "sampling", "epochs", "seeds")]
    trials = math.prod([*axes, len(sweep.clipping), len(sweep.noise), len(levels)])
    if trials > MAX_TRIALS:
        raise InvalidInput(
            f"the grid has up to {trials:,} trials, but a sweep at most {MAX_TRIALS:,}; shorten its lists, or split it"
        )


Choice = Mapping[str, tuple[str, Any]]
"""For each axis, a label and the chosen value; the label is empty if the axis has one value only."""


def _combinations(axes: Mapping[str, list[tuple[str, Any]]]) -> Iterator[Choice]:
    for chosen in itertools.product(*axes.values()):
        yield dict(zip(axes, chosen, strict=True))


def _labelled(axis: Iterable[T], label: Callable[[T], str]) -> list[tuple[str, T]]:
    """Each value with its label; equal labels are numbered, and a single value gets an empty label.

    Raises: InvalidInput if two values are equal.
    """
    values = list(axis)
    if len(values) == 1:
        return [("", values[0])]
    labels = [label(value) for value in values]
    twice = [name for index, name in enumerate(labels) if values[index] in values[:index]]
    if twice:
        raise InvalidInput(f"the sweep lists the same value of an axis twice: {', '.join(twice)}")
    return [
        (name if labels.count(name) == 1 else f"{name}.{labels[:index].count(name) + 1}", value)
        for index, (name, value) in enumerate(zip(labels, values, strict=True))
    ]


def _labelled_components(axis: Iterable[Component | None]) -> list[tuple[str, Component | None]]:
    """Label components by name, and by their parameters too where several have the same name."""
    values = list(axis)
    names = [_name(value) for value in values]

    def label(value: Component | None) -> str:
        params = value.params if value and names.count(_name(value)) > 1 else {}
        return "-".join([_name(value), *(f"{key}{param}" for key, param in params.items())])

    return _labelled(values, label)


def _name(component: Component | None) -> str:
    return _short(component.name) if component else "none"


def _short(name: str) -> str:
    """A name without the folder and suffix of the user's own file: ``models/file.py:function`` -> ``file:function``."""
    location, _, function = name.rpartition(":")
    return f"{PurePath(location).stem}:{function}" if location.endswith(".py") else name


def _sampling_label(sampling: SamplingSpec) -> str:
    most = "" if sampling.max_batch_size is None else f"max{sampling.max_batch_size}"
    return f"{sampling.method}{sampling.batch_size}{most}"


def _data_label(data: DataSpec) -> str:
    return "-".join([_short(data.name), *(f"{group}x{amount}" for group, amount in data.keep.items())])


_COMPONENTS = (
    "model",
    "preprocessing",
    "loss",
    "optimizer",
    "learning_rate_schedule",
    "augmentation",
    "averaging",
)


def _shared_axes(sweep: SweepSpec) -> dict[str, list[tuple[str, Any]]]:
    """The axes that private trials and baselines share, by the field of `TrialSpec` that they set."""
    return {
        "data": _labelled(sweep.data, _data_label),
        **{axis: _labelled_components(getattr(sweep, axis)) for axis in _COMPONENTS},
        "sampling": _labelled(sweep.sampling, _sampling_label),
        "epochs": _labelled(sweep.epochs, lambda epochs: f"epochs{epochs}"),
        "seed": [(f"seed{seed}", seed) for seed in sweep.seeds],
    }


def _private_axes(sweep: SweepSpec) -> dict[str, list[tuple[str, Any]]]:
    clippings = _labelled_components(sweep.clipping)
    levels = sweep.privacy.target_epsilon or sweep.privacy.noise_multiplier or ()
    word = "epsilon" if sweep.privacy.target_epsilon else "sigma"
    return {
        "clipping": [(label, clipping) for label, clipping in clippings if _name(clipping) != BASELINE],
        "schedule": _labelled_components(sweep.noise),
        word: _labelled(levels, lambda level: f"{word}{level:g}"),
    }


def _key(first: str, choice: Choice) -> str:
    """All labels, joined to a name that is valid on every file system; a long one is cut and ends in a hash."""
    whole = "-".join([first, *(label for label, _ in choice.values() if label)])
    key = re.sub(r"[^A-Za-z0-9_.=+-]+", "_", whole)
    if len(key) <= LONGEST_KEY:
        return key
    digest = hashlib.sha256(whole.encode()).hexdigest()[:12]
    return f"{key[: LONGEST_KEY - len(digest) - 1]}-{digest}"


def _labels(choice: Choice) -> dict[str, Label]:
    """The labels of the trial by axis, only for axes with several values; numbers stay numbers."""
    return {
        axis: value if isinstance(value, int | float) else label for axis, (label, value) in choice.items() if label
    }


def _trial(sweep: SweepSpec, choice: Choice) -> TrialSpec:
    """The non-private trial of one combination."""
    return TrialSpec(
        key=_key(NON_PRIVATE, choice),
        **{axis: value for axis, (_, value) in choice.items()},
        delta=sweep.privacy.delta,
        clipping=Component(BASELINE),
        noise=NoiseSpec(0.0),
        norms=sweep.norms,
        attacks=sweep.attacks or AttackSpec(),
        min_group_size=sweep.min_group_size or MIN_GROUP_SIZE,
        audit=sweep.audit,
        noise_source=sweep.noise_source,
        execution=sweep.execution,
        adjacency=sweep.privacy.adjacency,
    )


def _baseline(sweep: SweepSpec, choice: Choice) -> GridPoint:
    trial = _trial(sweep, choice)
    return GridPoint(
        replace(trial, optimizer=sweep.baseline.optimizer or trial.optimizer),
        {"clipping": NON_PRIVATE, "schedule": "none", **_labels(choice)},
    )


def _private(sweep: SweepSpec, choice: Choice, private: Choice, with_baseline: bool) -> GridPoint:
    shared, clipping, schedule = _trial(sweep, choice), private["clipping"][1], private["schedule"][1]
    target = private["epsilon"][1] if "epsilon" in private else None
    trial = replace(
        shared,
        key=_key(private["clipping"][0] or _short(clipping.name), {**_without(private, "clipping"), **choice}),
        clipping=clipping,
        noise=NoiseSpec(private["sigma"][1] if target is None else 1.0, schedule),
        budget=sweep.privacy.budget,
    )
    labels = {"clipping": _short(clipping.name), "schedule": schedule.name, **_labels(private), **_labels(choice)}
    return GridPoint(trial, labels, target, shared.key if with_baseline else None)


def _without(choice: Choice, axis: str) -> Choice:
    return {key: value for key, value in choice.items() if key != axis}
