"""Tables of Parquet files from somebody else, which unfold to no more than half of the memory.

A file stores a text that many rows share once, and a number that they share hardly at all, so that a few kilobytes
stand for gigabytes. Pages are measured before they are unfolded. Then texts are read as they are stored, as places in a
dictionary, and the bytes that they stand for added up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from dpsweep.accounting.records.memory_limits import half_of_memory
from dpsweep.accounting.records.parquet_pages import Page, pages_of
from dpsweep.accounting.records.parquet_schemas import require_shallow_schema

_TEXT: Final = "BYTE_ARRAY"
_BITS: Final = {"BOOLEAN": 1, "INT64": 64, "DOUBLE": 64, "INT96": 64}
"""Bits of a value by its type, where it does not take 32, as the place of a text does, or a length of its own."""
_OFFSET: Final = 32
"""Bits of the place of a list within the lists around it."""
_AT_ONCE: Final = 2**16
_COPIES: Final = 3
"""How often the pages that are unfolded at once must fit: as they are, as values, and for the other reader."""
_SHARE: Final = 4
"""Texts of which each may repeat the one before are read in blocks that take at most this part of half the memory."""


def read_parquet(source: Path | BinaryIO, columns: Sequence[str] | None = None) -> pa.Table:
    """Return all columns, or some. Unlike `parquet.read_table`, this also reads several columns of one name.

    Raises: MemoryError for a table that unfolds beyond half of the memory; pyarrow's errors for damaged files.
    """
    with _opened(source, columns) as found:
        if missing := {*(columns or ())} - {*found.file.schema_arrow.names}:  # pyarrow passes over them
            raise pa.ArrowInvalid(f"there is no column {min(missing)}")
        _require_room(found.unfolded)
        unfolded = 0
        for batch in found.coded(_AT_ONCE):
            unfolded += _bytes_of(batch)
            _require_room(unfolded)
        return found.file.read(columns)


def parquet_batches(source: Path, rows: int, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    """Yield so many ``rows`` at once, or fewer. Raises: as `read_parquet`, by the size of these rows."""
    with _opened(source, columns) as found:
        _require_room(found.unfolded_by(rows))
        batches = found.file.iter_batches(found.fitting(rows), columns=columns)
        for batch in found.coded(rows):
            _require_room(_bytes_of(batch))
            yield next(batches)


def read_schema(source: Path) -> tuple[pa.Schema, int]:
    """Return the schema and the number of rows. Raises: pyarrow's errors for damaged files."""
    with _checked(source) as (_, file):
        return file.schema_arrow, file.metadata.num_rows


@dataclass(frozen=True)
class _Stored:
    """An open Parquet file, and the pages of the columns to read, by their numbers, over all groups of rows."""

    source: Path | BinaryIO
    file: parquet.ParquetFile
    columns: Sequence[str] | None
    pages: dict[int, list[Page]]

    @property
    def unfolded(self) -> int:
        """Bytes that the columns unfold to at least."""
        described, total = self.file.metadata, 0
        rows = described.num_rows * _OFFSET
        for number, pages in self.pages.items():
            column = described.schema.column(number)
            groups = range(described.num_row_groups)
            values = sum(described.row_group(group).column(number).num_values for group in groups)
            bits = values * _bits(column) + (rows if column.max_repetition_level else 0)
            total += max(bits // 8, sum(page.size for page in pages))
        return total

    def unfolded_by(self, rows: int) -> int:
        """Return the most bytes of pages that so many rows in a block touch."""
        schema = self.file.metadata.schema
        windows = (
            sum(page.size for page in pages)  # rows of lists have any number of values
            if schema.column(number).max_repetition_level
            else _window(pages, rows)
            for number, pages in self.pages.items()
        )
        return sum(windows)

    def coded(self, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield at most so many rows at once, with texts as places in dictionaries where Arrow can read them so."""
        schema = self.file.metadata.schema
        texts = [
            number
            for number, pages in self.pages.items()
            if schema.column(number).physical_type == _TEXT and number not in self._repeating
        ]
        with parquet.ParquetFile(self.source, read_dictionary=texts) as coded:
            yield from coded.iter_batches(self.fitting(rows), columns=self.columns)

    def fitting(self, rows: int) -> int:
        """Return how many of so many rows fit at once, where a row may be as long as all that its page stores."""
        longest = sum(max(page.size for page in self.pages[number]) for number in self._repeating)
        return max(1, min(rows, half_of_memory() // _SHARE // max(1, longest)))

    @cached_property
    def _repeating(self) -> frozenset[int]:
        """Numbers of columns that Arrow cannot read as places in dictionaries."""
        return frozenset(number for number, pages in self.pages.items() if not all(page.in_places for page in pages))


@contextlib.contextmanager
def _checked(source: Path | BinaryIO) -> Iterator[tuple[BinaryIO, parquet.ParquetFile]]:
    """Open a file whose schema Arrow can follow, in a ``with`` block, to read headers of pages and to read rows."""
    with source.open("rb") if isinstance(source, Path) else contextlib.nullcontext(source) as stored:
        require_shallow_schema(stored)
        with parquet.ParquetFile(source) as file:
            yield stored, file


@contextlib.contextmanager
def _opened(source: Path | BinaryIO, columns: Sequence[str] | None) -> Iterator[_Stored]:
    """Open a file in a ``with`` block. Raises: MemoryError when its pages cannot be unfolded side by side."""
    with _checked(source) as (stored, file):
        described = file.metadata
        groups = [described.row_group(number) for number in range(described.num_row_groups)]
        pages = {
            number: [page for group in groups for page in pages_of(stored, group.column(number))]
            for number in range(described.num_columns)
            if _is_read(described.schema.column(number).path, columns)
        }
        _require_room(_COPIES * sum(max((page.size for page in each), default=0) for each in pages.values()))
        yield _Stored(source, file, columns, pages)


def _is_read(path: str, columns: Sequence[str] | None) -> bool:
    return columns is None or any(path == name or path.startswith(f"{name}.") for name in columns)


def _require_room(size: int) -> None:
    if size > half_of_memory():
        raise MemoryError("a Parquet file unfolds beyond it")


def _bits(column: parquet.ColumnSchema) -> int:
    """Return the bits that a value takes, with those of lists and of missing values around it."""
    kind = column.physical_type
    bits: int = 8 * column.length if kind == "FIXED_LEN_BYTE_ARRAY" else _BITS.get(kind, 32)
    bits += _OFFSET * max(0, column.max_repetition_level - 1)
    return bits + int(column.max_definition_level)


def _window(pages: Sequence[Page], rows: int) -> int:
    """Return the most bytes of pages that so many successive rows touch."""
    ends = np.cumsum([0, *(page.values for page in pages)])
    sizes = np.cumsum([0, *(page.size for page in pages)])
    last = np.searchsorted(ends, ends[:-1] + rows)  # of rows from the end of a page on
    return int((sizes[np.minimum(last + 1, len(pages))] - sizes[:-1]).max(initial=0))


def _bytes_of(batch: pa.RecordBatch) -> int:
    return sum(map(_unfolded, batch.columns))


def _unfolded(values: pa.Array) -> int:
    """Return the bytes of the values of a column, of texts without the places of a dictionary that stand for them."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        return compute.sum(compute.take(compute.binary_length(values.dictionary), values.indices)).as_py() or 0
    if pa.types.is_struct(kind):
        return sum(map(_unfolded, values.flatten()))
    if pa.types.is_map(kind):
        return _unfolded(values.keys) + _unfolded(values.items)
    return _unfolded(values.flatten()) if pa.types.is_nested(kind) else int(values.nbytes)
