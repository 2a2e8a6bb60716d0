"""Schemas of Parquet files from somebody else, measured before Arrow follows them.

Arrow's reader calls itself for each group of columns in a group: where they are nested without end, the whole process
ends. It also takes minutes for millions of columns. The schema lies in the footer in the order of a walk from the root,
and each element has its number of children (`parquet.thrift`).
"""

from __future__ import annotations

import os
import struct
from typing import BinaryIO, Final

import pyarrow as pa

from dpsweep.accounting.records.compact_thrift import DEEPEST, LIST, WHOLE, CompactThrift

MOST_COLUMNS: Final = 100_000
"""Most columns and groups of columns in a table."""
_MOST_READ: Final = 2**26
"""Bytes of a footer among which its schema must be: writers put it first."""
_END: Final = b"PAR1"
_SCHEMA, _CHILDREN = 2, 5
"""Numbers of the fields FileMetaData.schema and SchemaElement.num_children."""


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
    footer = CompactThrift(file.read(min(length, _MOST_READ)))
    try:
        for number, kind in footer.fields():
            if (number, kind) == (_SCHEMA, LIST):
                _measure(footer)
            else:
                footer.skip(kind)
    except (IndexError, KeyError) as error:
        raise pa.ArrowInvalid("the footer of a Parquet file is cut or altered") from error


def _measure(footer: CompactThrift) -> None:
    """Walk the elements of a schema; ``around`` has the children to come of each group around the next one."""
    columns, _ = footer.list_header()
    if columns > MOST_COLUMNS:
        raise pa.ArrowInvalid(f"more than {MOST_COLUMNS} columns in a Parquet file")
    around: list[int] = []
    for _ in range(columns):
        children = 0
        for number, kind in footer.fields():
            if number == _CHILDREN and kind in WHOLE:
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
