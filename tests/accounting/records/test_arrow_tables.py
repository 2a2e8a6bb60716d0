"""Shards that were made to fill the memory."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records import arrow_tables
from dpsweep.accounting.records.arrow_parts import PartStore, RepeatedIds, commit_parts, write_once, write_part
from dpsweep.accounting.records.arrow_tables import Oversized, read_table, stored_column
from dpsweep.accounting.records.epsilon_files import EPSILON_SCHEMA, verify_epsilons
from dpsweep.accounting.records.traces import _schema, read_trace

SCHEMA = pa.schema([("example_id", pa.int64()), ("norm", pa.float32())])


def encoded(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def of_no_bytes(names: Sequence[str], facts: Mapping[str, str]) -> bytes:
    """A kilobyte that claims columns of 2^36 rows, of which Python would make as many values."""
    few, many = (struct.pack("<q", rows) for rows in (1_234_567, 2**36))
    table = pa.table({name: pa.nulls(1_234_567) for name in names}).replace_schema_metadata(facts)
    return encoded(table).replace(few, many)


BOMB = encoded(pa.table({"a": np.zeros(36_000_000, np.int64)}))
"""9 KB that expand to 288 MB."""


def test_what_expands_too_far_is_refused_before_it_does() -> None:
    before = pa.total_allocated_bytes()
    peak = pa.default_memory_pool().max_memory()
    with pytest.raises(Oversized, match=rf"its {len(BOMB)} bytes would expand to more than"):
        read_table(BOMB)
    assert pa.total_allocated_bytes() == before
    assert pa.default_memory_pool().max_memory() == peak


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"example_id": np.arange(70_000), "norm": np.zeros(70_000, np.float32)}),
        pa.table({"word": pa.array(["x", "y"] * 1000).dictionary_encode()}),
        pa.table({"example_id": np.array([], np.int64)}),
    ],
)
def test_other_files_are_read(table: pa.Table) -> None:
    assert read_table(encoded(table)).equals(table)


ERRORS = (pa.ArrowException, ValueError, OSError)
"""What readers of parts and traces turn into `DataCorruption`."""


@pytest.mark.parametrize("cut", range(8, 400, 13))
def test_a_cut_file_is_an_error_of_arrow(cut: int) -> None:
    whole = encoded(pa.table({"example_id": np.arange(100)}))
    with pytest.raises(ERRORS):
        read_table(whole[:cut])


@pytest.mark.parametrize("place", range(8, 400, 13))
def test_a_file_with_an_altered_byte_is_an_error_of_arrow_or_a_table(place: int) -> None:
    """Arrow notices an altered byte of a schema, but not of a value: readers compare the file's sha256 first."""
    altered = bytearray(encoded(pa.table({"example_id": np.arange(100)})))
    altered[place] ^= 0xFF
    with contextlib.suppress(*ERRORS):
        assert read_table(bytes(altered)).num_columns == 1


def part(ids: np.ndarray[Any, np.dtype[np.int64]], norm: float) -> bytes:
    return encoded(pa.table({"example_id": ids, "norm": np.full(len(ids), norm, np.float32)}, SCHEMA))


@pytest.mark.parametrize("other", [np.arange(70_000)[::-1].copy(), np.arange(69_999), np.zeros(70_000, np.int64)])
def test_a_column_is_stored_alike_where_its_values_are_equal(other: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    ids = np.arange(70_000)
    assert stored_column(part(ids, 1.0), 0) == stored_column(part(ids, 2.0), 0)
    assert stored_column(part(ids, 1.0), 1) != stored_column(part(ids, 2.0), 1)
    assert stored_column(part(ids, 1.0), 0) != stored_column(part(other, 1.0), 0)


def test_repeated_ids_are_decoded_once_and_other_ones_again() -> None:
    ids, repeated = np.arange(70_000), RepeatedIds()
    tables = [repeated.read_table(part(own, 1.0), SCHEMA, SCHEMA.names) for own in (ids, ids, ids + 1, ids)]
    for table, own in zip(tables, (ids, ids, ids + 1, ids), strict=True):
        assert table.equals(pa.table({"example_id": own, "norm": np.ones(70_000, np.float32)}, SCHEMA))
    first, second, *_ = (table.column("example_id").chunk(0).buffers()[1].address for table in tables)
    assert first == second


def test_half_of_the_memory_is_the_most_that_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"a": np.random.default_rng(0).integers(0, 9, 1000)})
    monkeypatch.setattr(arrow_tables, "half_of_memory", lambda: 7_000)
    with pytest.raises(Oversized, match="would expand to more than 7000"):
        read_table(encoded(table))


def test_a_trace_of_rows_that_take_no_bytes_fills_no_memory(tmp_path: Path) -> None:
    (tmp_path / "trace.arrow").write_bytes(of_no_bytes(["steps"], {"run": "{}", "sha256": "0"}))
    with pytest.raises(DataCorruption, match=r"trace\.arrow is damaged"):
        read_trace(str(tmp_path / "trace.arrow"))


def test_nor_does_one_of_rows_that_unfold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a trace is stored as it is, and costs Python a kilobyte."""
    table = pa.table({field.name: pa.nulls(20_000, field.type) for field in _schema()}, schema=_schema())
    (tmp_path / "trace.arrow").write_bytes(encoded(table.replace_schema_metadata({"run": "{}", "sha256": "x"})))
    monkeypatch.setattr("dpsweep.accounting.records.traces.checksum", lambda values: pytest.fail("it was unfolded"))
    with pytest.raises(DataCorruption, match="is damaged"):
        read_trace(str(tmp_path / "trace.arrow"))


@pytest.mark.parametrize(
    "claim",
    [None, {"individual_kind": "x", "delta": "1", "method": "rdp"}, {"individual_kind": "estimate", "delta": "x"}],
)
def test_epsilons_that_do_not_say_what_they_are_are_damage(tmp_path: Path, claim: dict[str, str] | None) -> None:
    rows = pa.table({field.name: pa.array([0], field.type) for field in EPSILON_SCHEMA}).replace_schema_metadata(claim)
    commit_parts(str(tmp_path), [write_part(str(tmp_path), 0, rows)])
    with pytest.raises(DataCorruption, match="does not say what they are; account the trial again"):
        verify_epsilons(str(tmp_path))


def test_a_part_says_so_in_one_line(tmp_path: Path) -> None:
    table = pa.table({"example_id": np.zeros(3_000_000, np.int64), "norm": np.zeros(3_000_000, np.float32)}, SCHEMA)
    write_once(str(tmp_path), SCHEMA, [(0, table)])
    store = PartStore(str(tmp_path), SCHEMA)
    (record,) = store.records.values()
    assert record.num_bytes < 10_000
    with pytest.raises(DataCorruption, match=r"part-00000\.arrow: it would expand to far more than its rows need"):
        store.read(record)


def test_so_does_a_trace(tmp_path: Path) -> None:
    (tmp_path / "trace.arrow").write_bytes(BOMB)
    with pytest.raises(DataCorruption, match=r"trace\.arrow is damaged"):
        read_trace(str(tmp_path / "trace.arrow"))


def test_a_schema_of_millions_of_columns_is_refused_before_it_is_followed(tmp_path: Path) -> None:
    """Names of columns are a part of it, as are the facts of a table, which are made sooner."""
    table = pa.table({"a": pa.nulls(0)}).replace_schema_metadata({"run": 2**24 * "a"})
    (tmp_path / "trace.arrow").write_bytes(encoded(table))
    with pytest.raises(Oversized, match="its columns are described in more than 16777216 bytes"):
        read_table((tmp_path / "trace.arrow").read_bytes())
    with pytest.raises(DataCorruption, match=r"trace\.arrow is damaged"):
        read_trace(str(tmp_path / "trace.arrow"))


def test_a_schema_that_is_nested_without_end_is_an_error_of_arrow() -> None:
    kind: pa.DataType = pa.int8()
    for _ in range(200):
        kind = pa.list_(kind)
    with pytest.raises(ERRORS):
        read_table(encoded(pa.table({"a": pa.array([], kind)})))


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**32 - 2])
def test_lengths_of_gigabytes_are_errors_of_arrow(size: int) -> None:
    """The length of a first message, and that of the footer."""
    whole = encoded(pa.table({"a": np.arange(9)}))
    with pytest.raises(ERRORS):
        read_table(whole[:12] + struct.pack("<I", size) + whole[16:])
    assert read_table(whole[:-10] + struct.pack("<I", size) + whole[-6:]).num_rows == 9, "the footer is not used"
