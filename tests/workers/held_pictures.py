"""Tables of Parquet that hold pictures instead of naming their files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as parquet


def hold(listed: Path, is_nested: bool) -> Path:
    """Return a Parquet file with the rows of a table of `make_listed_images`, and its pictures in the column file.

    is_nested: whether as the package datasets stores them, with the path beside the bytes.
    """
    rows = csv.read_csv(listed)
    contents = [name and (listed.parent / name).read_bytes() for name in rows["file"].to_pylist()]
    held = pa.array([each or None for each in contents], pa.binary())
    if is_nested:
        held = pa.StructArray.from_arrays([held, rows["file"].combine_chunks()], ["bytes", "path"])
    parquet.write_table(rows.set_column(0, "file", held), listed.with_suffix(".parquet"))
    return listed.with_suffix(".parquet")
