"""Bounds of number fields, read from their types, such as ``Annotated[int, Field(ge=1, le=1024)]``.

pydantic enforces them on fields read from a file, `check_bounds` on dataclasses built in Python. `place_of` gives the
place of a field that pydantic refuses.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args, get_type_hints

from pydantic.fields import FieldInfo

from dpsweep.accounting.errors import require_finite

_ARGUMENTS: Final = {"gt": "above", "ge": "at_least", "lt": "below", "le": "at_most"}
"""pydantic's name of each bound -> its name in `require_finite`."""


def check_bounds(instance: Any, section: str = "") -> None:
    """Check every number field of a dataclass against the bounds in its type.

    section: name of the dataclass in a trial; errors put it before the name of the field. Values that are not numbers,
    such as None, are not checked.

    Raises: InvalidInput naming the first field that is not finite or out of bounds, and the bound.
    """
    kind: Any = type(instance)
    for name, bounds in _bounds_of(kind).items():
        value = getattr(instance, name)
        if isinstance(value, int | float):
            require_finite(f"{section}.{name}" if section else name, value, **bounds)


@functools.cache
def _bounds_of(kind: type[Any]) -> Mapping[str, Mapping[str, float]]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: bounds for name, hint in hints.items() if (bounds := dict(_bounds(hint)))}


def _bounds(hint: Any) -> Iterator[tuple[str, float]]:
    """Yield the bounds in an annotated type, or in a member of a union."""
    for part in get_args(hint):
        if isinstance(part, FieldInfo):
            yield from (
                (argument, getattr(bound, attribute))
                for bound in part.metadata
                for attribute, argument in _ARGUMENTS.items()
                if hasattr(bound, attribute)
            )
        else:
            yield from _bounds(part)


def place_of(location: tuple[int | str, ...], content: Any) -> Iterator[str]:
    """Yield the keys and list positions in a pydantic location that exist in ``content``; pydantic adds internal
    ones.
    """
    for part in location:
        inside: dict[int | str, Any] = {}
        if isinstance(content, Mapping):
            inside = {str(key): value for key, value in content.items()}
        elif isinstance(content, list):
            inside = dict(enumerate(content))
        if part in inside:
            content = inside[part]
            yield str(part)
