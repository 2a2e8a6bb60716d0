"""A reader of Thrift's compact protocol, in which Parquet describes a file and each of its pages (`parquet.thrift`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

DEEPEST: Final = 64
"""Most levels of structs and lists in one another."""
I32, LIST, STRUCT = 5, 9, 12
"""Types of values."""
WHOLE: Final = (4, I32, 6)
"""Types of whole numbers."""
_BYTE, _DOUBLE, _BINARY, _SET, _MAP, _UUID = 3, 7, 8, 10, 11, 13
_SIZES: Final = {1: 1, 2: 1, _BYTE: 1, _DOUBLE: 8, _UUID: 16}
"""Bytes of a value by its type; those of the two booleans in a list."""


class CompactThrift:
    """Bytes in Thrift's compact protocol, and the place up to which they are read.

    Its methods raise IndexError or KeyError for bytes that are cut or altered, and pyarrow.ArrowInvalid for values
    nested too deeply.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

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
        if kind in WHOLE:
            self._number()
        elif kind == _BINARY:
            self._pass(self._number())
        elif kind == STRUCT:
            for _, inner in self.fields():
                self.skip(inner, depth + 1)
        elif kind in (LIST, _SET):
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
        byte = self._data[self.at]
        self.at += 1
        return byte

    def _pass(self, size: int) -> None:
        self.at += size
        if self.at > len(self._data):
            raise IndexError
