"""Parameters of components whose value is a list: there, a list in a sweep file is one value and not several.

A table beside the registries, which a test compares with them: reading a stored sweep must not load torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dpsweep.workers.own_code.imports import is_import_path

_LIST = Sequence[str]
_LISTS_BY_NAME = Mapping[str, Sequence[str]]
_LIST_OR_BY_NAME = Sequence[str] | Mapping[str, Sequence[str]]
_ROWS: Final = {"group": _LIST, "exclude": _LIST}
_IMAGES: Final = {"group": _LIST, "classes": _LIST, "group_names": _LIST_OR_BY_NAME}
_TEXTS: Final = {"group": _LIST, "user": _LIST, "label": _LIST, "classes": _LIST, "groups": _LIST_OR_BY_NAME}
_TABLE: Final = {
    **_TEXTS,
    "features": _LIST,
    "ranges": _LISTS_BY_NAME,
    "categories": _LISTS_BY_NAME,
    "numbers": Mapping[str, str],
    "unscaled": _LIST,
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
        "utkface": {"group": _LIST, "races": _LIST},
    },
    "model": {"mlp": {"hidden": _LIST}, "cnn_dpsgdf": {"channels": _LIST}},
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
