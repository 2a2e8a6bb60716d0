"""Shards that were made to fill the memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from accounting.errors import DataCorruption
from accounting.records.parts import PartStore
from accounting.records.tables import Oversized, read_table
from accounting.records.traces import read_trace

SCHEMA = pa.schema([("example_id", pa.int64()), ("norm", pa.float32())])


def encoded(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


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


@pytest.mark.parametrize("cut", range(8, 400, 13))
def test_damaged_files_are_an_error_of_arrow(cut: int) -> None:
    whole = encoded(pa.table({"example_id": np.arange(100)}))
    altered = bytearray(whole)
    altered[cut] ^= 0xFF
    for data in (whole[:cut], bytes(altered)):
        try:
            read_table(data)
        except (pa.ArrowException, ValueError, OSError):
            continue


def test_a_part_says_so_in_one_line(tmp_path: Path) -> None:
    store = PartStore(str(tmp_path), SCHEMA)
    table = pa.table({"example_id": np.zeros(3_000_000, np.int64), "norm": np.zeros(3_000_000, np.float32)}, SCHEMA)
    store.write([(0, 0, table)])
    (record,) = PartStore(str(tmp_path), SCHEMA).records.values()
    assert record.num_bytes < 10_000
    with pytest.raises(DataCorruption, match=r"part-00000\.arrow: it would expand to far more than its rows need"):
        store.read(record)


def test_so_does_a_trace(tmp_path: Path) -> None:
    (tmp_path / "trace.arrow").write_bytes(BOMB)
    with pytest.raises(DataCorruption, match=r"trace\.arrow is damaged"):
        read_trace(str(tmp_path / "trace.arrow"))
