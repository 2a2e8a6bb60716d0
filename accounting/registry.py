"""Look a component up by name and build it from named parameters, with errors that suggest the fix."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from accounting.errors import InvalidInput

T = TypeVar("T")


def nearest(word: str, valid: Collection[str]) -> str:
    """A sentence part naming the closest valid word, if one is close, and always the valid ones."""
    close = difflib.get_close_matches(word, valid, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}valid: {', '.join(sorted(valid))}"


def lookup(registry: Mapping[str, T], name: str, what: str) -> T:
    """The entry called ``name``, or `InvalidInput` naming the nearest valid one."""
    if name not in registry:
        raise InvalidInput(f"unknown {what} {name!r}; {nearest(name, registry)}")
    return registry[name]


def build(
    registry: Mapping[str, Callable[..., T]], name: str, params: Mapping[str, Any], what: str, **context: Any
) -> T:
    """Call the entry called ``name`` with ``context`` and the user's ``params``.

    A key the entry does not take, or a required one that is missing, is an `InvalidInput` that lists the
    valid keys; it never reaches Python's own TypeError.
    """
    factory = lookup(registry, name, what)
    parameters = inspect.signature(factory).parameters
    accepted = {key for key in parameters if key not in context}
    for key in params:
        if key not in accepted:
            raise InvalidInput(f"unknown key {key!r} of {what} {name!r}; {nearest(key, accepted)}")
    empty = inspect.Parameter.empty
    missing = [k for k in parameters if parameters[k].default is empty and k not in params and k not in context]
    if missing:
        raise InvalidInput(f"{what} {name!r} needs {', '.join(missing)}; valid: {', '.join(sorted(accepted))}")
    return factory(**{key: value for key, value in context.items() if key in parameters}, **params)
