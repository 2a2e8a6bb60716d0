"""Private and sealed files: their modes, encryption, and digests.

Files derived from single examples are readable by their owner only, and encrypted if there is a key. Every file below a
folder ``private/`` is read and written here, except by `dpsweep.accounting.records.arrow_parts` and
`snapshot_objects`. These use `dpsweep.accounting.records.encryption` directly, because manifests hold hashes of the
stored bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records.encryption import decrypted, encrypted, is_encrypting, require_encrypted
from dpsweep.accounting.records.files import (
    read_bytes,
    write_bytes_atomically,
    write_in_private_folder,
)
from dpsweep.accounting.records.json_text import parsed_json


def read_private(uri: str) -> bytes:
    """Return the content of a private file.

    Raises: FileNotFoundError, StorageError as `read_bytes`; InvalidInput and DataCorruption as `decrypted`.
    """
    return decrypted(uri, read_bytes(uri))


def read_encrypted(uri: str) -> bytes:
    """Return `read_private` of a file that is encrypted. Raises: also InvalidInput if it is not."""
    stored = read_bytes(uri)
    require_encrypted(uri, stored)
    return decrypted(uri, stored)


def write_private(uri: str, content: bytes | memoryview) -> bytes | memoryview:
    """Replace the content of a private file atomically, and return what is stored: it may be encrypted.

    Raises: StorageError; InvalidInput as `encrypted`.
    """
    stored = encrypted(uri, content) if is_encrypting() else content
    write_in_private_folder(uri, stored)
    return stored


_SEAL = "sha256"


def write_sealed(uri: str, content: bytes, private: bool = False) -> None:
    """Store a JSON object with the checksum of its content as one more entry.

    private: readable by its owner only, but never encrypted, for results that the owner may pass on.
    """
    write_bytes_atomically(uri, _sealed(content), private)


def write_private_sealed(uri: str, content: bytes) -> None:
    """Call `write_sealed` for a file below a folder ``private/``."""
    write_private(uri, _sealed(content))


def read_sealed(uri: str, next_step: str) -> bytes | None:
    """Return the stored object as JSON; None when there is none.

    Raises: DataCorruption when the file is cut or altered; its message ends with ``next_step``.
    """
    return _opened(read_bytes, uri, next_step)


def read_private_sealed(uri: str, next_step: str) -> bytes | None:
    """Return `read_sealed` for a file below a folder ``private/``. Raises: also InvalidInput, as `decrypted`."""
    return _opened(read_private, uri, next_step)


def _sealed(content: bytes) -> bytes:
    values = parsed_json(content)
    return json.dumps({**values, _SEAL: checksum(values)}, indent=2).encode()


def _opened(read: Callable[[str], bytes], uri: str, next_step: str) -> bytes | None:
    """Return the object without its checksum, which has been verified."""
    try:
        content = read(uri)
    except FileNotFoundError:
        return None
    try:
        values: dict[str, Any] = parsed_json(content)
        seal = values.pop(_SEAL)
        found = checksum(values)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        reason = "is damaged: it is no JSON object with a checksum"
        raise DataCorruption(f"{uri} {reason}; {next_step}") from None
    if seal != found:
        raise DataCorruption(f"{uri} is damaged: its content differs from its checksum; {next_step}")
    return json.dumps(values).encode()


def checksum(value: Any) -> str:
    """Return sha256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
