"""Traces as Arrow files: one row per segment; facts about the whole run are in the schema's metadata."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

import pyarrow as pa

from dpsweep.accounting.errors import DataCorruption, DpsweepError
from dpsweep.accounting.mechanism.plain import of_plain, to_plain
from dpsweep.accounting.mechanism.samplings import Sampling, stored_kinds
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.records.arrow_tables import encode_table, read_table
from dpsweep.accounting.records.files import read_bytes, write_bytes_atomically
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.records.sealed import checksum

_NEXT = "restore it from a backup, or run the trial again"

_COLUMN_TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string()}
_LEAST = 32
"""Bytes that a row takes at least: it is stored as it is, and becomes objects of Python of a kilobyte."""


@functools.cache
def _sampling_columns(kinds: tuple[type[Sampling], ...]) -> Mapping[str, pa.DataType]:
    """Return one column for each field of any of these samplings; cached, as type hints take longer than a trace."""
    return {field.name: _COLUMN_TYPES[get_type_hints(kind)[field.name]] for kind in kinds for field in fields(kind)}


def _schema() -> pa.Schema:
    return pa.schema(
        [
            ("start_step", pa.int64()),
            ("steps", pa.int64()),
            ("noise_multiplier", pa.float64()),
            ("sampling", pa.string()),
            *_sampling_columns(stored_kinds()).items(),
            ("side_queries", pa.list_(pa.struct([("name", pa.string()), ("noise_multiplier", pa.float64())]))),
        ]
    )


def write_trace(path: str, trace: Trace) -> None:
    """Store a trace with a checksum of its content.

    Raises: StorageError when the storage refuses, UnsupportedMechanism for a mechanism that no reader would know.
    """
    run = to_plain(trace)
    rows = [_row(segment) for segment in run.pop("segments")]
    table = pa.Table.from_pylist(rows, schema=_schema())
    table = table.replace_schema_metadata({"run": json.dumps(run), "sha256": checksum([table.to_pylist(), run])})
    write_bytes_atomically(path, encode_table(table, None))


def read_trace(path: str) -> Trace:
    """Return the stored trace.

    Raises: FileNotFoundError when there is none, `DataCorruption` when it is damaged or describes an impossible run.
    """
    data, columns = read_bytes(path), _sampling_columns(stored_kinds())
    try:
        table = read_table(data)
        if not table.schema.equals(_schema()) or _LEAST * table.num_rows > len(data):
            raise ValueError("other columns, or more rows than it has room for")
        rows, run = table.to_pylist(), parsed_json(table.schema.metadata[b"run"])
        intact = table.schema.metadata[b"sha256"].decode() == checksum([rows, run])
    except (pa.ArrowException, ValueError, KeyError, TypeError, OSError):
        intact = False
    if not intact:
        raise DataCorruption(f"{path} is damaged; {_NEXT}")
    try:
        return of_plain({**run, "segments": [_segment(row, columns) for row in rows]})
    except DpsweepError as error:
        raise DataCorruption(f"{path} holds no possible run: {error}; {_NEXT}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataCorruption(f"{path} holds no trace of this version of dpsweep; {_NEXT}") from error


def _row(segment: Mapping[str, Any]) -> dict[str, Any]:
    """Return a segment with one column for each field of its sampling."""
    fields_of_sampling = dict(segment["sampling"])
    return {**segment, "sampling": fields_of_sampling.pop("kind"), **fields_of_sampling}


def _segment(row: Mapping[str, Any], columns: Collection[str]) -> dict[str, Any]:
    own = {name: row[name] for name in columns if row[name] is not None}
    segment = {name: value for name, value in row.items() if name not in columns}
    return {**segment, "sampling": {"kind": row["sampling"], **own}}
