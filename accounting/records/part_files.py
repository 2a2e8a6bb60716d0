"""Read one range of examples across all snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dpsweep.accounting.errors import START_ANEW, DataCorruption
from dpsweep.accounting.records.arrow_parts import RepeatedIds, corrupt
from dpsweep.accounting.records.files import list_files, read_in_turn
from dpsweep.accounting.records.snapshot_objects import DIGEST, Piece, batch_of, read_piece
from dpsweep.accounting.records.snapshots import Snapshot, committed_snapshots, object_uri, uncommitted

NORM_SCHEMA = pa.schema(
    [
        ("example_id", pa.int64()),
        ("group", pa.int32()),
        ("norm", pa.float32()),
        ("contribution", pa.float32()),
        ("loss", pa.float32()),
    ]
)


@dataclass(frozen=True)
class PartFiles:
    """Where one range of examples is stored: ``rows`` examples, at each of ``steps``.

    There is one batch per snapshot, in the same place of the same object. `extents`: int64 [steps, 3], for each batch
    its first byte, its size and the size of its object. `digests`: the sha256 of each batch. Both are bytes to save
    memory, as a trial has many parts.
    """

    directory: str
    part: int
    rows: int
    steps: tuple[int, ...]
    object_number: int
    extents: bytes
    digests: bytes

    @staticmethod
    def of(directory: str, snapshots: Sequence[Snapshot], part: int) -> PartFiles:
        """Return the part with this number of ``snapshots``, which all have the same parts."""
        number, piece = snapshots[0].find(part)
        objects = [snapshot.objects[number] for snapshot in snapshots]
        extents = [(sum(each.sizes[:piece]), each.sizes[piece], sum(each.sizes)) for each in objects]
        return PartFiles(
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
        """A value that determines the stored rows; its repr is the same in every process."""
        return self.steps, self.digests

    def all_stored(self) -> Iterator[bytes]:
        """Yield the stored batch of each step, verified, in their order. Raises: DataCorruption, StorageError."""
        return read_in_turn(self.directory, self.stored, range(len(self.steps)))

    def stored(self, number: int) -> bytes:
        """Return the stored batch of one of the steps, verified. Raises: DataCorruption, StorageError."""
        return read_piece(self._place(number))

    def rows_at(
        self, number: int, stored: bytes, columns: Sequence[str] | None = None, ids: RepeatedIds | None = None
    ) -> pa.Table:
        """Return the rows at one of the steps from its stored batch. columns, ids: as for `decoded`.

        Raises: DataCorruption for other rows than there should be.
        """
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


class StoredNorms:
    """Norms stored as a few objects and a manifest for each snapshot.

    steps, parts: ascending; uncommitted: names of files.
    """

    def __init__(self, directory: str) -> None:
        """Read the manifests. Raises: DataCorruption as `committed_snapshots`, or for snapshots of different parts."""
        names = list_files(directory)
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
        """Return the number of examples of a part."""
        return self._snapshots[0].rows_of(part)

    def files(self, part: int) -> PartFiles:
        """Return the place of a part, one of ``parts``."""
        return PartFiles.of(self.directory, self._snapshots, part)


def mismatch(directory: str, step: int, part: int) -> DataCorruption:
    """Return the error for a snapshot that does not fit the first one."""
    return DataCorruption(
        f"{directory}: the snapshot at step {step} lacks part {part} or holds other examples there than the first "
        f"snapshot; resume the trial, or {START_ANEW}"
    )


def _shape(snapshot: Snapshot) -> tuple[object, ...]:
    return snapshot.rows, snapshot.rows_per_part, [each.parts for each in snapshot.objects]
