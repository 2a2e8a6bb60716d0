"""JSON files with a checksum of their content, because a flipped digit is still valid JSON."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from accounting.errors import DataCorruption
from accounting.records.files import read_bytes, write_bytes_atomically

_SEAL = "sha256"


def write_sealed(uri: str, content: bytes, private: bool = False) -> None:
    """Store a JSON object with the checksum of its content as one more entry."""
    values = json.loads(content)
    write_bytes_atomically(uri, json.dumps({**values, _SEAL: _checksum(values)}, indent=2).encode(), private)


def read_sealed(uri: str, next_step: str) -> bytes | None:
    """The stored object as JSON; None when there is none.

    Raises: DataCorruption when the file is cut or altered; its message ends with ``next_step``.
    """
    try:
        values: dict[str, Any] = json.loads(read_bytes(uri))
        seal = values.pop(_SEAL)
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError, AttributeError):
        reason = "is damaged, or of an earlier version: it is no JSON object with a checksum"
        raise DataCorruption(f"{uri} {reason}; {next_step}") from None
    if seal != _checksum(values):
        raise DataCorruption(f"{uri} is damaged: its content differs from its checksum; {next_step}")
    return json.dumps(values).encode()


def _checksum(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
