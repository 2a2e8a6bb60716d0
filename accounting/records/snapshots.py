"""The snapshots of a run: each is a folder of objects with a manifest that commits it; ``complete.json`` ends the run.

``step=00000400/manifest.json`` is written once, after the objects beside it. It holds the snapshot's number and the
digest of the manifest before it. ``complete.json``, written when the run ends, holds the number of snapshots and the
digest of the last manifest. So a lost snapshot, even the last one, is noticed; without it the steps after it would be
accounted with the contributions of the snapshot before.

Lengths and hashes depend on the rows without noise, so manifests are private, and error messages omit them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dpsweep.accounting.errors import START_ANEW, DataCorruption
from dpsweep.accounting.records.arrow_parts import unrepeated
from dpsweep.accounting.records.files import read_in_turn, write_in_private_folder
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.records.sealed import read_private_sealed, write_private_sealed
from dpsweep.accounting.records.snapshot_objects import DIGEST, ObjectRecord, make_pieces

COMPLETE = "complete.json"
ROWS_PER_OBJECT = 2**23
"""Rows of an object, unless a single part has more: about 94 MB."""
_MANIFEST = re.compile(r"step=(\d{8,18})/manifest\.json")
_OBJECT = re.compile(r"step=(\d{8,18})/object-\d{5,}\.arrow")
_MOST = 2**40
"""Above every number in a manifest. Sums of as many as fit into one fit into 64 bits."""
_NEXT = f"restore it from a backup, or {START_ANEW}"


@dataclass(frozen=True)
class Snapshot:
    """The manifest of a snapshot.

    `number`: how many snapshots precede it. `previous`: `digest` of the one before, or "" for the first. `rows`: number
    of examples, in parts of ``rows_per_part``; the last part may have fewer.
    """

    step: int
    number: int
    previous: str
    rows: int
    rows_per_part: int
    objects: tuple[ObjectRecord, ...]

    @property
    def digest(self) -> str:
        """sha256 of the content."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @property
    def parts(self) -> int:
        """Number of parts; an empty data set has one empty part."""
        return max(1, -(-self.rows // self.rows_per_part))

    def rows_of(self, part: int) -> int:
        """Return the rows of one part."""
        return min(self.rows_per_part, self.rows - part * self.rows_per_part)

    def to_json(self) -> bytes:
        """Return the manifest without its checksum."""
        objects = [{"sizes": each.sizes, "digests": each.digests.hex()} for each in self.objects]
        return json.dumps({**vars(self), "objects": objects}).encode()

    @staticmethod
    def from_json(content: bytes, step: int, uri: str) -> Snapshot:
        """Return the snapshot at ``step`` whose manifest this is. Raises: DataCorruption for any other content."""
        try:
            values: dict[str, Any] = parsed_json(content)
            objects = tuple(
                ObjectRecord(tuple(each["sizes"]), bytes.fromhex(each["digests"])) for each in values.pop("objects")
            )
            found = Snapshot(**values, objects=objects)
            whole = found.to_json() == content and found._is_whole(step)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
            whole = False
        if not whole:
            raise DataCorruption(f"{uri} is damaged: it is not the manifest of a snapshot at step {step}; {_NEXT}")
        return found

    def _is_whole(self, step: int) -> bool:
        """Return whether the fields are consistent."""
        numbers = (self.step, self.number, self.rows, self.rows_per_part, *(n for o in self.objects for n in o.sizes))
        return (
            all(type(each) is int and 0 <= each < _MOST for each in numbers)
            and isinstance(self.previous, str)
            and self.step == step
            and self.rows_per_part > 0
            and sum(each.parts for each in self.objects) == self.parts
            and all(each.parts > 0 and len(each.digests) == DIGEST * len(each.sizes) for each in self.objects)
        )

    def find(self, part: int) -> tuple[int, int]:
        """Return the object that holds a part, and which of its pieces the part is."""
        for number, each in enumerate(self.objects):
            if part < each.parts:
                return number, part
            part -= each.parts
        raise IndexError(part)


class SnapshotWriter:
    """Writes the snapshots of one run into a folder, in the order of their steps; there is one writer per folder."""

    def __init__(self, directory: str, rows_per_part: int, names: Sequence[str]) -> None:
        """names: the files that are in the folder."""
        self.directory, self._rows_per_part = directory, rows_per_part
        self._committed = _steps(names)
        self._last: Snapshot | None = None

    def write(self, step: int, batch: pa.RecordBatch) -> None:
        """Store and commit the rows of a snapshot.

        Replaying a committed snapshot with equal bytes does nothing. Raises: DataCorruption for unequal bytes;
        StorageError, with nothing committed.
        """
        committed, before, records = step in self._committed, self._before(step), []
        for uri, batches in self._objects(step, batch):
            record, pieces = make_pieces(uri, batches)
            if not committed:
                write_in_private_folder(uri, *pieces)
            records.append(record)
        snapshot = Snapshot(
            step=step,
            number=0 if before is None else before.number + 1,
            previous="" if before is None else before.digest,
            rows=batch.num_rows,
            rows_per_part=self._rows_per_part,
            objects=tuple(records),
        )
        if not committed:
            write_private_sealed(_manifest(self.directory, step), snapshot.to_json())
            self._committed.add(step)
        elif committed_snapshot(self.directory, step) != snapshot:
            raise unrepeated(_manifest(self.directory, step))
        self._last = snapshot

    def complete(self) -> None:
        """Record that the snapshots written so far are all of the run. Raises: DataCorruption where there are others.

        A run that is resumed after its last snapshot writes none; the committed ones are then all of it.
        """
        if not self._committed:
            return
        last = self._last or committed_snapshot(self.directory, max(self._committed))
        uri = f"{self.directory}/{COMPLETE}"
        content = json.dumps({"snapshots": last.number + 1, "last": last.digest}).encode()
        stored = read_private_sealed(uri, _NEXT)
        if max(self._committed) != last.step or stored not in (None, content):
            raise unrepeated(uri)
        if stored is None:
            write_private_sealed(uri, content)

    def _before(self, step: int) -> Snapshot | None:
        """Return the committed snapshot before the one at ``step``."""
        if self._last is not None and self._last.step < step:
            return self._last
        earlier = max((each for each in self._committed if each < step), default=None)
        return None if earlier is None else committed_snapshot(self.directory, earlier)

    def _objects(self, step: int, batch: pa.RecordBatch) -> Iterator[tuple[str, list[pa.RecordBatch]]]:
        """Yield the name of each object, and its parts."""
        size = self._rows_per_part
        parts = [batch.slice(start, size) for start in range(0, max(batch.num_rows, 1), size)]
        together = max(1, ROWS_PER_OBJECT // size)
        for number, start in enumerate(range(0, len(parts), together)):
            yield object_uri(self.directory, step, number), parts[start : start + together]


def committed_snapshot(directory: str, step: int) -> Snapshot:
    """Return a committed snapshot. Raises: DataCorruption when its manifest is missing or damaged."""
    uri = _manifest(directory, step)
    content = read_private_sealed(uri, _NEXT)
    if content is None:
        raise DataCorruption(f"{uri} is missing; {_NEXT}")
    return Snapshot.from_json(content, step, uri)


def committed_snapshots(directory: str, names: Sequence[str]) -> tuple[Snapshot, ...]:
    """Return all snapshots of a run that ended, in the order of their steps. names: the files that are in the folder.

    Raises: DataCorruption when the run did not end, and for manifests that are missing or damaged.
    """
    uri, steps = f"{directory}/{COMPLETE}", sorted(_steps(names))
    content = read_private_sealed(uri, _NEXT)
    if not names:
        raise DataCorruption(f"{directory} holds no committed norm shards; run or resume the trial first")
    if content is None:
        raise DataCorruption(f"{directory} holds no {COMPLETE}: training was interrupted; resume the trial")
    found = tuple(read_in_turn(directory, lambda step: committed_snapshot(directory, step), steps))
    previous = ""
    for number, each in enumerate(found):
        if (each.number, each.previous) != (number, previous):
            raise DataCorruption(
                f"{_manifest(directory, each.step)} does not follow the snapshot before it, of which one is missing or "
                f"of another run; {_NEXT}"
            )
        previous = each.digest
    if parsed_json(content) != {"snapshots": len(found), "last": previous}:
        raise DataCorruption(f"{directory}: the snapshots end before or after what {uri} says; {_NEXT}")
    return found


def uncommitted(names: Sequence[str]) -> tuple[str, ...]:
    """Return objects of snapshots without a manifest, among the files of a folder."""
    committed = _steps(names)
    found = ((name, _OBJECT.fullmatch(name)) for name in names)
    return tuple(name for name, match in found if match and int(match[1]) not in committed)


def _steps(names: Sequence[str]) -> set[int]:
    """Return the steps of the committed snapshots."""
    return {int(match[1]) for name in names if (match := _MANIFEST.fullmatch(name))}


def _manifest(directory: str, step: int) -> str:
    return f"{directory}/step={step:08d}/manifest.json"


def object_uri(directory: str, step: int, number: int) -> str:
    """Return the name of an object of a snapshot."""
    return f"{directory}/step={step:08d}/object-{number:05d}.arrow"
