"""Reads and writes files derived from single examples: readable by their owner only, and encrypted if there is a key.

Every file below a folder ``private/`` is read and written here, except by `dpsweep.accounting.records.arrow_parts` and
`objects`. These use `dpsweep.accounting.records.encryption` directly, because manifests hold hashes of the stored
bytes.
"""

from __future__ import annotations

from dpsweep.accounting.records.encryption import decrypted, encrypted, is_encrypting, require_encrypted
from dpsweep.accounting.records.files import append_in_private_folder, exists, read_bytes, write_in_private_folder


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


def append_private(uri: str, content: bytes) -> None:
    """Append to a private file durably; an encrypted file is written again.

    If it is not encrypted, a crash may leave only a prefix of ``content``; the caller's format must detect that.
    """
    if is_encrypting():
        write_private(uri, (read_private(uri) if exists(uri) else b"") + content)
    else:
        append_in_private_folder(uri, content)
