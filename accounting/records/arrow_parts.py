"""Arrow parts, committed together by a manifest.

A part is committed if and only if ``manifest.jsonl`` lists it, which is written when all parts are durable. Each line
holds the part's number, rows, first and last example id, and the size and sha256 of the stored bytes, which are
encrypted if there is a key.
Readers verify length and sha256 before they decode, because Arrow does not detect a flipped byte. Length and sha256
depend on the rows without noise, so they are private, and error messages, which a sweep may publish, omit them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dpsweep.accounting.errors import START_ANEW, DataCorruption, PrivateDetail
from dpsweep.accounting.records.arrow_tables import Oversized, encode_table, read_table, stored_column
from dpsweep.accounting.records.encryption import decrypted, encrypted
from dpsweep.accounting.records.files import exists, read_range, write_in_private_folder
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.records.sealed import read_private, write_private

MANIFEST = "manifest.jsonl"
_IDS = "example_id"


@dataclass(frozen=True, order=True)
class PartRecord:
    """One line of the manifest. first and last are None for a part without rows."""

    part: int
    rows: int
    first: int | None
    last: int | None
    num_bytes: int
    sha256: str

    @property
    def path(self) -> str:
        """The file, relative to the folder of the manifest."""
        return _path(self.part)

    def to_line(self) -> bytes:
        """Return the record as a line of the manifest."""
        return json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n"


class PartStore:
    """The committed parts of one folder."""

    def __init__(self, directory: str, schema: pa.Schema) -> None:
        """Read the manifest. Raises `DataCorruption` when it is damaged."""
        self.directory = directory.rstrip("/")
        self._schema = schema
        self.records = {record.part: record for record in self._load()}

    def read(self, record: PartRecord) -> pa.Table:
        """Return the rows of a committed part, verified as by `read_part`."""
        return read_part(self.directory, self._schema, record)

    def _load(self) -> list[PartRecord]:
        uri = f"{self.directory}/{MANIFEST}"
        content = read_private(uri) if exists(uri) else b""
        records = [self._parse(line, number, uri) for number, line in enumerate(content.splitlines(True), start=1)]
        if len({record.part for record in records}) != len(records):
            raise corrupt(uri, "it lists a part twice")
        return records

    def _parse(self, line: bytes, number: int, uri: str) -> PartRecord:
        record = PartRecord(**parsed_json(line)) if _LINE.fullmatch(line) else None
        if record is None or record.to_line() != line:
            raise corrupt(uri, f"its line {number} is damaged") from PrivateDetail(f"{line[:80]!r}")
        return record


def write_once(directory: str, schema: pa.Schema, parts: Iterable[tuple[int, pa.Table]]) -> None:
    """Write the tables (part, rows), which have ``schema``, compressed, and commit them together.

    Replaying committed parts with equal bytes does nothing; unequal bytes raise `DataCorruption`.
    """
    committed, records = PartStore(directory, schema).records, list[PartRecord]()
    for part, table in parts:
        record, data = _stored(directory, part, table, pa.Codec("zstd"))
        uri = f"{directory}/{record.path}"
        if not committed:
            write_in_private_folder(uri, data)
        elif committed.get(part) != record:
            raise unrepeated(uri)
        records.append(record)
    if not committed:
        commit_parts(directory, records)


def write_part(directory: str, part: int, table: pa.Table) -> PartRecord:
    """Write one part of the results of a whole run, durably but not committed; returns its line for the manifest.

    Not compressed: compression would save a third of the bytes, but make writing and reading ten times slower.
    """
    record, data = _stored(directory, part, table, None)
    write_in_private_folder(f"{directory}/{record.path}", data)
    return record


def commit_parts(directory: str, records: Iterable[PartRecord]) -> None:
    """Commit exactly these written parts, in place of earlier ones.

    Only for results that can be computed again: after a crash between writing and committing, parts do not match the
    old manifest.
    """
    lines = b"".join(record.to_line() for record in records)
    write_private(f"{directory}/{MANIFEST}", lines)


class RepeatedIds:
    """A cache for reading parts one after the other: equal stored example ids are decoded once."""

    def __init__(self) -> None:
        self._stored: tuple[bytes, ...] = ()
        self._ids: pa.ChunkedArray | None = None

    def read_table(self, content: bytes, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        """Return some columns of a file whose schema starts with ``example_id``. Raises: as
        `arrow_tables.read_table`.
        """
        place = schema.get_field_index(_IDS)
        stored = stored_column(content, place)
        if self._ids is None or stored != self._stored:
            table = read_table(content, columns)
            if _IDS in table.column_names:
                self._stored, self._ids = stored, table.column(_IDS)
            return table
        table = read_table(content, [name for name in columns if name != _IDS])
        return table.add_column(0, schema.field(place), self._ids)


def read_part(directory: str, schema: pa.Schema, record: PartRecord) -> pa.Table:
    """Return the rows of a committed part, verified by length, sha256, schema, row count and first and last example id.

    Raises: DataCorruption for a part that is missing or differs from its record.
    """
    uri = f"{directory}/{record.path}"
    table = decoded(uri, decrypted(uri, _read_stored(uri, record)), schema)
    if (table.num_rows, *_ends(table)) != (record.rows, record.first, record.last):
        raise corrupt(uri, "its rows differ from what the manifest says")
    return table


def _read_stored(uri: str, record: PartRecord) -> bytes:
    """Return what is stored of a committed part, verified by length and sha256.

    Raises: DataCorruption for a part that is missing or differs from its record.
    """
    try:
        data, size = read_range(uri, 0, record.num_bytes)
    except FileNotFoundError:
        raise corrupt(uri, "the manifest lists it, but it is missing") from None
    if size != record.num_bytes:
        raise corrupt(uri, "its length differs from the manifest")
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise corrupt(uri, "its sha256 differs from the manifest")
    return data


def decoded(
    name: str, content: bytes, schema: pa.Schema, columns: Sequence[str] | None = None, ids: RepeatedIds | None = None
) -> pa.Table:
    """Return the rows of the Arrow file ``content``, called ``name`` in messages.

    Decode ``columns``, ``example_id`` among them, or by default all. Parts that probably have equal ids share ``ids``.

    Raises: DataCorruption for content that is no Arrow file, would expand to far too much, or does not have the columns
    of ``schema``.
    """
    try:
        table = (
            read_table(content, columns) if ids is None else ids.read_table(content, schema, columns or schema.names)
        )
    except Oversized as error:
        raise corrupt(name, "it would expand to far more than its rows need") from PrivateDetail(str(error))
    except (pa.ArrowException, OSError, ValueError):
        raise corrupt(name, "it is no Arrow file") from None
    wanted = pa.schema([field for field in schema if columns is None or field.name in columns])
    if not table.schema.equals(wanted) or any(column.null_count for column in table.columns):
        raise corrupt(name, "its columns are others than they should be, or lack values")
    return table


def unrepeated(uri: str) -> DataCorruption:
    """Return the error for a committed file that a replay would have written otherwise."""
    return DataCorruption(
        f"{uri} was committed with other rows than a replay produced: the run does not repeat itself; {START_ANEW}"
    )


def corrupt(uri: str, reason: str) -> DataCorruption:
    """Return the error for a file, or a place in it, that is damaged."""
    return DataCorruption(f"{uri}: {reason}; restore the file from a backup, or {START_ANEW}")


_COUNT, _ID = rb"(?:0|[1-9]\d{0,17})", rb"-?\d{1,19}"
"""Patterns of the numbers in a line; a count has at most 18 digits, so that it fits into 64 bits."""
_LINE = re.compile(
    rb'\{"part":%b,"rows":%b,"first":(?:null|%b),"last":(?:null|%b),"num_bytes":%b,"sha256":"[0-9a-f]{64}"\}\n'
    % (_COUNT, _COUNT, _ID, _ID, _COUNT)
)


def _path(part: int) -> str:
    return f"part-{part:05d}.arrow"


def _stored(directory: str, part: int, table: pa.Table, codec: pa.Codec | None) -> tuple[PartRecord, bytes]:
    """Return the manifest record of a part, and the bytes to store."""
    data = encrypted(f"{directory}/{_path(part)}", encode_table(table, codec))
    digest = hashlib.sha256(data).hexdigest()
    return PartRecord(part, table.num_rows, *_ends(table), len(data), digest), data


def _ends(table: pa.Table) -> tuple[int | None, int | None]:
    """Return the first and the last example id."""
    ids: np.ndarray[Any, np.dtype[np.int64]] = table.column(_IDS).to_numpy()
    return (int(ids[0]), int(ids[-1])) if len(ids) else (None, None)
