"""The grid of a sweep: every trial it asks for. Pure.

Any field of a trial may hold a list instead of one value; the grid is the product of these lists. Trials without
clipping are the non-private baselines: noise, schedule and target do not apply to them, so each runs once per
combination of everything else, and every private trial that shares that combination is compared with it.
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
from workers.spec import AttackSpec, Component, DataSpec, NoiseSpec, TrialSpec

T = TypeVar("T")
BASELINE = "none"
"""The clipping method of a trial without privacy."""
MAX_TRIALS = 10_000
"""Of one sweep: Ray Tune, MLflow and the report handle thousands."""
LONGEST_KEY = 120
"""Characters of a trial's key: it names a folder, and names of folders have at most 255."""


@dataclass(frozen=True)
class GridPoint:
    """One trial that the sweep asks for. With a target, calibration starts from the noise multiplier of ``spec``."""

    spec: TrialSpec
    labels: dict[str, Label]
    """The values that tell the trials of the sweep apart; always clipping, schedule and seed."""
    target_epsilon: float | None = None
    baseline: str | None = None
    """Key of the non-private trial that shares everything else, where the sweep has one."""

    @property
    def key(self) -> str:
        return self.spec.key

    @property
    def is_private(self) -> bool:
        return self.spec.is_private


def grid(sweep: SweepSpec) -> tuple[GridPoint, ...]:
    """Every trial of the sweep, baselines first, each with a key that is unique, readable and stable.

    Raises: InvalidInput when two trials of the grid get the same key, and for more than `MAX_TRIALS`.
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
"""One value of every axis, with its label; the label is empty where the axis has no other value."""


def _combinations(axes: Mapping[str, list[tuple[str, Any]]]) -> Iterator[Choice]:
    for chosen in itertools.product(*axes.values()):
        yield dict(zip(axes, chosen, strict=True))


def _labelled(axis: Iterable[T], label: Callable[[T], str]) -> list[tuple[str, T]]:
    """Each value with its label, numbered where two labels coincide; the only value of an axis needs none.

    Raises: InvalidInput when two values are equal.
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
    """A component is called by its name, and by its parameters too where another one has the same name."""
    values = list(axis)
    names = [_name(value) for value in values]

    def label(value: Component | None) -> str:
        params = value.params if value and names.count(_name(value)) > 1 else {}
        return "-".join([_name(value), *(f"{key}{param}" for key, param in params.items())])

    return _labelled(values, label)


def _name(component: Component | None) -> str:
    return _short(component.name) if component else "none"


def _short(name: str) -> str:
    """A name without the folders of the user's own file: file.py:function is file:function."""
    location, _, function = name.rpartition(":")
    return f"{PurePath(location).stem}:{function}" if location.endswith(".py") else name


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
    """The axes that say nothing about privacy, by the field of `TrialSpec` they set."""
    return {
        "data": _labelled(sweep.data, _data_label),
        **{axis: _labelled_components(getattr(sweep, axis)) for axis in _COMPONENTS},
        "sampling": _labelled(sweep.sampling, lambda sampling: f"{sampling.method}{sampling.batch_size}"),
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
    """All labels, as a name that every file system takes; a long one ends in a hash of the whole instead."""
    whole = "-".join([first, *(label for label, _ in choice.values() if label)])
    key = re.sub(r"[^A-Za-z0-9_.=+-]+", "_", whole)
    if len(key) <= LONGEST_KEY:
        return key
    digest = hashlib.sha256(whole.encode()).hexdigest()[:12]
    return f"{key[: LONGEST_KEY - len(digest) - 1]}-{digest}"


def _labels(choice: Choice) -> dict[str, Label]:
    """What tells this trial from the others, by axis; numbers stay numbers."""
    return {
        axis: value if isinstance(value, int | float) else label for axis, (label, value) in choice.items() if label
    }


def _trial(sweep: SweepSpec, choice: Choice) -> TrialSpec:
    """The trial of one combination, without anything that is about privacy."""
    return TrialSpec(
        key=_key(NON_PRIVATE, choice),
        **{axis: value for axis, (_, value) in choice.items()},
        delta=sweep.privacy.delta,
        clipping=Component(BASELINE),
        noise=NoiseSpec(0.0),
        norms=sweep.norms,
        attacks=sweep.attacks or AttackSpec(),
        noise_source=sweep.noise_source,
        execution=sweep.execution,
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
