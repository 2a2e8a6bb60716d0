"""Parquet files whose footers were made to end the process, or to keep it busy."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.records.compact_thrift import DEEPEST
from dpsweep.accounting.records.parquet_schemas import MOST_COLUMNS, require_shallow_schema
from dpsweep.accounting.records.user_files import read_user_groups
from dpsweep.workers.data import load_source
from dpsweep.workers.spec import DataSpec


def number(value: int) -> bytes:
    """A whole number in Thrift's compact protocol."""
    coded, found = (value << 1) ^ (value >> 63), b""
    while coded > 0x7F:
        found, coded = found + bytes([coded & 0x7F | 0x80]), coded >> 7
    return found + bytes([coded])


def length(value: int) -> bytes:
    """The header of a long list of structs."""
    found = b"\xfc"
    while value > 0x7F:
        found, value = found + bytes([value & 0x7F | 0x80]), value >> 7
    return found + bytes([value])


ROOT, GROUP, LEAF = (b"\x48\x01r\x15%b\x00", b"\x35\x00\x18\x01g\x15\x02\x00", b"\x15\x02\x25\x02\x18\x01x\x00")
"""Elements of a schema: the root and a group have a number of children, of which a group has one."""


def of_elements(root: bytes, others: bytes, count: int, claimed: int | None = None) -> bytes:
    """A file without rows, whose footer has these elements. claimed: the length that the file gives of its footer."""
    footer = b"\x15\x02\x19" + length(count) + root + others + b"\x16\x00\x19\x0c\x00"
    return b"PAR1" + footer + struct.pack("<I", len(footer) if claimed is None else claimed) + b"PAR1"


def deep(levels: int) -> bytes:
    return of_elements(ROOT % number(1), levels * GROUP + LEAF, levels + 2)


FORGED = {
    "deep": (deep(90_000), "it has columns nested more than 64 levels deep"),
    "wide": (of_elements(ROOT % number(10**6), 10**6 * LEAF, 10**6 + 1), "it has more than 100000 columns"),
    "wide by its word": (of_elements(ROOT % number(1), LEAF, 2**31 - 1), "it has more than 100000 columns"),
    "children by its word": (of_elements(ROOT % number(2**31 - 1), LEAF, 2), "cannot read"),
    "a footer of gigabytes": (of_elements(ROOT % number(1), LEAF, 2, 2**32 - 1), "ArrowInvalid"),
    "a footer of structs": (b"PAR1" + b"\x5c" * 900_000 + struct.pack("<I", 900_000) + b"PAR1", "ArrowInvalid"),
    "a cut footer": (b"PAR1" + b"\x15\x80" + struct.pack("<I", 2) + b"PAR1", "ArrowInvalid"),
    "no footer": (b"PAR1", "ArrowInvalid"),
}


@pytest.mark.parametrize(("content", "reason"), FORGED.values(), ids=FORGED)
def test_a_forged_footer_is_one_line(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(content)
    with pytest.raises(DataCorruption, match=reason) as caught:
        load_source(DataSpec("parquet", {"path": str(tmp_path / "rows.parquet"), "label": "x"}))
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(InvalidInput, match="cannot be read as groups"):
        read_user_groups(str(tmp_path / "rows.parquet"))


def test_a_folder_of_forged_files_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet" / "below").mkdir(parents=True)
    (tmp_path / "rows.parquet" / "below" / "one").write_bytes(FORGED["deep"][0])
    with pytest.raises(InvalidInput, match=r"rows\.parquet is a folder; give the path of a file"):
        load_source(DataSpec("parquet", {"path": str(tmp_path / "rows.parquet"), "label": "x"}))


def test_what_arrow_writes_is_measured_right() -> None:
    inner: pa.DataType = pa.struct([("a", pa.int8()), ("b", pa.list_(pa.map_(pa.string(), pa.float16())))])
    for depth in (1, 12, 40):
        kind = inner
        for _ in range(depth):
            kind = pa.struct([("z", pa.bool_()), ("y", kind)])
        table = pa.table({"deep": pa.array([], kind), "number": np.array([]), "word": pa.array([], pa.string())})
        file = io.BytesIO()
        parquet.write_table(table, file, compression="zstd")
        require_shallow_schema(file)
        assert parquet.read_metadata(file).num_columns == 5 + depth
    with pytest.raises(pa.ArrowInvalid, match=f"nested more than {DEEPEST} levels"):
        require_shallow_schema(io.BytesIO(deep(DEEPEST)))
    require_shallow_schema(io.BytesIO(deep(DEEPEST - 1)))
    assert MOST_COLUMNS > 10_000
