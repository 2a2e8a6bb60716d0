"""Reading and writing of what is derived from single examples: readable by its owner only, and encrypted with a key.

Every file below a folder ``private/`` is read and written here or, by `accounting.records.parts`, with the functions of
`accounting.records.encryption` themselves, because manifests hold hashes of what is stored.
"""

from __future__ import annotations

from accounting.records.encryption import decrypted, encrypted, is_encrypting
from accounting.records.files import append_bytes, exists, read_bytes, write_bytes_atomically


def read_private(uri: str) -> bytes:
    """The content of a private file.

    Raises: FileNotFoundError, StorageError as `read_bytes`; InvalidInput and DataCorruption as `decrypted`.
    """
    return decrypted(uri, read_bytes(uri))


def write_private(uri: str, content: bytes | memoryview) -> None:
    """Replace the content of a private file atomically. Raises: StorageError; InvalidInput as `encrypted`."""
    stored = encrypted(uri, content) if is_encrypting() else content
    write_bytes_atomically(uri, stored, private=True)


def append_private(uri: str, content: bytes) -> None:
    """Append to a private file durably; one that is encrypted is written anew.

    A crash may leave a part of ``content`` where it is not encrypted; the caller's format must be able to detect that.
    """
    if is_encrypting():
        write_private(uri, (read_private(uri) if exists(uri) else b"") + content)
    else:
        append_bytes(uri, content, private=True)
