"""Reads one range of examples across all snapshots, from objects or from the files of earlier versions.

Earlier versions wrote a file for each part of each snapshot, and one manifest for all of them, to which every snapshot
added its lines. A trial that began with that layout keeps it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from accounting.errors import START_ANEW, DataCorruption
from accounting.records.files import list_files
from accounting.records.objects import DIGEST, Piece, batch_of, read_piece
from accounting.records.parts import MANIFEST, PartRecord, PartStore, RepeatedIds, corrupt, read_stored, rows_of
from accounting.records.read_ahead import read_in_turn
from accounting.records.snapshots import COMPLETE, Snapshot, committed_snapshots, object_uri, uncommitted

NORM_SCHEMA = pa.schema(
    [
        ("example_id", pa.int64()),
        ("group", pa.int32()),
        ("norm", pa.float32()),
        ("contribution", pa.float32()),
        ("loss", pa.float32()),
    ]
)
COMMITS = (MANIFEST, COMPLETE)
"""Files that mark a folder as holding the norms of a run: of earlier versions, and of this one."""


@dataclass(frozen=True)
class PartFiles(ABC):
    """Where one range of examples is stored: ``rows`` examples, at each of ``steps``."""

    directory: str
    part: int
    rows: int
    steps: tuple[int, ...]

    @property
    @abstractmethod
    def identity(self) -> object:
        """A value that determines the stored rows; its repr is the same in every process."""

    @abstractmethod
    def stored(self, number: int) -> bytes:
        """What is stored of the rows at one of the steps, verified. Raises: DataCorruption, StorageError."""

    @abstractmethod
    def rows_at(
        self, number: int, stored: bytes, columns: Sequence[str] | None = None, ids: RepeatedIds | None = None
    ) -> pa.Table:
        """The rows at one of the steps, of which ``stored`` was read. columns, ids: as for `parts.read_part`.

        Raises: DataCorruption for other rows than there should be.
        """

    def all_stored(self) -> Iterator[bytes]:
        """What is stored of the rows at each of the steps, in their order. Raises: as `stored`."""
        return read_in_turn(self.directory, self.stored, range(len(self.steps)))


@dataclass(frozen=True)
class PartInFiles(PartFiles):
    """A part stored as one file per snapshot. records: of these files, in step order."""

    records: tuple[PartRecord, ...]

    @property
    def identity(self) -> object:
        return self.records

    def stored(self, number: int) -> bytes:
        return read_stored(self.directory, self.records[number])

    def rows_at(
        self, number: int, stored: bytes, columns: Sequence[str] | None = None, ids: RepeatedIds | None = None
    ) -> pa.Table:
        return rows_of(self.directory, NORM_SCHEMA, self.records[number], stored, columns, ids)


@dataclass(frozen=True)
class PartInObjects(PartFiles):
    """A part stored as one batch per snapshot, in the same place of the same object.

    extents: int64 [steps, 3], for each batch its first byte, its size and the size of its object. digests: the sha256
    of each batch. Both are bytes to save memory, as a trial has many parts.
    """

    object_number: int
    extents: bytes
    digests: bytes

    @staticmethod
    def of(directory: str, snapshots: Sequence[Snapshot], part: int) -> PartInObjects:
        """The part with this number of ``snapshots``, which all have the same parts."""
        number, piece = snapshots[0].find(part)
        objects = [snapshot.objects[number] for snapshot in snapshots]
        extents = [(sum(each.sizes[:piece]), each.sizes[piece], sum(each.sizes)) for each in objects]
        return PartInObjects(
            directory=directory,
            part=part,
            rows=snapshots[0].rows_of(part),
            steps=tuple(snapshot.step for snapshot in snapshots),
            object_number=number,
            extents=np.array(extents, np.int64).tobytes(),
            digests=b"".join(each.digest(piece) for each in objects),
        )

    @property
    def identity(self) -> object:
        return self.steps, self.digests

    def stored(self, number: int) -> bytes:
        return read_piece(self._place(number))

    def rows_at(
        self, number: int, stored: bytes, columns: Sequence[str] | None = None, ids: RepeatedIds | None = None
    ) -> pa.Table:
        place = self._place(number)
        table = batch_of(place, stored, NORM_SCHEMA, columns, ids)
        if table.num_rows != self.rows:
            raise corrupt(place.uri, f"part {self.part} has other rows than the manifest says")
        return table

    def _place(self, number: int) -> Piece:
        start, size, whole = np.frombuffer(self.extents, np.int64)[3 * number : 3 * number + 3].tolist()
        return Piece(
            uri=object_uri(self.directory, self.steps[number], self.object_number),
            name=f"part {self.part}",
            start=start,
            size=size,
            whole=whole,
            digest=self.digests[DIGEST * number : DIGEST * (number + 1)],
        )


class StoredNorms(ABC):
    """Contents of a folder of norms by its manifests. steps, parts: ascending; uncommitted: names of files."""

    directory: str
    steps: tuple[int, ...]
    parts: tuple[int, ...]
    uncommitted: tuple[str, ...]

    @abstractmethod
    def rows(self, part: int) -> int:
        """Number of examples of a part."""

    @abstractmethod
    def files(self, part: int) -> PartFiles:
        """Where ``part``, one of ``parts``, is stored."""


class NormsInFiles(StoredNorms):
    """Norms stored by earlier versions: a file for each part of each snapshot."""

    def __init__(self, directory: str) -> None:
        """Raises: DataCorruption when the manifest is damaged, or the snapshots have different parts."""
        store = PartStore(directory, NORM_SCHEMA)
        self._records: dict[int, dict[int, PartRecord]] = {}
        for record in store.records.values():
            self._records.setdefault(record.part, {})[record.step or 0] = record
        self.directory, self.uncommitted = directory, store.uncommitted
        self.steps = tuple(sorted({step for records in self._records.values() for step in records}))
        self.parts = tuple(sorted(self._records))
        for part, records in self._records.items():
            for step in self.steps:
                if step not in records or records[step].rows != records[self.steps[0]].rows:
                    raise mismatch(directory, step, part)

    def rows(self, part: int) -> int:
        return self._records[part][self.steps[0]].rows

    def files(self, part: int) -> PartFiles:
        records = tuple(self._records[part][step] for step in self.steps)
        return PartInFiles(self.directory, part, self.rows(part), self.steps, records)


class NormsInObjects(StoredNorms):
    """Norms stored as a few objects and a manifest for each snapshot."""

    def __init__(self, directory: str, names: Sequence[str]) -> None:
        """names: the files in the folder. Raises: DataCorruption as `committed_snapshots`, or for different parts."""
        self._snapshots = committed_snapshots(directory, names)
        self.directory, self.uncommitted = directory, uncommitted(names)
        self.steps = tuple(snapshot.step for snapshot in self._snapshots)
        self.parts = tuple(range(self._snapshots[0].parts)) if self._snapshots else ()
        for snapshot in self._snapshots:
            if _shape(snapshot) != _shape(self._snapshots[0]):
                raise DataCorruption(
                    f"{directory}: the snapshot at step {snapshot.step} has other parts than the first one; restore it "
                    f"from a backup, or {START_ANEW}"
                )

    def rows(self, part: int) -> int:
        return self._snapshots[0].rows_of(part)

    def files(self, part: int) -> PartFiles:
        return PartInObjects.of(self.directory, self._snapshots, part)


def open_norms(directory: str) -> StoredNorms:
    """The norms in a folder. Raises: DataCorruption when the run was interrupted, and for damaged manifests."""
    names = list_files(directory)
    return NormsInFiles(directory) if MANIFEST in names else NormsInObjects(directory, names)


def mismatch(directory: str, step: int, part: int) -> DataCorruption:
    """The error for a snapshot that does not fit the first one."""
    return DataCorruption(
        f"{directory}: the snapshot at step {step} lacks part {part} or holds other examples there than the first "
        f"snapshot; resume the trial, or {START_ANEW}"
    )


def _shape(snapshot: Snapshot) -> tuple[object, ...]:
    return snapshot.rows, snapshot.rows_per_part, [each.parts for each in snapshot.objects]
