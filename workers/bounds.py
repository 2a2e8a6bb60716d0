"""The bounds of a number field, stated once: in the type of the field, as ``Annotated[int, Field(ge=1, le=1024)]``.

pydantic enforces them where a field is read from a file, `check_bounds` where a dataclass is built in Python.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args, get_type_hints

from pydantic.fields import FieldInfo

from accounting.errors import require_finite

_ARGUMENTS: Final = {"gt": "above", "ge": "at_least", "lt": "below", "le": "at_most"}
"""What `require_finite` calls the bounds of pydantic."""


def check_bounds(instance: Any, section: str = "") -> None:
    """Raise `InvalidInput` naming the field of a dataclass that is not finite or out of bounds, and the bound.

    section: the name of the dataclass in a trial, put before that of the field. Values of another type, such as None
    or a word in place of a number, have no bounds.
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
    """Those of an annotated type, or of a member of a union."""
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
