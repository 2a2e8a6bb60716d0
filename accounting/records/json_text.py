"""JSON of a stored file, which somebody may have altered."""

from __future__ import annotations

import json
from typing import Any


def parsed_json(content: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises: ValueError if it is none, is nested more deeply than Python can follow, or gives a name twice in an object.
    Readers differ in which value they take.

    >>> parsed_json('{"epsilon": 2.5}')
    {'epsilon': 2.5}
    """
    try:
        return json.loads(content, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it gives a name twice")
    return found
