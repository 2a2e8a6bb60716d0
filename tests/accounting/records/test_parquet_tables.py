"""Parquet files of some kilobytes whose texts would fill the memory."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.memory_limits import half_of_memory
from dpsweep.accounting.records.parquet_tables import parquet_batches, read_parquet
from dpsweep.accounting.records.user_files import read_user_groups
from dpsweep.workers.data.table_files import read_table_file

LONG = pa.array(["z" * 2**20])


def repeated(rows: int, text: pa.Array = LONG) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.nulls(rows, pa.int32()).fill_null(0), text)


def nested(kind: str, rows: int) -> list[pa.Array]:
    """Columns in which every row has the same long text."""
    texts = repeated(rows)
    match kind:
        case "list":
            return [pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), texts)]
        case "struct":
            return [pa.StructArray.from_arrays([texts], ["inner"])]
        case "bytes":
            return [repeated(rows, LONG.cast(pa.binary()))]
        case "of one name":
            return [texts, texts]
    return [texts]


@pytest.mark.parametrize("kind", ["text", "list", "struct", "bytes", "of one name"])
def test_a_text_that_all_rows_share_is_refused_before_it_unfolds(tmp_path: Path, kind: str) -> None:
    rows, path = half_of_memory() // 2**20 + 1, tmp_path / "bomb.parquet"
    columns = nested(kind, rows)
    table = pa.table([*columns, pa.array(range(rows))], names=[*len(columns) * ["s"], "x"])
    parquet.write_table(table, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 2**18
    before = pa.total_allocated_bytes()
    with pytest.raises(InvalidInput, match=r"bomb\.parquet does not fit into the free memory"):
        read_table_file(str(path), {})
    assert pa.total_allocated_bytes() - before < 2**24


def test_what_fits_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    texts = pa.table({"s": repeated(8, pa.array(["abc"])), "l": nested("list", 8)[0], "x": pa.array(range(8))})
    parquet.write_table(texts, path, store_schema=False)
    assert read_parquet(path).equals(parquet.read_table(path))
    assert read_parquet(io.BytesIO(path.read_bytes()), ["x"]).column_names == ["x"]
    with pytest.raises(pa.ArrowInvalid, match="there is no column y"):
        read_parquet(path, ["x", "y"])
    batches = parquet_batches(path, 3, ["s"])
    assert [batch.num_rows for batch in batches] == [3, 3, 2]


def test_batches_and_groups_are_refused_too(tmp_path: Path) -> None:
    rows, path = half_of_memory() // 2**20 + 1, tmp_path / "groups.parquet"
    table = pa.table({"example_id": pa.array(range(rows)), "group": repeated(rows)})
    parquet.write_table(table, path, compression="zstd", store_schema=False)
    assert next(parquet_batches(path, 2, None)).num_rows == 2
    with pytest.raises(MemoryError):
        next(parquet_batches(path, rows, None))
    with pytest.raises(InvalidInput, match=r"groups\.parquet does not fit into the free memory"):
        read_user_groups(str(path))
