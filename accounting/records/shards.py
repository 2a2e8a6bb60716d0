"""Norm shards as Arrow files; their columns are defined only here.

A norm snapshot at step s holds, for every training example, the contribution of its gradient from step s up to the next
snapshot. Part p holds the same examples in every snapshot, so that each part can be accounted for on its own.
Everything here is derived from single examples and stored as private.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from accounting.errors import START_ANEW, DataCorruption, InvalidInput, PrivateDetail, keep_whole, require_whole
from accounting.records.parts import PartRecord, PartStore, RepeatedIds, read_part

Floats = npt.NDArray[np.floating[Any]]
Integers = npt.NDArray[np.integer[Any]]

NORM_SCHEMA = pa.schema(
    [
        ("example_id", pa.int64()),
        ("group", pa.int32()),
        ("norm", pa.float32()),
        ("contribution", pa.float32()),
        ("loss", pa.float32()),
    ]
)

ROUNDING = 1e-6
"""Rounding in 32-bit arithmetic may raise a contribution above 1 by up to this much; it is then stored as 1."""


@dataclass(frozen=True)
class NormSnapshot:
    """Gradient norms of every training example before ``step``; all arrays have shape [examples].

    contributions are what an example adds to the clipped sum over that sum's sensitivity, in [0, 1]; norms are the
    gradient norms before clipping. A norm may be non-finite: what counts for privacy is its contribution.
    """

    step: int
    example_ids: Integers
    groups: Integers
    norms: Floats
    contributions: Floats
    losses: Floats

    def __post_init__(self) -> None:
        keep_whole(self, "step", "step of a norm snapshot", at_least=0)
        shapes = {name: np.shape(getattr(self, name)) for name in _SNAPSHOT_COLUMNS}
        if len(set(shapes.values())) != 1 or np.ndim(self.example_ids) != 1:
            raise InvalidInput(f"the columns of a norm snapshot must share one length, but have shapes {shapes}")
        if not _distinct(np.asarray(self.example_ids)):
            raise InvalidInput(f"example ids repeat in the snapshot at step {self.step}; give every record its own")
        check_contributions(self.contributions, f"snapshot at step {self.step}")


def _distinct(ids: Integers) -> bool:
    """Whether no id repeats. Ids in ascending order, which is usual, need no search: it took longer than all else."""
    return bool((ids[1:] > ids[:-1]).all()) or len(np.unique(ids)) == len(ids)


_SNAPSHOT_COLUMNS = ("example_ids", "groups", "norms", "contributions", "losses")


def check_contributions(contributions: Floats, where: str) -> None:
    """Raise `InvalidInput` unless every contribution lies in [0, 1]; NaN does not.

    The contributions are private, so the message quotes none of them.
    """
    values = np.asarray(contributions)
    wrong = ~((values >= 0.0) & (values <= 1.0 + ROUNDING))
    if wrong.any():
        raise InvalidInput(
            f"{where}: contributions lie outside [0, 1]; a contribution is a clipped norm over the sensitivity that "
            "the noise was scaled to"
        ) from PrivateDetail(f"{int(wrong.sum())} contributions, the first is {values[wrong][0]}")


class NormShardWriter:
    """Writes snapshots into ``directory``, ``rows_per_part`` examples per file; there is one writer per directory."""

    def __init__(self, directory: str, rows_per_part: int = 65_536) -> None:
        rows_per_part = require_whole("rows_per_part", rows_per_part, at_least=1)
        self._rows_per_part = rows_per_part
        self._store = PartStore(directory, NORM_SCHEMA)

    def write(self, snapshot: NormSnapshot) -> None:
        """Store and commit a snapshot.

        Replaying a committed snapshot writes nothing when its bytes are equal and raises `DataCorruption` when they
        are not. Raises `StorageError`, with nothing committed, when the storage refuses.
        """
        table = pa.table(
            {
                "example_id": np.asarray(snapshot.example_ids, np.int64),
                "group": np.asarray(snapshot.groups, np.int32),
                "norm": np.asarray(snapshot.norms, np.float32),
                "contribution": _round_up_to_float32(snapshot.contributions),
                "loss": np.asarray(snapshot.losses, np.float32),
            },
            schema=NORM_SCHEMA,
        )
        starts = range(0, max(table.num_rows, 1), self._rows_per_part)
        self._store.write(
            (snapshot.step, part, table.slice(start, self._rows_per_part)) for part, start in enumerate(starts)
        )


def _round_up_to_float32(contributions: Floats) -> npt.NDArray[np.float32]:
    """The nearest 32-bit values not below the given ones, because storing must not lower an example's cost."""
    stored = np.asarray(contributions).astype(np.float32)
    below = stored < np.asarray(contributions)
    return np.minimum(np.where(below, np.nextafter(stored, np.float32(2.0)), stored), np.float32(1.0))


@dataclass(frozen=True)
class PartNorms:
    """One range of examples across all snapshots.

    example_ids and groups have shape [rows]; steps [snapshots]; norms, contributions and losses [rows, snapshots].
    """

    part: int
    example_ids: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int32]
    steps: npt.NDArray[np.int64]
    norms: npt.NDArray[np.float32]
    contributions: npt.NDArray[np.float32]
    losses: npt.NDArray[np.float32]


@dataclass(frozen=True)
class PartFiles:
    """What the manifest says of one range of examples: its records, one per snapshot, in the order of the steps."""

    directory: str
    records: tuple[PartRecord, ...]

    @property
    def part(self) -> int:
        """Number of the part."""
        return self.records[0].part


@dataclass(frozen=True)
class PartContributions:
    """What accounting needs of one range of examples.

    example_ids, groups and losses (at the last snapshot) have shape [rows], contributions [rows, snapshots].
    """

    example_ids: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int32]
    steps: npt.NDArray[np.int64]
    contributions: npt.NDArray[np.float32]
    losses: npt.NDArray[np.float32]


def read_contributions(files: PartFiles) -> PartContributions:
    """Read a part for accounting: verifies every file and decodes only the columns that are needed.

    Raises: DataCorruption for missing, cut, altered or mismatched files.
    """
    first, last = files.records[0], files.records[-1]
    contributions, repeated = np.empty((len(files.records), first.rows), np.float32), RepeatedIds()
    for number, record in enumerate(files.records):
        wanted = ["example_id", "contribution", *(["group"] if record is first else ())]
        wanted += ["loss"] if record is last else []
        table = read_part(files.directory, NORM_SCHEMA, record, wanted, repeated)
        found = table.column("example_id").to_numpy()
        if record is first:
            ids, groups = found, table.column("group").to_numpy()
        if not np.array_equal(found, ids):
            raise _mismatch(files.directory, record.step or 0, record.part)
        contributions[number] = table.column("contribution").to_numpy()
    steps = np.array([record.step for record in files.records])
    return PartContributions(ids, groups, steps, contributions.T, table.column("loss").to_numpy())


class NormShards:
    """The committed norm shards of a trial. Every read is verified; damage is a `DataCorruption` naming the file."""

    def __init__(self, directory: str) -> None:
        """Read the manifest. Raises `DataCorruption` unless there is a snapshot at step 0 and all are complete."""
        self._store = PartStore(directory, NORM_SCHEMA)
        self._records: dict[int, dict[int, PartRecord]] = {}
        for record in self._store.records.values():
            self._records.setdefault(record.part, {})[record.step or 0] = record
        self.steps = tuple(sorted({step for records in self._records.values() for step in records}))
        self.parts = tuple(sorted(self._records))
        self._require_complete(directory)

    @property
    def uncommitted(self) -> tuple[str, ...]:
        """Part files without a manifest line: training was interrupted, and a resume writes them again."""
        return self._store.uncommitted

    @property
    def examples(self) -> int:
        """Number of training examples."""
        return sum(records[self.steps[0]].rows for records in self._records.values())

    def require_complete(self, examples: int) -> None:
        """Raise `DataCorruption` if a write was interrupted, or if there are not exactly ``examples`` examples."""
        if self.uncommitted:
            raise DataCorruption(
                f"{self._store.directory} holds shards that were never committed, such as {self.uncommitted[0]}: "
                "training was interrupted; resume the trial before accounting for it"
            )
        if self.examples != examples:
            raise DataCorruption(
                f"{self._store.directory} holds {self.examples} examples, but the trace says {examples}; restore the "
                "missing shards or run the trial again"
            )

    def read(self, part: int) -> PartNorms:
        """One part across all snapshots. Raises `DataCorruption` for missing, cut, altered or mismatched files."""
        self._require_part(part)
        rows = self._records[part][self.steps[0]].rows
        norms, contributions, losses = (np.empty((rows, len(self.steps)), np.float32) for _ in range(3))
        ids, groups = np.empty(0, np.int64), np.empty(0, np.int32)
        for column, (step, table) in enumerate(self._snapshots(part)):
            found = table.column("example_id").to_numpy()
            if column == 0:
                ids, groups = found, table.column("group").to_numpy()
            if not np.array_equal(found, ids):
                raise _mismatch(self._store.directory, step, part)
            for target, name in ((norms, "norm"), (contributions, "contribution"), (losses, "loss")):
                target[:, column] = table.column(name).to_numpy()
        return PartNorms(part, ids, groups, np.array(self.steps), norms, contributions, losses)

    def files(self, part: int) -> PartFiles:
        """What the manifest says of one part. Raises `DataCorruption` if there is no such part."""
        self._require_part(part)
        return PartFiles(self._store.directory, tuple(self._records[part][step] for step in self.steps))

    def _require_part(self, part: int) -> None:
        if part not in self._records:
            raise DataCorruption(f"{self._store.directory} has no part {part}; it has parts {self.parts}")

    def _snapshots(self, part: int) -> Iterator[tuple[int, pa.Table]]:
        for step in self.steps:
            yield step, self._store.read(self._records[part][step])

    def _require_complete(self, directory: str) -> None:
        if not self.parts:
            raise DataCorruption(f"{directory} holds no committed norm shards; run or resume the trial first")
        if self.steps[0] != 0:
            raise DataCorruption(
                f"{directory}: the first snapshot is at step {self.steps[0]}, so the steps before it would go "
                "uncounted; restore the snapshot at step 0 or run the trial again"
            )
        if self.parts != tuple(range(len(self.parts))):
            raise DataCorruption(f"{directory}: parts are {self.parts}, so one is missing; resume the trial")
        for part, records in self._records.items():
            for step in self.steps:
                if step not in records or records[step].rows != records[0].rows:
                    raise _mismatch(directory, step, part)


def _mismatch(directory: str, step: int, part: int) -> DataCorruption:
    return DataCorruption(
        f"{directory}: the snapshot at step {step} lacks part {part} or holds other examples there than the first "
        f"snapshot; resume the trial, or {START_ANEW}"
    )
