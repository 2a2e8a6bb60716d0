"""Where keys of a sweep file belong, by its schema and the registries of components."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.registry import meant, nearest, one_of

_WRITTEN = ("Adapted",)
"""Sections that dpsweep writes, and users do not."""


def sections_of(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the class of each section in the JSON schema of a sweep file, and its place, such as attacks.rmia."""
    waiting, seen = [("", schema)], set[str]()
    while waiting:
        prefix, found = waiting.pop(0)
        for key, value in found["properties"].items():
            for name in re.findall(r"#/\$defs/(\w+)", json.dumps(value)):
                if name not in ("Component", "DataPart", *_WRITTEN) and name not in seen:
                    seen.add(name)
                    waiting.append((f"{prefix}{key}.", schema["$defs"][name]))
                    yield name, f"{prefix}{key}"


class UnknownKey(InvalidInput):
    """A key that a section of a sweep file does not take. valid: keys that it takes. of: its section, in words."""

    def __init__(self, key: str, valid: Collection[str], of: str) -> None:
        super().__init__(f"unknown key {key!r}{of}")
        self.key, self.valid = key, valid


def right_place(error: UnknownKey, schema: Mapping[str, Any]) -> str:
    """Return where an unknown key belongs if it has a meaning elsewhere, else the nearest valid keys.

    schema: JSON schema of a sweep file.
    """
    from dpsweep.orchestration.sweeps.components import COMPONENTS, parameters_of  # late: it loads torch

    key, valid = error.key, error.valid
    keys = {place: schema["$defs"][name]["properties"] for name, place in sections_of(schema)}
    found = {place: f"{{{key}: ...}}" for place, known in keys.items() if key in known and key != "params"}
    for place, registry in COMPONENTS.items():
        takes = [name for name, make in registry.items() if key in {each.name for each in parameters_of(make)}]
        if name := next((each for each in takes if each != "none"), ""):
            found.setdefault(place, f"{{name: {name}, {key}: ...}}")
    if key in schema["properties"]:
        return f"it belongs to the top level: `{key}: ...`"
    if not found and meant(key, valid):
        return nearest(key, valid)
    alike = [f"{place}.{each}" for place, known in keys.items() for each in known if each.endswith(f"_{key}")]
    question = f"did you mean {' or '.join(alike)}? " if alike and len(found) != 1 else ""
    if not found:
        return f"{question}{nearest(key, valid)}; a component holds its parameters: {_COMPONENT}"
    places = one_of(list(found)) if len(found) > 1 else next(iter(found))
    return f"{question}it belongs to {places}: `{_nested(*next(iter(found.items())))}`"


_COMPONENT: Final = "`clipping: {name: flat, bound: 1}`"


def _nested(place: str, value: str) -> str:
    """Return the value at its place, as a sweep file spells it."""
    outer, dot, inner = place.partition(".")
    return f"{outer}: {{{_nested(inner, value)}}}" if dot else f"{outer}: {value}"
