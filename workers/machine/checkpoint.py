"""Checkpoints: the state from which a run continues bit-identically, in one private file with a checksum."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any, Final

from dpsweep.accounting.errors import START_ANEW, DataCorruption, InvalidInput
from dpsweep.accounting.records import delete, read_private, with_partials, write_private
from dpsweep.workers.machine.stored_tensors import NoTensors, load_tensors

_KIND: Final = b"dpsweep-checkpoint-"
_MAGIC: Final = _KIND + b"7\n"
_DIGEST_BYTES: Final = 32
_START: Final = len(_MAGIC) + _DIGEST_BYTES
"""Offset of the bytes written by `torch.save`; the magic bytes and their digest come before."""


def fingerprint(*parts: object) -> str:
    """Return sha256 of the parts, equal in every process for equal parts; identifies the run that a checkpoint belongs
    to.
    """
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()


def save_checkpoint(uri: str, owner: str, state: Mapping[str, Any]) -> None:
    """Replace the checkpoint at ``uri`` atomically.

    state: tensors, numbers, strings, bytes and containers of them.
    """
    buffer = io.BytesIO()
    buffer.write(_MAGIC + bytes(_DIGEST_BYTES))
    import torch  # late: who deletes a checkpoint needs no torch

    torch.save({"owner": owner, "state": dict(state)}, buffer)
    with buffer.getbuffer() as content:  # without another copy of the state, which is as large as the model
        content[len(_MAGIC) : _START] = hashlib.sha256(content[_START:]).digest()
        write_private(uri, content)


def load_checkpoint(uri: str, owner: str) -> dict[str, Any] | None:
    """Return the state stored at ``uri``, or None when there is no checkpoint yet.

    Raises:
        DataCorruption: the file is truncated or altered; the run is never restarted silently.
        InvalidInput: the checkpoint does not belong to ``owner``, or is of another version of dpsweep.
    """
    try:
        data = read_private(uri)
    except FileNotFoundError:
        return None
    if data.startswith(_KIND) and not data.startswith(_MAGIC):
        raise InvalidInput(
            f"{uri} is of another version of dpsweep; finish the trial with that version, or {START_ANEW}"
        )
    digest = data[len(_MAGIC) : _START]
    if not data.startswith(_MAGIC) or hashlib.sha256(memoryview(data)[_START:]).digest() != digest:
        raise DataCorruption(f"{uri} is damaged; restore it from a backup, or {START_ANEW}")
    stored = io.BytesIO(data)
    stored.seek(_START)
    try:
        content = load_tensors(stored)
    except NoTensors as error:
        raise DataCorruption(f"{uri} is damaged; restore it from a backup, or {START_ANEW}") from error
    if content["owner"] != owner:
        raise InvalidInput(
            f"{uri} belongs to a trial with other settings, releases or data; use another folder, or {START_ANEW}"
        )
    state: dict[str, Any] = content["state"]
    return state


def forget_checkpoint(uri: str) -> bool:
    """Delete the checkpoint of a run: it holds the key, with which the noise could be subtracted.

    Temporary files of a process that was killed while writing a checkpoint hold the key too and are also deleted.
    Returns: whether there was any of them.
    """
    found = with_partials(uri)
    for each in found:
        delete(each)
    return bool(found)
