"""Tables of Parquet files from somebody else, which unfold to no more than half of the memory.

A file stores a text that many rows share once, and a number that they share hardly at all, so that a few kilobytes
stand for gigabytes. Texts are read as they are stored first, as places in a dictionary, and their lengths added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from dpsweep.accounting.records.files import half_of_memory

_TEXT: Final = "BYTE_ARRAY"
_BYTES: Final = {"BOOLEAN": 0, "INT64": 8, "DOUBLE": 8}
"""Bytes of a value by its type, where it does not take 4, as the place of a text does, or a length of its own."""
_AT_ONCE: Final = 2**16


def read_parquet(source: Path | BinaryIO, columns: Sequence[str] | None = None) -> pa.Table:
    """Return all columns, or some. Unlike `parquet.read_table`, this also reads several columns of one name.

    Raises: MemoryError for a table that unfolds beyond half of the memory; pyarrow's errors for damaged files.
    """
    unfolded = 0
    with parquet.ParquetFile(source) as file:
        if missing := {*(columns or ())} - {*file.schema_arrow.names}:  # pyarrow passes over them
            raise pa.ArrowInvalid(f"there is no column {min(missing)}")
        _require_room(_least_bytes(file.metadata))
        for batch in _coded(source, file, _AT_ONCE, columns):
            unfolded += _text_bytes(batch)
            _require_room(unfolded)
        return file.read(columns)


def parquet_batches(source: Path, rows: int, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    """Yield so many ``rows`` at once. Raises: as `read_parquet`, by the size of these rows."""
    with parquet.ParquetFile(source) as file:
        batches = file.iter_batches(rows, columns=columns)
        for batch in _coded(source, file, rows, columns):
            _require_room(_text_bytes(batch))
            yield next(batches)


def _require_room(size: int) -> None:
    if size > half_of_memory():
        raise MemoryError("a Parquet file unfolds beyond it")


def _least_bytes(described: parquet.FileMetaData) -> int:
    """Return the bytes that a file unfolds to at least."""
    sizes = [_size(described.schema.column(number)) for number in range(described.num_columns)]
    groups = (described.row_group(number) for number in range(described.num_row_groups))
    columns = ((group.column(number), size) for group in groups for number, size in enumerate(sizes))
    return sum(max(each.num_values * size, each.total_uncompressed_size) for each, size in columns)


def _size(column: parquet.ColumnSchema) -> int:
    return column.length if column.physical_type == "FIXED_LEN_BYTE_ARRAY" else _BYTES.get(column.physical_type, 4)


def _coded(
    source: Path | BinaryIO, file: parquet.ParquetFile, rows: int, columns: Sequence[str] | None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of an open file with its texts as places in dictionaries."""
    texts = [number for number in range(len(file.schema)) if file.schema.column(number).physical_type == _TEXT]
    with parquet.ParquetFile(source, read_dictionary=texts) as coded:
        yield from coded.iter_batches(rows, columns=columns)


def _text_bytes(batch: pa.RecordBatch) -> int:
    return sum(map(_unfolded, batch.columns))


def _unfolded(values: pa.Array) -> int:
    """Return the bytes of the texts that a column stores as places in a dictionary, nested ones included."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        return compute.sum(compute.take(compute.binary_length(values.dictionary), values.indices)).as_py() or 0
    if pa.types.is_struct(kind):
        return sum(map(_unfolded, values.flatten()))
    if pa.types.is_map(kind):
        return _unfolded(values.keys) + _unfolded(values.items)
    return _unfolded(values.flatten()) if pa.types.is_nested(kind) else 0
