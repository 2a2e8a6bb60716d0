"""Read what `torch.save` has stored, without running code, and take sha256 of files that training writes.

A file may come from somebody else. Only tensors and plain values are unpickled, and only from archives whose entries
are stored as they are, as `torch.save` makes them. A few kilobytes that are compressed may unfold to all memory. So may
a few bytes that ask for a ``bytearray`` of some length, encode bytes in hexadecimal again and again, or name one entry
by many names. Torch allows all of these. An archive is looked at by the reader that torch loads it with, because
another one may find other entries in the same bytes.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import pickletools
import zipfile
from typing import Any, BinaryIO, Final

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records.files import digest_of, list_files
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.records.sealed import read_private_sealed, write_private_sealed
from dpsweep.accounting.records.trial_files import TrialFiles

_ARCHIVE: Final = b"PK\x03\x04"
_SMALL: Final = 2**16
"""Bytes that are read of a small archive besides its entries."""
_PICKLES: Final = 5
"""Pickles at the start of a file by torch before 1.6."""
_OF_BYTES: Final = frozenset({"base64", "bz2", "hex", "quopri", "uu", "zlib"})
"""Codecs that make bytes of bytes, so that one can follow another."""


class NoTensors(Exception):
    """A file holds something else than tensors and plain values, or is damaged; its cause says more."""


def load_tensors(stored: BinaryIO, or_older: bool = False) -> Any:
    """Return the value in the rest of a stream, on the CPU. or_older: also of torch before 1.6, which is no archive.

    Raises: NoTensors.
    """
    import torch  # late: who deletes a checkpoint needs no torch

    start = stored.tell()
    is_archive = stored.read(len(_ARCHIVE)) == _ARCHIVE
    size = stored.seek(0, os.SEEK_END) - start
    stored.seek(start)
    try:
        if is_archive:
            archive = torch._C.PyTorchFileReader(stored)
            if _unfolded(archive, stored, start) > size:
                raise NoTensors("it is compressed, as torch makes none")
            pickles: list[Any] = [archive.get_record("data.pkl")]
        elif or_older:
            pickles = [stored] * _PICKLES
        else:
            raise NoTensors("it is no archive")
        if any(map(_makes_bytes, pickles)):
            raise NoTensors("it makes bytes of any length, as dpsweep stores none")
        stored.seek(start)
        read: Any = _Limited(stored, 2 * size + _SMALL) if is_archive else stored
        return torch.load(read, map_location="cpu", weights_only=True)
    except NoTensors:
        raise
    except Exception as error:  # the unpickler raises almost anything for damaged bytes
        raise NoTensors(str(error).partition("\n")[0]) from error


def _unfolded(archive: Any, stored: BinaryIO, start: int) -> int:
    """Return the bytes of all entries of an archive as torch reads them.

    The reader of torch 2.11 does not tell. zipfile does, if it sees the same entries at the same places.
    """
    names = archive.get_all_records()
    if hasattr(archive, "get_record_size"):
        return sum(map(archive.get_record_size, names))
    with zipfile.ZipFile(stored) as other:
        seen = {(each.filename.partition("/")[2], each.header_offset - start) for each in other.infolist()}
        if seen != {(name, archive.get_record_header_offset(name)) for name in names}:
            raise NoTensors("readers of archives disagree on its entries")
        return sum(each.file_size for each in other.infolist())


def _makes_bytes(pickled: bytes | BinaryIO) -> bool:
    """Return whether a pickle, or the next one in a stream, names what makes bytes of any length.

    Raises: ValueError for damaged bytes.
    """
    named, texts = set[str](), set[str]()
    for operation, value, _ in pickletools.genops(pickled):
        if operation.name == "GLOBAL":
            named.add(str(value).rpartition(" ")[2])
        elif isinstance(value, str):
            texts.add(value)
    return "bytearray" in named or ("encode" in named and any(map(_is_of_bytes, texts)))


def _is_of_bytes(text: str) -> bool:
    """Return whether this is the name of one of `_OF_BYTES`; the longest has 16 letters."""
    with contextlib.suppress(LookupError, ValueError):
        return len(text) < 32 and codecs.lookup(text).name in _OF_BYTES
    return False


class _Limited:
    """A stream that ends after so many bytes."""

    def __init__(self, stored: BinaryIO, most: int) -> None:
        self._left, self.seek, self.tell = most, stored.seek, stored.tell
        self._stored = stored

    def read(self, size: int = -1) -> bytes:
        found = self._stored.read(size)
        self._count(len(found))
        return found

    def readinto(self, buffer: memoryview) -> int:
        found: int = self._stored.readinto(buffer)  # type: ignore[attr-defined]
        self._count(found)
        return found

    def _count(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise NoTensors("it reads its entries again and again")


def note_written(files: TrialFiles) -> None:
    """Store the digest of each file that training has written and will not write again, all of them in ``private/``.

    `TrialFiles.private_digests` holds them until the trial is accounted, and from then on the digests of private files
    alone.
    """
    there = set(list_files(files.root))
    digests = {name: digest_of(uri) for uri in _written(files) if (name := uri.removeprefix(f"{files.root}/")) in there}
    write_private_sealed(files.private_digests, json.dumps(digests).encode())


def noted_when_written(files: TrialFiles) -> dict[str, str]:
    """Return what `note_written` stored, by name.

    Empty once the trial is accounted, and where the file is damaged.
    """
    try:
        content = read_private_sealed(files.private_digests, "")
    except DataCorruption:
        return {}
    noted: dict[str, str] = {} if content is None else parsed_json(content)
    return noted if files.model.removeprefix(f"{files.root}/") in noted else {}


def _written(files: TrialFiles) -> tuple[str, ...]:
    return (
        *(files.spec, files.model, files.inputs, files.trace, files.device),
        *(files.data_fingerprint, files.private_training, files.attacks, files.membership),
        *(files.held_out, files.outcomes),
    )
