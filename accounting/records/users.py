"""The user of each training example, for data that name users, in parts with the same examples as those of the norms.

Private, and written once, before training starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from accounting.errors import DataCorruption, InvalidInput
from accounting.records.parts import PartStore
from accounting.records.sealed import read_private_sealed, write_private_sealed
from accounting.records.shards import PartContributions

USER_SCHEMA = pa.schema([("example_id", pa.int64()), ("user", pa.int64())])
_SUMMARY = "users.json"
_NEXT = "restore it from a backup, or run the trial again"
Ids = NDArray[np.int64]


def write_users(directory: str, example_ids: Ids, users: Ids, rows_per_part: int) -> None:
    """Store the user [examples] of each example. Writing the same again does nothing. Raises: StorageError."""
    table = pa.table({"example_id": example_ids, "user": users}, schema=USER_SCHEMA)
    starts = range(0, max(table.num_rows, 1), rows_per_part)
    parts = ((None, part, table.slice(start, rows_per_part)) for part, start in enumerate(starts))
    PartStore(directory, USER_SCHEMA).write(parts)
    counts = np.unique(users, return_counts=True)[1]
    summary = {"users": len(counts), "most_records": int(counts.max(initial=0))}
    write_private_sealed(f"{directory}/{_SUMMARY}", json.dumps(summary).encode())


class StoredUsers:
    """The users of a trial's examples, with one part in memory at a time. most_records: largest number of any user."""

    def __init__(self, directory: str) -> None:
        """Raises: InvalidInput for a trial whose users are not stored, DataCorruption for damaged files."""
        content = read_private_sealed(f"{directory}/{_SUMMARY}", _NEXT)
        if content is None:
            raise InvalidInput(
                f"{directory} does not exist: the trial's data name no users, or an earlier version trained it; name "
                "them (`user` of a table, `user_ids` of `make_split`) and train again, or leave --by-user out"
            )
        summary: dict[str, Any] = json.loads(content)
        self.most_records = int(summary["most_records"])
        self._store = PartStore(directory, USER_SCHEMA)

    def digests(self) -> tuple[str, ...]:
        """sha256 of the parts, in order."""
        return tuple(record.sha256 for record in sorted(self._store.records.values()))

    def of(self, parts: Iterator[tuple[int, PartContributions]]) -> Iterator[tuple[Ids, PartContributions]]:
        """The users [rows] of the examples of each part, with the part. Raises: DataCorruption when they do not fit."""
        records = {record.part: record for record in self._store.records.values()}
        for part, rows in parts:
            table = self._store.read(records[part]) if part in records else None
            if table is None or not np.array_equal(table.column("example_id").to_numpy(), rows.example_ids):
                raise DataCorruption(
                    f"{self._store.directory}: part {part} is of other examples than the norms; {_NEXT}"
                )
            yield table.column("user").to_numpy(), rows
