"""Norms of a run, snapshot by snapshot.

A norm snapshot at step s holds, for every training example, the contribution of its gradient from step s up to the next
snapshot. Part p holds the same examples in every snapshot, so that each part can be accounted for on its own.
Everything here is derived from single examples and stored as private.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpsweep.accounting.errors import (
    START_ANEW,
    DataCorruption,
    InvalidInput,
    PrivateDetail,
    count_of,
    keep_whole,
    require_whole,
)
from dpsweep.accounting.records.arrow_parts import RepeatedIds
from dpsweep.accounting.records.files import delete, delete_folder, exists, list_files
from dpsweep.accounting.records.part_files import NORM_SCHEMA, PartFiles
from dpsweep.accounting.records.snapshots import COMPLETE, Snapshot, SnapshotWriter, committed_snapshots, uncommitted

AT_MOST = 2
"""Largest number of unfinished pieces of work; handing over another one waits."""


class Background:
    """Runs functions in the order given, in one thread. After a failure no further one is begun.

    The failure is raised by the next call of `do` or `wait`, and by every one after that.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "dpsweep-writer")
        self._pending: deque[Future[None]] = deque()
        self._failure: BaseException | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Hand over some work; waits while `AT_MOST` others are not done."""
        while self._pending and (self._pending[0].done() or len(self._pending) >= AT_MOST):
            self._settle()
        self._raise()
        self._pending.append(self._thread.submit(self._unless_failed, work))

    def wait(self) -> None:
        """Return when everything is done."""
        while self._pending:
            self._settle()
        self._raise()

    def close(self) -> None:
        """Wait for the work that has begun, and drop the rest."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _unless_failed(self, work: Callable[[], None]) -> None:
        self._raise()
        try:
            work()
        except BaseException as error:
            self._failure = error
            raise

    def _settle(self) -> None:
        self._pending[0].result()
        self._pending.popleft()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure


FloatArray = npt.NDArray[np.floating[Any]]
Integers = npt.NDArray[np.integer[Any]]

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
    norms: FloatArray
    contributions: FloatArray
    losses: FloatArray

    def __post_init__(self) -> None:
        keep_whole(self, "step", "step of a norm snapshot", at_least=0)
        shapes = {name: np.shape(getattr(self, name)) for name in _SNAPSHOT_COLUMNS}
        if len(set(shapes.values())) != 1 or np.ndim(self.example_ids) != 1:
            raise InvalidInput(f"the columns of a norm snapshot must share one length, but have shapes {shapes}")
        if not _distinct(np.asarray(self.example_ids)):
            raise InvalidInput(f"example ids repeat in the snapshot at step {self.step}; give every record its own")
        check_contributions(self.contributions, f"snapshot at step {self.step}")


def _distinct(ids: Integers) -> bool:
    """Return whether no id repeats. Ascending ids, the usual case, are recognised without a slow search."""
    return bool((ids[1:] > ids[:-1]).all()) or len(np.unique(ids)) == len(ids)


_SNAPSHOT_COLUMNS = ("example_ids", "groups", "norms", "contributions", "losses")


def check_contributions(contributions: FloatArray, where: str) -> None:
    """Raise `InvalidInput` unless every contribution lies in [0, 1]; NaN does not.

    The contributions are private, so the message quotes none of them.
    """
    values = np.asarray(contributions)
    if not (values.min(initial=0.0) >= 0.0 and values.max(initial=0.0) <= 1.0 + ROUNDING):  # NaN is neither
        wrong = ~((values >= 0.0) & (values <= 1.0 + ROUNDING))
        raise InvalidInput(
            f"{where}: contributions lie outside [0, 1]; a contribution is a clipped norm over the sensitivity that "
            "the noise was scaled to"
        ) from PrivateDetail(f"{int(wrong.sum())} contributions, the first is {values[wrong][0]}")


class NormShardWriter:
    """Writes the snapshots of a run into ``directory``, in its own thread; there is one writer per directory.

    A snapshot is stored as parts of ``rows_per_part`` examples, each with its own sha256. Data that were written are
    certain after `wait`, and complete after `complete`. Every method raises what went wrong in the thread:
    `StorageError`, with the snapshot not committed, or `DataCorruption` for the replay of a committed snapshot with
    other rows.
    """

    def __init__(self, directory: str, rows_per_part: int = 65_536) -> None:
        require_whole("rows_per_part", rows_per_part, at_least=1)
        self._snapshots = SnapshotWriter(directory.rstrip("/"), rows_per_part, list_files(directory))
        self._background = Background()

    def write(self, snapshot: NormSnapshot) -> None:
        """Store a snapshot in the background; its arrays must not change from now on. Waits while two are pending."""
        self._background.do(lambda: self._snapshots.write(snapshot.step, _batch(snapshot)))

    def wait(self) -> None:
        """Return when everything is committed."""
        self._background.wait()

    def complete(self) -> None:
        """Commit the run: nothing is written after the last snapshot. Readers take no run that is not complete."""
        self.wait()
        self._snapshots.complete()

    def close(self) -> None:
        """End the thread after the write it has begun; pending ones are dropped."""
        self._background.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _batch(snapshot: NormSnapshot) -> pa.RecordBatch:
    columns = (
        np.asarray(snapshot.example_ids, np.int64),
        np.asarray(snapshot.groups, np.int32),
        np.asarray(snapshot.norms, np.float32),
        _round_up_to_float32(snapshot.contributions),
        np.asarray(snapshot.losses, np.float32),
    )
    return pa.record_batch([pa.array(column) for column in columns], schema=NORM_SCHEMA)


def _round_up_to_float32(contributions: FloatArray) -> npt.NDArray[np.float32]:
    """Return the nearest 32-bit values not below the given ones, because storing must not lower an example's cost."""
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
class PartContributions:
    """The norms of one range of examples, as accounting needs them.

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
    last = len(files.steps) - 1

    def columns_at(number: int) -> list[str]:
        first, at_last = (["group"] if number == 0 else []), (["loss"] if number == last else [])
        return ["example_id", "contribution", *first, *at_last]

    for number, table in enumerate(files.tables(columns_at, RepeatedIds())):
        if number == 0:
            groups = table.column("group").to_numpy()
            contributions = np.empty((len(files.steps), table.num_rows), np.float32)
        contributions[number] = table.column("contribution").to_numpy()
    ids, losses = table.column("example_id").to_numpy(), table.column("loss").to_numpy()
    return PartContributions(ids, groups, np.array(files.steps), contributions.T, losses)


class NormShards:
    """The norms of a run that ended. Every read is verified; damage is a `DataCorruption` naming the file."""

    def __init__(self, directory: str) -> None:
        """Read the manifests.

        Raises `DataCorruption` unless there is a snapshot at step 0, and all are complete and have the same parts.
        """
        self._directory = directory.rstrip("/")
        names = list_files(self._directory)
        self._snapshots = committed_snapshots(self._directory, names)
        self.uncommitted = uncommitted(names)
        """Files that no manifest lists: training was interrupted, and a resume writes them again."""
        self.steps = tuple(snapshot.step for snapshot in self._snapshots)
        self.parts = tuple(range(self._snapshots[0].parts)) if self._snapshots else ()
        self._require_complete()

    @property
    def examples(self) -> int:
        """Number of training examples."""
        return sum(map(self._snapshots[0].rows_of, self.parts))

    def require_complete(self, examples: int) -> None:
        """Raise `DataCorruption` if a write was interrupted, or if there are not exactly ``examples`` examples."""
        if self.uncommitted:
            raise DataCorruption(
                f"{self._directory} holds shards that were never committed, such as {self.uncommitted[0]}: "
                "training was interrupted; resume the trial before accounting for it"
            )
        if self.examples != examples:
            raise DataCorruption(
                f"{self._directory} holds {count_of(self.examples, 'example')}, but the trace says {examples}; restore "
                "the missing shards or run the trial again"
            )

    def read(self, part: int) -> PartNorms:
        """Return one part across all snapshots. Raises `DataCorruption` for missing, cut, altered or mismatched
        files.
        """
        files = self.files(part)
        for number, table in enumerate(files.tables(lambda _: None)):
            if number == 0:
                ids, groups = (table.column(name).to_numpy() for name in ("example_id", "group"))
                numbers = np.empty((3, table.num_rows, len(self.steps)), np.float32)
            numbers[:, :, number] = [table.column(name).to_numpy() for name in ("norm", "contribution", "loss")]
        return PartNorms(part, ids, groups, np.array(self.steps), *numbers)

    def files(self, part: int) -> PartFiles:
        """Return where one part is stored. Raises `DataCorruption` if there is no such part."""
        if part not in self.parts:
            raise DataCorruption(f"{self._directory} has no part {part}; it has parts 0 to {len(self.parts) - 1}")
        return PartFiles.of(self._directory, self._snapshots, part)

    def verify(self) -> None:
        """Read every byte that is stored. Raises: `DataCorruption` for missing, altered and mismatched files."""
        for part in self.parts:
            self.read(part)

    def _require_complete(self) -> None:
        for snapshot in self._snapshots:
            if _shape(snapshot) != _shape(self._snapshots[0]):
                raise DataCorruption(
                    f"{self._directory}: the snapshot at step {snapshot.step} has other parts than the first one; "
                    f"restore it from a backup, or {START_ANEW}"
                )
        if not self.parts:
            raise DataCorruption(f"{self._directory} holds no committed norm shards; run or resume the trial first")
        if self.steps[0] != 0:
            raise DataCorruption(
                f"{self._directory}: the first snapshot is at step {self.steps[0]}, so the steps before it would go "
                "uncounted; restore the snapshot at step 0 or run the trial again"
            )


def _shape(snapshot: Snapshot) -> tuple[object, ...]:
    return snapshot.rows, snapshot.rows_per_part, [each.parts for each in snapshot.objects]


def has_norms(directory: str) -> bool:
    """Return whether a folder holds the norms of a run that ended."""
    return exists(f"{directory}/{COMPLETE}")


def delete_norms(directory: str) -> Iterator[str]:
    """Delete a folder of norms; yields the name of each file that was deleted.

    The file that commits the norms is deleted first, so that an interrupted deletion leaves only uncommitted files.
    Partial files go with the folder.
    """
    for name in sorted(list_files(directory), key=lambda name: name != COMPLETE):
        delete(f"{directory}/{name}")
        yield name
    delete_folder(directory)
