"""Rows of norms in the order of their users: files between those who read the norms and those who account users.

Users are divided into shares by the remainder of their id. A file holds the rows of some parts of the norms, sorted by
share, as an object with a piece for each share (`objects`). A process that accounts a share reads its piece of every
file, and each byte once. Beside the file lies a note of its pieces and of their inputs, so that an interrupted run is
continued. All of it is private, can be made again from the norms, and is deleted once users are accounted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records.files import read_bytes, read_in_turn, write_in_private_folder
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.records.sealed import read_private_sealed, write_private_sealed
from dpsweep.accounting.records.snapshot_objects import DIGEST, Piece, batch_of, make_pieces, read_piece

Ids = NDArray[np.int64]
Rows = NDArray[np.float32]

_NEXT = "account the trial again, which writes it anew"
_USER, _CONTRIBUTIONS = "user", "contributions"


@dataclass(frozen=True)
class SortedRows:
    """The pieces of one file: their bytes and rows, int64 [shares, 2], and their sha256, as bytes.

    part: the first of the parts whose rows it holds.
    """

    part: int
    extents: bytes
    digests: bytes

    @property
    def table(self) -> NDArray[np.int64]:
        """Bytes and rows of each piece [shares, 2]."""
        return np.frombuffer(self.extents, np.int64).reshape(-1, 2)


@dataclass(frozen=True)
class ShareOfRows:
    """The rows of the users of one share, ``part``, in several files.

    files: int64 [files, 2], the number and the bytes of each. extents: int64 [files, 3], of each piece its first byte,
    its bytes and its rows. digests: their sha256. Kept as bytes to save memory.
    """

    directory: str
    part: int
    snapshots: int
    files: bytes
    extents: bytes
    digests: bytes

    def read(self) -> tuple[Ids, Rows]:
        """Return the user [rows] of each row, and its contributions [rows, snapshots], in the order of parts and rows.

        Raises: DataCorruption when a file is missing, cut or altered.
        """
        counts = np.frombuffer(self.extents, np.int64)[2::3].tolist()
        pieces = [number for number, count in enumerate(counts) if count > 0]
        users, rows = np.empty(sum(counts), np.int64), np.empty((sum(counts), self.snapshots), np.float32)
        schema, start = _schema(self.snapshots), 0
        for number, stored in zip(pieces, read_in_turn(self.directory, self._stored, pieces), strict=True):
            batch = batch_of(self._place(number), stored, schema)
            stop = start + counts[number]
            if batch.num_rows != counts[number]:
                raise _damaged(self._place(number))
            users[start:stop] = batch.column(_USER).to_numpy()
            flat = batch.column(_CONTRIBUTIONS).combine_chunks().flatten()
            rows[start:stop] = flat.to_numpy().reshape(-1, self.snapshots)
            start = stop
        return users, rows

    def _stored(self, number: int) -> bytes:
        place = self._place(number)
        try:
            return read_piece(place)
        except DataCorruption as error:
            raise _damaged(place) from error

    def _place(self, number: int) -> Piece:
        file, whole = np.frombuffer(self.files, np.int64)[2 * number : 2 * number + 2].tolist()
        start, size, _ = np.frombuffer(self.extents, np.int64)[3 * number : 3 * number + 3].tolist()
        digest = self.digests[DIGEST * number : DIGEST * (number + 1)]
        return Piece(_uri(self.directory, file), f"share {self.part}", start, size, whole, digest)


def write_rows(directory: str, part: int, users: Ids, rows: Rows, ends: Sequence[int], inputs: str) -> SortedRows:
    """Write and note the rows [rows, snapshots] of ``users`` [rows], both sorted by share.

    part: the first of the parts that they are from.
    ends: rows of the shares up to each.
    inputs: digest of their inputs.
    Writing the same again replaces it by equal bytes.
    Raises: StorageError.
    """
    schema = _schema(rows.shape[1])
    flat = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), type=schema.field(_CONTRIBUTIONS).type)
    batch = pa.record_batch([pa.array(users), flat], schema=schema)
    starts = (0, *ends[:-1])
    shares = [batch.slice(start, stop - start) for start, stop in zip(starts, ends, strict=True)]
    record, pieces = make_pieces(_uri(directory, part), shares)
    write_in_private_folder(_uri(directory, part), *pieces)
    extents = np.stack([record.sizes, np.diff(ends, prepend=0)], axis=1).astype(np.int64)
    note = {"inputs": inputs, "extents": extents.tolist(), "digests": record.digests.hex()}
    write_private_sealed(_note(directory, part), json.dumps(note).encode())
    return SortedRows(part, extents.tobytes(), record.digests)


def noted_rows(directory: str, part: int, inputs: str) -> SortedRows | None:
    """Return a file that an interrupted run wrote from the same ``inputs``; None if there is none, or it is damaged."""
    try:
        content = read_private_sealed(_note(directory, part), _NEXT)
        note: dict[str, Any] = parsed_json(content) if content else {}
        if note.get("inputs") != inputs:
            return None
        found = SortedRows(part, np.array(note["extents"], np.int64).tobytes(), bytes.fromhex(note["digests"]))
        return found if _is_intact(memoryview(read_bytes(_uri(directory, part))), found) else None
    except (DataCorruption, FileNotFoundError, LookupError, TypeError, ValueError, OverflowError):
        return None


def shares_of(directory: str, snapshots: int, files: Sequence[SortedRows]) -> list[ShareOfRows]:
    """Return where the rows of each share lie."""
    tables = np.stack([file.table for file in files])
    sizes, counts = tables[:, :, 0], tables[:, :, 1]
    ends = sizes.cumsum(axis=1)
    whole = np.array([(file.part, end) for file, end in zip(files, ends[:, -1].tolist(), strict=True)], np.int64)
    extents, numbers = np.stack([ends - sizes, sizes, counts], axis=2), whole.tobytes()
    return [
        ShareOfRows(
            directory=directory,
            part=share,
            snapshots=snapshots,
            files=numbers,
            extents=extents[:, share].tobytes(),
            digests=b"".join(file.digests[DIGEST * share : DIGEST * (share + 1)] for file in files),
        )
        for share in range(tables.shape[1])
    ]


def _is_intact(stored: memoryview, file: SortedRows) -> bool:
    sizes = file.table[:, 0].tolist()
    if len(stored) != sum(sizes) or len(file.digests) != DIGEST * len(sizes):
        return False
    start = 0
    for number, size in enumerate(sizes):
        if hashlib.sha256(stored[start : start + size]).digest() != file.digests[DIGEST * number :][:DIGEST]:
            return False
        start += size
    return True


def _damaged(place: Piece) -> DataCorruption:
    return DataCorruption(f"{place.uri}: its {place.name} is missing or damaged; {_NEXT}")


def _schema(snapshots: int) -> pa.Schema:
    return pa.schema([(_USER, pa.int64()), (_CONTRIBUTIONS, pa.list_(pa.float32(), snapshots))])


def _uri(directory: str, part: int) -> str:
    return f"{directory}/part-{part:05d}.arrow"


def _note(directory: str, part: int) -> str:
    return f"{directory}/part-{part:05d}.json"
