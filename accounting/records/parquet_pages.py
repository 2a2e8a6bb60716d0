"""Pages of Parquet files from somebody else, measured before Arrow unfolds them.

A column is stored in pages, and each is unfolded as a whole to the size that its header gives. The footer also gives
sizes, which Arrow does not compare: a file of 26 kB whose footer gave a kilobyte took 4 GB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as parquet

from dpsweep.accounting.records.compact_thrift import I32, STRUCT, CompactThrift

_HEADER: Final = (2**10, 2**24)
"""Bytes of a header: of nearly all, which have no long statistics, and of the longest that Arrow accepts."""
_PADDING: Final = 100
"""Bytes by which Arrow goes beyond a column, whose size old writers gave too small."""
_TYPE, _UNFOLDED, _STORED = 1, 2, 3
"""Numbers of the fields of a PageHeader."""
_VALUES: Final = 1
_ROWS: Final = {0: (5, 2), 3: (8, 4)}
"""By the types of pages with rows: number of the field that describes them, and in that of their encoding."""
_IN_PLACES: Final = frozenset({0, 2, 8})
"""Encodings of texts that Arrow also reads as places in a dictionary: plain, and two numbers of dictionaries."""


@dataclass(frozen=True)
class Page:
    """A page: the bytes that it unfolds to, its values (rows, but for lists; 0 in a dictionary), and whether Arrow can
    read its texts as places in a dictionary."""

    size: int
    values: int
    in_places: bool


def pages_of(file: BinaryIO, column: parquet.ColumnChunkMetaData) -> Iterator[Page]:
    """Yield the pages of a column of a row group, as far as Arrow reads them.

    Raises: pyarrow.ArrowInvalid for a header that is cut, altered or too long.
    """
    at = min(place for place in (column.dictionary_page_offset, column.data_page_offset) if place is not None)
    end, seen = at + column.total_compressed_size, 0
    while at < end + _PADDING and seen < column.num_values:
        try:
            page, length = _read_page(file, at)
        except (IndexError, KeyError, OSError, ValueError, pa.ArrowInvalid) as error:
            if at >= end:
                return
            raise pa.ArrowInvalid("the header of a page of a Parquet file is cut or altered") from error
        at += length
        seen += page.values
        yield page


def _read_page(file: BinaryIO, at: int) -> tuple[Page, int]:
    """Return the page at a place in the file, and the bytes that it takes there."""
    for size in _HEADER:
        file.seek(at)
        header = CompactThrift(file.read(size))
        try:
            return _parse(header)
        except IndexError:
            if size == _HEADER[-1]:
                raise
    raise AssertionError("the last size returns or raises")


def _parse(header: CompactThrift) -> tuple[Page, int]:
    found: dict[tuple[int, ...], int] = {}
    for number, kind in header.fields():
        if kind == STRUCT:
            found |= {(number, inner): value for inner, value in _whole_numbers(header)}
        elif kind == I32:
            found[number,] = header.signed()
        else:
            header.skip(kind)
    unfolded, stored, values, encoding = found[_UNFOLDED,], found[_STORED,], 0, 0
    if rows := _ROWS.get(found[_TYPE,]):
        values, encoding = found[rows[0], _VALUES], found[rows]
    if min(unfolded, stored, values) < 0:
        raise KeyError("a negative size")
    return Page(unfolded, values, encoding in _IN_PLACES), header.at + stored


def _whole_numbers(header: CompactThrift) -> Iterator[tuple[int, int]]:
    """Yield number and value of each field of a struct that holds a whole number of 32 bits."""
    for number, kind in header.fields():
        if kind == I32:
            yield number, header.signed()
        else:
            header.skip(kind)
