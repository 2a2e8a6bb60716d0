"""Schemas of Parquet files from somebody else, measured before Arrow follows them.

Arrow's reader calls itself for each group of columns in a group: where they are nested without end, the whole process
ends. It also takes minutes for millions of columns. The schema lies in the footer in the order of a walk from the root,
and each element has its number of children (`parquet.thrift`, by Thrift's compact protocol).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import BinaryIO, Final

import pyarrow as pa

MOST_COLUMNS: Final = 100_000
"""Most columns and groups of columns in a table."""
DEEPEST: Final = 64
"""Most levels of groups of columns, and of what else a footer nests."""
_MOST_READ: Final = 2**26
"""Bytes of a footer among which its schema must be: writers put it first."""
_END: Final = b"PAR1"
_SCHEMA, _CHILDREN = 2, 5
"""Numbers of the fields FileMetaData.schema and SchemaElement.num_children."""
_BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT, _UUID = 3, 7, 8, 9, 10, 11, 12, 13
_SIZES: Final = {1: 1, 2: 1, _BYTE: 1, _DOUBLE: 8, _UUID: 16}
"""Bytes of a value by its type; those of the two booleans in a list."""
_WHOLE: Final = (4, 5, 6)


def require_shallow_schema(file: BinaryIO) -> None:
    """Check the schema of a Parquet file; what is no Parquet file is left to its reader to name.

    Raises: pyarrow.ArrowInvalid for one with too many columns, nested too deeply, or cut.
    """
    size = file.seek(0, os.SEEK_END)
    if size < 12:
        return
    file.seek(size - 8)
    length, end = struct.unpack("<I4s", file.read(8))
    if end != _END or length > size - 8:
        return
    file.seek(size - 8 - length)
    footer = _Footer(file.read(min(length, _MOST_READ)))
    try:
        for number, kind in footer.fields():
            if (number, kind) == (_SCHEMA, _LIST):
                _measure(footer)
            else:
                footer.skip(kind)
    except (IndexError, KeyError) as error:
        raise pa.ArrowInvalid("the footer of a Parquet file is cut or altered") from error


def _measure(footer: _Footer) -> None:
    """Walk the elements of a schema; ``around`` has the children to come of each group around the next one."""
    columns, _ = footer.list_header()
    if columns > MOST_COLUMNS:
        raise pa.ArrowInvalid(f"more than {MOST_COLUMNS} columns in a Parquet file")
    around: list[int] = []
    for _ in range(columns):
        children = 0
        for number, kind in footer.fields():
            if number == _CHILDREN and kind in _WHOLE:
                children = footer.signed()
            else:
                footer.skip(kind)
        if around:
            around[-1] -= 1
        if children > 0:
            around.append(children)
        while around and not around[-1]:
            around.pop()
        if len(around) > DEEPEST:
            raise pa.ArrowInvalid(f"columns nested more than {DEEPEST} levels deep in a Parquet file")


class _Footer:
    """Bytes in Thrift's compact protocol, and the place up to which they are read."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield number and type of each field of a struct; the caller reads or skips its value before the next one."""
        number = 0
        while (head := self._byte()) & 0x0F:
            number = number + (head >> 4) if head >> 4 else self.signed()
            yield number, head & 0x0F

    def list_header(self) -> tuple[int, int]:
        """Return the length of a list and the type of its elements."""
        head = self._byte()
        return (head >> 4 if head >> 4 < 15 else self._number()), head & 0x0F

    def signed(self) -> int:
        """Return a whole number."""
        coded = self._number()
        return (coded >> 1) ^ -(coded & 1)

    def skip(self, kind: int, depth: int = 0) -> None:
        """Pass over the value of a field."""
        if kind > 2:  # a boolean field has its value in its type
            self._skip_value(kind, depth)

    def _skip_value(self, kind: int, depth: int) -> None:
        if depth > DEEPEST:
            raise pa.ArrowInvalid(f"values nested more than {DEEPEST} levels deep in a Parquet file")
        if kind in _WHOLE:
            self._number()
        elif kind == _BINARY:
            self._pass(self._number())
        elif kind == _STRUCT:
            for _, inner in self.fields():
                self.skip(inner, depth + 1)
        elif kind in (_LIST, _SET):
            length, inner = self.list_header()
            for _ in range(length):
                self._skip_value(inner, depth + 1)
        elif kind == _MAP:
            length = self._number()
            kinds = self._byte() if length else 0
            for _ in range(length):
                self._skip_value(kinds >> 4, depth + 1)
                self._skip_value(kinds & 0x0F, depth + 1)
        else:
            self._pass(_SIZES[kind])

    def _number(self) -> int:
        found = shift = 0
        while (byte := self._byte()) & 0x80:
            found |= (byte & 0x7F) << shift
            shift += 7
            if shift > 63:
                raise IndexError
        return found | byte << shift

    def _byte(self) -> int:
        byte = self._data[self._at]
        self._at += 1
        return byte

    def _pass(self, size: int) -> None:
        self._at += size
        if self._at > len(self._data):
            raise IndexError
