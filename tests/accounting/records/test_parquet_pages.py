"""Parquet files whose pages unfold to far more than their footers say."""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records import parquet_tables
from dpsweep.accounting.records.parquet_pages import pages_of
from dpsweep.accounting.records.parquet_tables import parquet_batches, read_parquet
from dpsweep.accounting.records.user_files import read_user_groups
from dpsweep.workers.data.table_files import read_table_file

MIB = 2**20
REFUSED = r"bomb\.parquet does not fit into the free memory"
ENCODINGS = ["PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"]


@contextlib.contextmanager
def at_most(most: int) -> Iterator[None]:
    """Check that Arrow allocates at most so many bytes at once in a ``with`` block."""
    before = pa.default_memory_pool()
    counted = pa.proxy_memory_pool(before)
    pa.set_memory_pool(counted)
    try:
        yield
    finally:
        pa.set_memory_pool(before)
    assert counted.max_memory() <= most


def number(value: int, size: int) -> bytes:
    """A whole number in Thrift's compact protocol, in so many bytes."""
    coded = [value << 1 >> 7 * place & 0x7F for place in range(size)]
    return bytes([*(byte | 0x80 for byte in coded[:-1]), coded[-1]])


def stored(table: pa.Table, path: Path, **options: object) -> None:
    """Write a table whose footer says that each column unfolds to a kilobyte."""
    parquet.write_table(table, path, compression="zstd", write_statistics=False, store_schema=False, **options)
    content, described = path.read_bytes(), parquet.read_metadata(path)
    (length,) = struct.unpack("<I", content[-8:-4])
    body, footer = content[: -8 - length], content[-8 - length :]
    for group in map(described.row_group, range(described.num_row_groups)):
        for size in {group.column(place).total_uncompressed_size for place in range(described.num_columns)} - {1000}:
            coded = next(number(size, each) for each in range(1, 9) if size < 2 ** (7 * each - 1))
            footer = footer.replace(coded, number(min(size, 1000), len(coded)))
    path.write_bytes(body + footer)
    forged = parquet.read_metadata(path).row_group(0)
    assert max(forged.column(place).total_uncompressed_size for place in range(described.num_columns)) == 1000


def test_columns_of_one_large_page_each_are_refused_before_they_unfold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_tables, "half_of_memory", lambda: 16 * MIB)
    path = tmp_path / "bomb.parquet"
    texts = {f"s{place}": ["z" * MIB] for place in range(8)} | {"example_id": ["1"], "group": ["z" * 8 * MIB]}
    stored(pa.table(texts), path, use_dictionary=False)
    with at_most(MIB):
        with pytest.raises(InvalidInput, match=REFUSED):
            read_table_file(str(path), {})
        with pytest.raises(InvalidInput, match=REFUSED):
            read_user_groups(str(path))
        with pytest.raises(MemoryError):
            next(parquet_batches(path, 1, None))
    assert next(parquet_batches(path, 1, ["s0", "s1"])).num_rows == 1


def test_blocks_of_rows_with_a_page_each_are_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_tables, "half_of_memory", lambda: 16 * MIB)
    path = tmp_path / "bomb.parquet"
    texts = pa.table({"s": [f"{place:02}{'z' * MIB}" for place in range(40)]})
    stored(texts, path, use_dictionary=False, data_page_size=1, write_batch_size=1)
    with at_most(MIB):
        with pytest.raises(MemoryError):
            next(parquet_batches(path, 40, None))
        with pytest.raises(MemoryError):
            read_parquet(path)
    assert sum(batch.num_rows for batch in parquet_batches(path, 4, None)) == 40


def test_lists_in_lists_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value has a list of its own on every level, and all take some bytes of the file."""
    values: pa.Array = pa.nulls(2**16, pa.int64())
    for _ in range(20):
        values = pa.ListArray.from_arrays(pa.array(range(2**16 + 1), pa.int32()), values)
    parquet.write_table(pa.table({"x": values}), tmp_path / "bomb.parquet", compression="zstd", store_schema=False)
    monkeypatch.setattr(parquet_tables, "half_of_memory", lambda: 4 * MIB)
    with at_most(MIB), pytest.raises(InvalidInput, match=REFUSED):
        read_table_file(str(tmp_path / "bomb.parquet"), {})


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_texts_in_every_encoding_are_read(tmp_path: Path, encoding: str) -> None:
    """Arrow reads some of them not as places in a dictionary."""
    table = pa.table({"s": [f"text {place // 3}" for place in range(1000)], "x": range(1000)})
    path = tmp_path / "table.parquet"
    parquet.write_table(table, path, use_dictionary=False, column_encoding={"s": encoding}, row_group_size=300)
    assert read_parquet(path).equals(table)
    assert read_table_file(str(path), {})["s"].equals(table["s"])
    assert pa.Table.from_batches(parquet_batches(path, 7, ["s"])).equals(table.select(["s"]))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_text_that_each_row_repeats_is_refused_before_it_unfolds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    path = tmp_path / "bomb.parquet"
    table = pa.table({"s": ["z" * MIB] * 64})
    coded = {"s": encoding}
    parquet.write_table(table, path, use_dictionary=False, column_encoding=coded, compression="zstd")
    monkeypatch.setattr(parquet_tables, "half_of_memory", lambda: 32 * MIB)
    with at_most(40 * MIB), pytest.raises(InvalidInput, match=REFUSED):
        read_table_file(str(path), {})


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("has_dictionary", [False, True])
def test_pages_are_those_that_arrow_wrote(version: str, has_dictionary: bool) -> None:
    generator = np.random.default_rng(0)
    table = pa.table(
        {
            "x": generator.normal(size=5000),
            "s": pa.array([None if place % 7 == 0 else f"text {place % 50}" for place in range(5000)]),
            "l": pa.array([[place] * (place % 4) for place in range(5000)]),
        }
    )
    file = io.BytesIO()
    options = {"data_page_version": version, "use_dictionary": has_dictionary, "data_page_size": 1000}
    parquet.write_table(table, file, compression="snappy", row_group_size=2000, write_batch_size=100, **options)
    described = parquet.read_metadata(file)
    for group in map(described.row_group, range(3)):
        for place in range(3):
            column = group.column(place)
            pages = list(pages_of(file, column))
            assert sum(page.values for page in pages) == column.num_values
            sizes = sum(page.size for page in pages)
            assert sizes < column.total_uncompressed_size <= sizes + 200 * len(pages), "with the headers"
            assert all(page.in_places for page in pages)
            assert len(pages) >= 3


def test_headers_that_are_cut_or_altered_are_named(tmp_path: Path) -> None:
    file = io.BytesIO()
    parquet.write_table(pa.table({"x": range(100)}), file, use_dictionary=False, compression=None)
    column = parquet.read_metadata(file).row_group(0).column(0)
    whole = file.getvalue()
    first = column.data_page_offset
    for altered in (whole[:first], whole[: first + 3], whole[:first] + 30 * b"\xff" + whole[first + 30 :]):
        with pytest.raises(pa.ArrowInvalid, match="the header of a page of a Parquet file is cut or altered"):
            list(pages_of(io.BytesIO(altered), column))
