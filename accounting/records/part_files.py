"""Read one range of examples across all snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dpsweep.accounting.errors import START_ANEW, DataCorruption
from dpsweep.accounting.records.arrow_parts import RepeatedIds, corrupt
from dpsweep.accounting.records.files import read_in_turn
from dpsweep.accounting.records.snapshot_objects import DIGEST, Piece, batch_of, read_piece
from dpsweep.accounting.records.snapshots import Snapshot, object_uri

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

    def tables(
        self, columns_at: Callable[[int], Sequence[str] | None], ids: RepeatedIds | None = None
    ) -> Iterator[pa.Table]:
        """Yield the rows at each of the steps, verified: of the same examples in the same order.

        columns_at: columns by the number of a step, as for `decoded`, as are ids. Raises: DataCorruption for missing,
        cut, altered or mismatched files, StorageError.
        """
        first = None
        stored = read_in_turn(self.directory, self._stored, range(len(self.steps)))
        for number, content in enumerate(stored):
            table = self._rows_at(number, content, columns_at(number), ids)
            found = table.column("example_id").to_numpy()
            first = found if first is None else first
            if not np.array_equal(found, first):
                raise DataCorruption(
                    f"{self.directory}: the snapshot at step {self.steps[number]} lacks part {self.part} or holds "
                    f"other examples there than the first snapshot; resume the trial, or {START_ANEW}"
                )
            yield table

    def _stored(self, number: int) -> bytes:
        return read_piece(self._place(number))

    def _rows_at(self, number: int, stored: bytes, columns: Sequence[str] | None, ids: RepeatedIds | None) -> pa.Table:
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
