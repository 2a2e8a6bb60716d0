"""Encryption at rest of private files, with a key from the environment variable ``DPSWEEP_KEY``.

If the key is set, `encrypted` turns the content of a private file into the stored bytes, and `decrypted` turns it back;
without a key both leave the bytes as they are. An encrypted file is not read without its key, and an unencrypted file
is not read with a key, so a trial stays the way it began.

A stored file is a header (magic, salt, check) and segments of 1 MiB, each encrypted by AES-256-GCM. HKDF-SHA256 (RFC
5869) derives the key of the file, and the check, from the user's key and the salt. The nonce of a segment is its number
and whether it is the last. So segments are neither reordered nor cut off unnoticed (the STREAM construction of Hoang,
Reyhanitabar, Rogaway and Vizár, 2015, with a key per file as in Tink's AES-GCM-HKDF). The salt is an HMAC-SHA256 of the
file's name and content under its own key, as in SIV (Rogaway and Shrimpton, 2006). No two contents share a key and
nonce, and a process that repeats its work stores the same bytes. The stored bytes reveal only whether a file has the
same content as before.

Names, sizes and times of files are not hidden.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dpsweep.accounting.errors import START_ANEW, DataCorruption, InvalidInput
from dpsweep.accounting.records.keystream import forbid_core_files

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_VARIABLE: Final = "DPSWEEP_KEY"
"""Environment variable with the key: 64 hexadecimal digits."""

_MAGIC: Final = b"dpsweep-encrypted-1\n"
_SALT: Final = 32
_CHECK: Final = 16
_HEADER: Final = len(_MAGIC) + _SALT + _CHECK
_SEGMENT: Final = 2**20
"""Bytes of content in a segment; the last one may have fewer."""
_TAG: Final = 16
_FORM: Final = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True)
class KeyCheck:
    """Tells whether a key is the right one, and reveals nothing else about it. salt, check: hexadecimal."""

    salt: str
    check: str


def new_key_check() -> KeyCheck | None:
    """Return the check of the key of this process; None without a key. Raises: InvalidInput for a malformed key."""
    key = _key()
    if key is None:
        return None
    salt = os.urandom(_SALT)
    return KeyCheck(salt.hex(), _derived(key, salt)[1].hex())


def require_key(check: KeyCheck | None, where: str) -> None:
    """Raise `InvalidInput` unless this process has the key that ``check`` was made of, or no key if ``check`` is None.

    where: what needs the key, as the subject of the message.
    """
    key = _key()
    if check is None and key is not None:
        raise InvalidInput(_not_encrypted(where))
    if check is not None and key is None:
        raise InvalidInput(_encrypted(where))
    if check is not None and key is not None:
        found = _derived(key, bytes.fromhex(check.salt))[1]
        if not hmac.compare_digest(found.hex(), check.check):
            raise InvalidInput(_other_key(where))


def encrypted(uri: str, content: bytes | memoryview) -> bytes:
    """Return the bytes to store for the private file ``uri``: its content, encrypted if there is a key. Deterministic.

    Raises: InvalidInput for a malformed key.
    """
    key = _key()
    if key is None:
        return bytes(content)
    salting = hmac.new(_salting(key), struct.pack(">Q", len(uri.encode())) + uri.encode(), hashlib.sha256)
    salting.update(content)
    salt = salting.digest()
    cipher, check = _cipher(key, salt)
    stored = io.BytesIO()  # bytes.join would hold all segments twice
    stored.write(b"".join((_MAGIC, salt, check)))
    for nonce, segment in _segments(content, _SEGMENT):
        stored.write(cipher.encrypt(nonce, segment, None))
    return stored.getvalue()


def decrypted(uri: str, stored: bytes) -> bytes:
    """Return the content of the private file ``uri``, given the bytes ``stored`` read from it.

    Raises: InvalidInput when the key is missing, wrong, malformed, or set though the file is not encrypted;
    DataCorruption when the file was cut or altered.
    """
    key = _key()
    if not stored.startswith(_MAGIC):
        if key is None:
            return stored
        raise InvalidInput(_not_encrypted(uri))
    if key is None:
        raise InvalidInput(_encrypted(uri))
    salt, check = stored[len(_MAGIC) : len(_MAGIC) + _SALT], stored[len(_MAGIC) + _SALT : _HEADER]
    cipher, expected = _cipher(key, salt)
    if len(stored) < _HEADER + _TAG:
        raise _damaged(uri)
    if not hmac.compare_digest(check, expected):
        raise InvalidInput(_other_key(uri))
    from cryptography.exceptions import InvalidTag

    content = io.BytesIO()
    try:
        for nonce, segment in _segments(memoryview(stored)[_HEADER:], _SEGMENT + _TAG):
            content.write(cipher.decrypt(nonce, segment, None))
    except InvalidTag:
        raise _damaged(uri) from None
    return content.getvalue()


def require_encrypted(uri: str, stored: bytes) -> None:
    """Raise `InvalidInput` if the bytes ``stored`` at ``uri`` are not encrypted."""
    if not stored.startswith(_MAGIC):
        raise InvalidInput(f"{uri} is not encrypted, so there is nothing to decrypt; read it as it is")


def is_encrypting() -> bool:
    """Return whether there is a key. Raises: InvalidInput for a malformed one."""
    return _key() is not None


def _key() -> bytes | None:
    """Return the user's key. Raises: InvalidInput for a malformed one; the message does not quote it."""
    text = os.environ.get(KEY_VARIABLE, "")
    if not text:
        return None
    forbid_core_files()
    if _FORM.fullmatch(text) is None:
        raise InvalidInput(
            f"{KEY_VARIABLE} has {len(text)} characters that are no key, but must be 64 hexadecimal digits; "
            "`openssl rand -hex 32` makes some"
        )
    return bytes.fromhex(text)


def _expanded(key: bytes, length: int, salt: bytes | None, purpose: bytes) -> bytes:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(hashes.SHA256(), length, salt, b"dpsweep 1 " + purpose).derive(key)


def _salting(key: bytes) -> bytes:
    """Return the key of the HMAC that derives salts."""
    return _expanded(key, 32, None, b"salt")


def _derived(key: bytes, salt: bytes) -> tuple[bytes, bytes]:
    """Return the key of a file, and the check that tells whether it is the right one."""
    both = _expanded(key, 32 + _CHECK, salt, b"file")
    return both[:32], both[32:]


def _cipher(key: bytes, salt: bytes) -> tuple[AESGCM, bytes]:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    own, check = _derived(key, salt)
    return AESGCM(own), check


def _segments(data: bytes | memoryview, size: int) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the segments in order, at least one, each with its nonce: 3 zero bytes, its number in 8, and 1 for the
    last.
    """
    view, last = memoryview(data), max(0, -(-len(data) // size) - 1)
    for number in range(last + 1):
        yield struct.pack(">3xQ?", number, number == last), view[number * size : (number + 1) * size]


def _encrypted(what: str) -> str:
    return f"{what} is encrypted; set {KEY_VARIABLE} to its key"


def _not_encrypted(what: str) -> str:
    return f"{what} was begun without encryption, but {KEY_VARIABLE} is set; unset it, or use another folder"


def _other_key(what: str) -> str:
    return f"{what} was encrypted with another key than {KEY_VARIABLE} holds; set its own"


def _damaged(uri: str) -> DataCorruption:
    return DataCorruption(f"{uri} is damaged: it was cut or altered; restore it from a backup, or {START_ANEW}")
