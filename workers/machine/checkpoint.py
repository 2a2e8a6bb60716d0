"""Checkpoints: the state from which a run continues bit-identically, in one private file with a checksum.

Other ranks store what they alone hold in parts beside it. The checkpoint has the digests of its parts, so it is whole
when it is there, and parts of any other one do not belong to it.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any, Final

from dpsweep.accounting.errors import START_ANEW, DataCorruption, InvalidInput
from dpsweep.accounting.records.files import delete, with_parts
from dpsweep.accounting.records.sealed import read_private, write_private
from dpsweep.workers.machine.stored_tensors import NoTensors, load_tensors

_KIND: Final = b"dpsweep-checkpoint-"
_MAGIC: Final = _KIND + b"10\n"
DIGEST_BYTES: Final = 32
_START: Final = len(_MAGIC) + DIGEST_BYTES
"""Offset of the bytes written by `torch.save`; the magic bytes and their digest come before."""


def fingerprint(*parts: object) -> str:
    """Return sha256 of the parts, equal in every process: identifies the run that a checkpoint belongs to."""
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()


def part_of_rank(uri: str, step: int, rank: int) -> str:
    """Return the place of the part that ``rank`` stores for the checkpoint at ``uri`` after ``step`` steps."""
    return f"{uri}-{step}-{rank}"


def save_checkpoint(uri: str, owner: str, state: Mapping[str, Any]) -> bytes:
    """Replace the checkpoint at ``uri``, or a part of one, atomically; return its digest.

    state: tensors, numbers, strings, bytes and containers of them.
    """
    buffer = io.BytesIO()
    buffer.write(_MAGIC + bytes(DIGEST_BYTES))
    import torch  # late: who deletes a checkpoint needs no torch

    torch.save({"owner": owner, "state": dict(state)}, buffer)
    with buffer.getbuffer() as content:  # without another copy of the state, which is as large as the model
        digest = hashlib.sha256(content[_START:]).digest()
        content[len(_MAGIC) : _START] = digest
        write_private(uri, content)
    return digest


def load_part(uri: str, owner: str, digest: bytes) -> dict[str, Any]:
    """Return the state in the part of a checkpoint that has its ``digest``; raise as `load_checkpoint` does."""
    state = load_checkpoint(uri, owner, digest)
    if state is None:
        raise DataCorruption(f"{uri} is missing; restore it from a backup, or {START_ANEW}")
    return state


def load_checkpoint(uri: str, owner: str, expected: bytes | None = None) -> dict[str, Any] | None:
    """Return the state stored at ``uri``, or None when there is no checkpoint yet. expected: its digest, if known.

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
    damaged = DataCorruption(f"{uri} is damaged; restore it from a backup, or {START_ANEW}")
    digest = data[len(_MAGIC) : _START]
    found = hashlib.sha256(memoryview(data)[_START:]).digest()
    if not data.startswith(_MAGIC) or found != digest or found != (expected or found):
        raise damaged
    stored = io.BytesIO(data)
    stored.seek(_START)
    try:
        content = load_tensors(stored)
    except NoTensors as error:
        raise damaged from error
    if content["owner"] != owner:
        raise InvalidInput(
            f"{uri} belongs to a trial with other settings, releases or data; use another folder, or {START_ANEW}"
        )
    state: dict[str, Any] = content["state"]
    return state


def forget_checkpoint(uri: str) -> bool:
    """Delete the checkpoint of a run and its parts: they hold the key or noise, by which noise could be subtracted.

    Temporary files of a process that was killed while writing a checkpoint hold the key too and are also deleted.
    Returns: whether there was any of them.
    """
    found = with_parts(uri)
    for each in found:
        delete(each)
    return bool(found)
