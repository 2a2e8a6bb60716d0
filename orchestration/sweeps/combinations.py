"""The axes of a sweep's grid, the axes that vary together, and their combinations. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from dpsweep.orchestration.sweeps.labels import Choice
from dpsweep.orchestration.sweeps.schema import SweepSpec

BASELINE = "none"
"""The clipping method of a non-private baseline."""

Axes = Mapping[str, Sequence[tuple[int, Any]]]
"""The values of each axis with their indices in the sweep's list, by name of the axis."""
Chosen = Mapping[str, tuple[int, Any]]
"""One value of each axis, with its index."""
_AXES: Final = {"seeds": "seed", "noise": "schedule", "target_epsilon": "epsilon", "noise_multiplier": "sigma"}
"""Names of axes that differ from their key in the sweep file, by that key."""


def _placed(values: Iterable[Any]) -> list[tuple[int, Any]]:
    return list(enumerate(values))


def values_of(chosen: Chosen) -> Choice:
    """Return the values without their indices."""
    return {axis: value for axis, (_, value) in chosen.items()}


def combinations(axes: Axes) -> Iterator[Chosen]:
    """Yield the product of all axes."""
    for chosen in itertools.product(*axes.values()):
        yield dict(zip(axes, chosen, strict=True))


def pairs(sweep: SweepSpec) -> list[list[str]]:
    """Return the groups of axes that ``zip`` varies together, by names of axes."""
    return [[_AXES.get(key, key) for key in group] for group in sweep.pairs]


def is_paired(sweep: SweepSpec, chosen: Chosen, also: Mapping[str, int] = MappingProxyType({})) -> bool:
    """Return whether axes that vary together have the same index in their lists. also: indices of further axes."""
    places = {axis: place for axis, (place, _) in chosen.items()} | dict(also)
    return all(len({places[axis] for axis in group if axis in places}) <= 1 for group in pairs(sweep))


def comparable_places(sweep: SweepSpec, chosen: Chosen) -> tuple[int, ...]:
    """Return indices that a private trial and its baseline have in common, to match the two.

    These are the indices of all shared axes except those that vary together with clipping; data and seed are always
    included.
    """
    paired = {axis for group in pairs(sweep) if "clipping" in group for axis in group} - {"data", "seed"}
    return tuple(place for axis, (place, _) in chosen.items() if axis not in paired)


_COMPONENTS = (
    "model",
    "preprocessing",
    "loss",
    "optimizer",
    "learning_rate_schedule",
    "augmentation",
    "averaging",
)


def shared_axes(sweep: SweepSpec) -> Axes:
    """Return the axes that private trials and baselines share."""
    fields = ("data", *_COMPONENTS, "sampling", "epochs", "norms")
    return {**{axis: _placed(getattr(sweep, axis)) for axis in fields}, "seed": _placed(sweep.seeds)}


def private_axes(sweep: SweepSpec) -> Axes:
    """Return the axes that only private trials have: clipping, schedule, target ``epsilon`` or noise ``sigma``, and
    how users are protected.
    """
    privacy = sweep.privacy
    return {
        "clipping": [(place, each) for place, each in _placed(sweep.clipping) if each.name != BASELINE],
        "schedule": _placed(sweep.noise),
        **({"epsilon": _placed(privacy.target_epsilon)} if privacy.target_epsilon else {}),
        **({"sigma": _placed(privacy.noise_multiplier)} if privacy.noise_multiplier else {}),
        **({"user_sampling": _placed(privacy.user_sampling)} if privacy.user_sampling else {}),
        **({"max_records_per_user": _placed(privacy.max_records_per_user)} if privacy.max_records_per_user else {}),
    }


def repeated(sweep: SweepSpec) -> tuple[str, ...]:
    """Return the axes of the sweep that list a value twice; axes that vary together, if they list the same together."""
    axes = {**shared_axes(sweep), **private_axes(sweep)}
    groups = [[axis for axis in group if axis in axes] for group in pairs(sweep)]
    paired = {axis for group in groups for axis in group}
    groups += [[axis] for axis in axes if axis not in paired]
    return tuple(axis for group in groups if _is_repeated([dict(axes[axis]) for axis in group]) for axis in group)


def _is_repeated(group: Sequence[Mapping[int, Any]]) -> bool:
    """Return whether the axes of ``group``, each as its values by index, have equal values at two indices."""
    places = set.intersection(*(set(values) for values in group)) if group else set[int]()
    return len({tuple(values[place] for values in group) for place in places}) < len(places)
