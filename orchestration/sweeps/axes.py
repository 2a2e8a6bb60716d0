"""Expands lists inside a component or section into several components, one per combination of their values. Pure.

    >>> combinations_of({"name": "flat", "bound": [0.5, 1.0]}, {"bound": float}, "clipping")
    [{'name': 'flat', 'bound': 0.5}, {'name': 'flat', 'bound': 1.0}]

Where the type of a parameter takes lists, such as the hidden sizes of a model, a list is one value and a list of lists
is several. ``{each: [...]}`` is always several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.own_code.imports import is_import_path

_LIST = Sequence[str]
_LISTS_BY_NAME = Mapping[str, Sequence[str]]
_LIST_OR_BY_NAME = Sequence[str] | Mapping[str, Sequence[str]]
_ROWS: Final = {"group": _LIST, "exclude": _LIST}
_IMAGES: Final = {"group": _LIST, "classes": _LIST, "group_names": _LIST_OR_BY_NAME}
_TEXTS: Final = {
    "group": _LIST,
    "user": _LIST,
    "label": _LIST,
    "classes": _LIST,
    "groups": _LIST_OR_BY_NAME,
    "ranges": _LISTS_BY_NAME,
}
_TABLE: Final = {
    **_TEXTS,
    "features": _LIST,
    "categories": _LISTS_BY_NAME,
    "numbers": Mapping[str, str],
    "unscaled": _LIST,
    "hashed": Mapping[str, int],
    "ignore_case": _LIST,
}
LIST_VALUES: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "data": {
        "adult": _ROWS,
        "dutch": _ROWS,
        "csv": _TABLE,
        "parquet": _TABLE,
        "text": _TEXTS,
        "image_folder": _IMAGES,
        "image_masks": {**_IMAGES, "values": _LIST},
        "image_table": _TEXTS,
        "utkface": {"group": _LIST, "races": _LIST},
    },
    "model": {
        "mlp": {"hidden": _LIST},
        "cnn_dpsgdf": {"channels": _LIST},
        "vision": {"pixel_offset": _LIST, "pixel_scale": _LIST},
    },
    "release": {"private": {"quantiles": _LIST}},
}
"""By axis, component and parameter, how its value nests lists, as a type; the type of their items does not matter."""


def kinds_of(axis: str, component: object, parameters: Sequence[str]) -> dict[str, Any]:
    """Return how the value of each parameter of a component nests lists; empty for one of the user's own, where each
    list is one value."""
    if not isinstance(component, str) or is_import_path(component):
        return {}
    listed = LIST_VALUES.get(axis, {}).get(component, {})
    return {name: listed.get(name, float) for name in parameters}


MOST_COMBINATIONS: Final = 10_000
"""Maximum number of combinations of the lists inside one component."""


def combinations_of(given: Mapping[str, Any], types: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """Return one mapping per combination of the lists in ``given``; the last list changes fastest.

    `types`: types of the values, by key; a list under a key without a type is one value. `place`: position in the sweep
    file, for errors. Raises: InvalidInput for an empty list, and for more than `MOST_COMBINATIONS`.
    """
    options = [_options(value, types.get(key), f"{place}.{key}") for key, value in given.items()]
    count = math.prod(map(len, options))
    if count > MOST_COMBINATIONS:
        raise InvalidInput(
            f"{place}: its lists have {count:,} combinations, at most {MOST_COMBINATIONS:,}; shorten them"
        )
    return [dict(zip(given, chosen, strict=True)) for chosen in itertools.product(*options)]


def has_lists(value: object) -> bool:
    """Return whether a component or section holds a list at any depth, so that `combinations_of` may expand it."""
    if isinstance(value, Mapping):
        return any(isinstance(item, list) or has_lists(item) for item in value.values())
    return False


def _options(value: Any, kind: Any, place: str) -> Sequence[Any]:
    match value:
        case {"each": list(values)} if len(value) == 1:
            return _required(values, place)
        case {**found} if found:
            items = {str(key): item for key, item in found.items()}
            return combinations_of(items, dict.fromkeys(items, _kind_of_items(kind)), place)
        case list(values) if kind is not None and not _holds(values, kind):
            return _required(values, place)
    return [value]


def _required(values: list[Any], place: str) -> list[Any]:
    if not values:
        raise InvalidInput(f"{place} is an empty list; give at least one value")
    return values


def _kind_of_items(kind: Any) -> Any:
    """Return the type of the values of a mapping type; None for any other."""
    arguments = get_args(kind)
    is_mapping = isinstance(get_origin(kind), type) and issubclass(get_origin(kind), Mapping)
    if is_mapping and len(arguments) == 2:
        return None if arguments[1] is Any else arguments[1]
    members = [found for each in arguments if (found := _kind_of_items(each)) is not None]
    return members[0] if members else None


def _holds(values: list[Any], kind: Any) -> bool:
    """Return whether the list is one value of the type: the type takes lists and, if all items are lists, lists of
    lists.
    """
    members = [each for each in (get_args(kind) if _is_union(kind) else (kind,)) if _takes_lists(each)]
    nested = bool(values) and all(isinstance(item, list) for item in values)
    return any(not nested or any(map(_takes_lists, get_args(each))) for each in members)


def _takes_lists(kind: Any) -> bool:
    if get_origin(kind) is Annotated:
        return _takes_lists(get_args(kind)[0])
    found = get_origin(kind) or kind
    is_sequence = isinstance(found, type) and issubclass(found, Sequence) and not issubclass(found, str | bytes)
    return kind in (Any, object) or is_sequence


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)
