"""Profile of a table, column by column, from which a sweep is drafted. Computed from the rows, so private data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from accounting.errors import InvalidInput
from accounting.registry import nearest
from workers.data.table import distinct, read_table
from workers.data.tabular import as_text, is_numeric, numbers


@dataclass(frozen=True)
class ColumnProfile:
    """Profile of one column.

    span: smallest and largest number; None if the column does not hold numbers. whole: whether all numbers are whole.
    values: distinct values as text, as a sweep declares them; None for more than the limit. distinct: number of
    distinct values. missing: share of the rows without a value, in [0, 1].
    """

    name: str
    span: tuple[float, float] | None
    whole: bool
    values: tuple[str, ...] | None
    distinct: int
    missing: float


@dataclass(frozen=True)
class TableProfile:
    """The columns of a file, and its number of rows."""

    rows: int
    columns: tuple[ColumnProfile, ...]

    def column(self, name: str, role: str) -> ColumnProfile:
        """The column called ``name``. Raises: InvalidInput with the nearest name if there is none."""
        for column in self.columns:
            if column.name == name:
                return column
        raise InvalidInput(
            f"the {role} column {name!r} is not in the table; {nearest(name, [each.name for each in self.columns])}"
        )


def profile_table(path: str, texts: tuple[str, ...], most_values: int) -> TableProfile:
    """The profile of a .csv or .parquet file. texts: columns read as text, even if they hold numbers.

    Values are listed up to ``most_values``. Raises: InvalidInput for a missing file or one without rows, DataCorruption
    for one that cannot be read.
    """
    first = read_table(path, texts)
    if first.num_rows == 0:
        raise InvalidInput(f"the table {path} has no rows; give a table with a header and at least one row")
    spelt = read_table(path, first.column_names)
    as_texts = {*texts, *(name for name in first.column_names if not _holds_numbers(first[name], spelt[name]))}
    rows = read_table(path, as_texts)
    return TableProfile(
        rows.num_rows,
        tuple(_column(name, rows[name], name in as_texts, most_values) for name in rows.column_names),
    )


def _holds_numbers(values: pa.ChunkedArray, spelt: pa.ChunkedArray) -> bool:
    """Whether a column holds numbers, and not codes such as 007, whose zeros a number would lose."""
    if not is_numeric(values):
        return False
    is_text = pa.types.is_string(spelt.type)
    return not (is_text and compute.any(compute.match_substring_regex(spelt, r"^[+-]?0[0-9]")).as_py())


def _column(name: str, values: pa.ChunkedArray, is_text: bool, most_values: int) -> ColumnProfile:
    known = as_text(values, f"column {name!r}").drop_null()
    count, missing = compute.count_distinct(known).as_py(), 1.0 - len(known) / len(values)
    found = distinct(known) if 0 < count <= most_values else None
    if is_text or len(known) == 0:
        return ColumnProfile(name, None, False, found, count, missing)
    present = numbers(values.drop_null(), name)
    present = present[np.isfinite(present)]
    if present.size == 0:
        return ColumnProfile(name, None, False, found, count, missing)
    whole = bool((present == present.round()).all())
    return ColumnProfile(name, (float(present.min()), float(present.max())), whole, found, count, missing)
