"""JSON of a stored file, which somebody may have altered."""

from __future__ import annotations

import json
from typing import Any


def parsed_json(content: str | bytes) -> Any:
    """Return the value of a JSON text. Raises: ValueError if it is none, or nested more deeply than Python can follow.

    >>> parsed_json('{"epsilon": 2.5}')
    {'epsilon': 2.5}
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
