"""The users of each training example, in parts with the same examples as the norms, and its group from a table.

An example of several users has a row for each of them. Private, and written once, before training starts.
"""

from __future__ import annotations

import functools
import io
import json
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.records.arrow_parts import PartRecord, PartStore, read_part, write_once
from dpsweep.accounting.records.files import read_bytes
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.records.parquet_tables import read_parquet
from dpsweep.accounting.records.part_files import PartFiles
from dpsweep.accounting.records.sealed import read_private_sealed, write_private_sealed
from dpsweep.accounting.records.shards import read_contributions

_COLUMNS = ["example_id", "group"]


@dataclass(frozen=True, eq=False)
class GroupFile:
    """The group of each example: example_ids [examples], ascending; labels [examples] into ``names``, sorted."""

    uri: str
    example_ids: NDArray[np.int64]
    labels: NDArray[np.int32]
    names: tuple[str, ...]

    def labels_of(self, example_ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the labels of the given examples. Raises: InvalidInput when one of them has no group."""
        at = np.searchsorted(self.example_ids, example_ids)
        if not np.array_equal(self.example_ids[np.minimum(at, len(self.example_ids) - 1)], example_ids):
            raise InvalidInput(f"{self.uri} gives no group to some training examples; add a row for each of them")
        return self.labels[at]


@functools.lru_cache(maxsize=1)
def read_user_groups(uri: str) -> GroupFile:
    """Read a whole file of groups; cached, because every part of a trial needs it.

    Raises: InvalidInput for a file that is missing, is neither CSV nor Parquet, lacks a column, holds ids that are not
    whole numbers, or names an example twice.
    """
    try:
        data = io.BytesIO(read_bytes(uri))
        if uri.endswith(".parquet"):
            table = read_parquet(data, _COLUMNS)
        else:
            table = csv.read_csv(data, convert_options=csv.ConvertOptions(include_columns=_COLUMNS))
        ids = table.column("example_id").cast(pa.int64()).to_numpy()
        groups = table.column("group").cast(pa.string())
    except FileNotFoundError:
        raise InvalidInput(f"{uri} does not exist; give a CSV or Parquet file of example_id and group") from None
    except MemoryError:
        raise InvalidInput(f"{uri} does not fit into the free memory; use a machine with more of it") from None
    except (pa.ArrowException, KeyError, OSError, ValueError) as error:
        raise InvalidInput(
            f"{uri} cannot be read as groups; it needs the columns example_id, of whole numbers, and group, as CSV "
            "with a header or as .parquet"
        ) from error
    if groups.null_count or len(ids) == 0 or len(np.unique(ids)) != len(ids):
        raise InvalidInput(f"{uri} names an example twice, leaves a group empty or has no rows; give each example one")
    names, labels = np.unique(groups.to_numpy().astype(str), return_inverse=True)
    order = np.argsort(ids)
    return GroupFile(uri, ids[order], labels[order].astype(np.int32), tuple(names.tolist()))


USER_SCHEMA = pa.schema([("example_id", pa.int64()), ("user", pa.int64())])
_SUMMARY = "users.json"
_NEXT = "restore it from a backup, or run the trial again"
Ids = NDArray[np.int64]


def write_users(directory: str, example_ids: Ids, owned: Ids, users: Ids, rows_per_part: int) -> None:
    """Store the users of each example. Writing the same again does nothing.

    owned, users: [pairs], a position in ``example_ids`` and a user of that example, ascending by position. Each example
    has a user. rows_per_part: number of examples in each part. Raises: StorageError.
    """
    table = pa.table({"example_id": example_ids[owned], "user": users}, schema=USER_SCHEMA)
    starts = range(0, max(len(example_ids), 1), rows_per_part)
    places = np.searchsorted(owned, [*starts, len(example_ids)]).tolist()
    parts = ((part, table.slice(start, stop - start)) for part, (start, stop) in enumerate(pairwise(places)))
    write_once(directory, USER_SCHEMA, parts)
    counts = np.unique(users, return_counts=True)[1]
    summary = {"users": len(counts), "most_records": int(counts.max(initial=0))}
    write_private_sealed(f"{directory}/{_SUMMARY}", json.dumps(summary).encode())


@dataclass(frozen=True)
class OwnedPart:
    """A part of the norms, and whose its examples are: the ``record`` of a part in the folder ``directory``."""

    norms: PartFiles
    directory: str
    record: PartRecord

    def users(self) -> Owners:
        """Return whose each example is. Raises: DataCorruption for a file that is missing, cut or altered."""
        table = read_part(self.directory, USER_SCHEMA, self.record)
        return Owners(table.column("example_id").to_numpy(), table.column("user").to_numpy())

    def contributions(self, owners: Owners) -> NDArray[np.float32]:
        """Return what the examples contributed [rows, snapshots], in the order of their users (`users`).

        Raises: DataCorruption when the users are of other examples, and as `read_contributions`.
        """
        rows, ids = read_contributions(self.norms), owners.example_ids
        first = np.flatnonzero(np.concatenate([np.ones(min(len(ids), 1), bool), ids[1:] != ids[:-1]]))
        if not np.array_equal(ids[first], rows.example_ids):
            raise _unfit(self.directory, self.norms.part)
        if len(first) == len(ids):
            return rows.contributions
        return rows.contributions[np.repeat(np.arange(len(first)), np.diff(np.append(first, len(ids))))]


@dataclass(frozen=True)
class Owners:
    """The users of the examples of a part: [rows], a row for each user of an example."""

    example_ids: Ids
    ids: Ids


class StoredUsers:
    """The users of a trial's examples. count: how many; most_records: largest number of records of any of them."""

    def __init__(self, directory: str) -> None:
        """Raises: InvalidInput for a trial whose users are not stored, DataCorruption for damaged files."""
        content = read_private_sealed(f"{directory}/{_SUMMARY}", _NEXT)
        if content is None:
            raise InvalidInput(
                f"{directory} does not exist: the trial's data name no users; name "
                "them (`user` of a table, `user_ids` of `make_split`) and train again, or leave --by-user out"
            )
        summary = parsed_json(content)
        self.count, self.most_records = summary.get("users"), summary.get("most_records")
        if not all(isinstance(number, int) and number >= 0 for number in (self.count, self.most_records)):
            raise DataCorruption(f"{directory}/{_SUMMARY} holds no numbers of users and records; {_NEXT}")
        self._store = PartStore(directory, USER_SCHEMA)

    def digests(self) -> tuple[str, ...]:
        """Return sha256 of the parts, in order."""
        return tuple(record.sha256 for record in sorted(self._store.records.values()))

    def owned(self, norms: PartFiles) -> OwnedPart:
        """Return a part of the norms with its users. Raises: DataCorruption when none are stored of it."""
        record = self._store.records.get(norms.part)
        if record is None:
            raise _unfit(self._store.directory, norms.part)
        return OwnedPart(norms, self._store.directory, record)


def verify_users(directory: str) -> None:
    """Read every committed part. Raises: DataCorruption when one is missing, cut or altered."""
    store = PartStore(directory, USER_SCHEMA)
    for record in store.records.values():
        store.read(record)


def _unfit(directory: str, part: int) -> DataCorruption:
    return DataCorruption(f"{directory}: part {part} is of other examples than the norms; {_NEXT}")
