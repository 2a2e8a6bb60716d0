"""Profile of a table, column by column, from which a sweep is drafted. Computed from the rows, so private data."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from accounting.errors import InvalidInput
from accounting.registry import nearest
from workers.data.conventions import MISSING_SPELLINGS, Convention, convention_of, parsed
from workers.data.table import distinct, read_table
from workers.data.tabular import as_text, is_numeric, numbers


@dataclass(frozen=True)
class ColumnProfile:
    """Profile of one column.

    span: smallest and largest number; None if the column does not hold numbers. whole: whether all numbers are whole.
    values: distinct values as text, as a sweep declares them; None for more than the limit. distinct: number of
    distinct values. missing: share of the rows without a value, in [0, 1]. written: how the texts write numbers, if
    they do. markers: texts besides the empty one that count as missing. nested: the type of values that cannot be read.
    quantiles: the numbers at 5 %, 95 % and 99 % of the rows.
    """

    name: str
    span: tuple[float, float] | None
    whole: bool
    values: tuple[str, ...] | None
    distinct: int
    missing: float
    written: Convention | None = None
    markers: tuple[str, ...] = ()
    nested: str = ""
    quantiles: tuple[float, float, float] = (0.0, 0.0, 0.0)


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
    """The profile of a .csv, .tsv or .parquet file. texts: columns read as text, even if they hold numbers.

    Values are listed up to ``most_values``. Raises: InvalidInput for a missing file or one without rows, DataCorruption
    for one that cannot be read.
    """
    first = read_table(path, dict.fromkeys(texts, ()))
    if first.num_rows == 0:
        raise InvalidInput(f"the table {path} has no rows; give a table with a header and at least one row")
    spelt = read_table(path, dict.fromkeys(first.column_names, MISSING_SPELLINGS[1:]))
    as_texts = {*texts, *(name for name in first.column_names if not _holds_numbers(first[name], spelt[name]))}
    rows = read_table(path, dict.fromkeys(as_texts, ()))
    written = {name: _written(rows[name]) for name in rows.column_names if name in as_texts and name not in texts}
    return TableProfile(
        rows.num_rows,
        tuple(
            replace(
                _column(name, rows[name], name in as_texts, most_values, written.get(name)),
                markers=_markers(spelt[name]),
            )
            for name in rows.column_names
        ),
    )


def _written(values: pa.ChunkedArray) -> Convention | None:
    """How a column of texts writes numbers, if it does."""
    if not pa.types.is_string(values.type):
        return None
    return convention_of(compute.unique(values).drop_null().to_pylist())


def _markers(spelt: pa.ChunkedArray) -> tuple[str, ...]:
    """The texts of a column that count as missing, without the empty one."""
    if not pa.types.is_string(spelt.type):
        return ()
    return tuple(sorted(set(compute.unique(spelt).drop_null().to_pylist()).intersection(MISSING_SPELLINGS[1:])))


def _holds_numbers(values: pa.ChunkedArray, spelt: pa.ChunkedArray) -> bool:
    """Whether a column holds numbers, and not codes such as 007, whose zeros a number would lose."""
    if not is_numeric(values):
        return False
    is_text = pa.types.is_string(spelt.type)
    return not (is_text and compute.any(compute.match_substring_regex(spelt, r"^[+-]?0[0-9]")).as_py())


def _column(
    name: str, values: pa.ChunkedArray, is_text: bool, most_values: int, written: Convention | None
) -> ColumnProfile:
    if pa.types.is_nested(values.type):
        return ColumnProfile(name, None, False, None, 0, 0.0, nested=str(values.type))
    if written is not None:
        values, is_text = parsed(values, written), False
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
    span, (low, high, top) = (float(present.min()), float(present.max())), np.quantile(present, (0.05, 0.95, 0.99))
    quantiles = float(low), float(high), float(top)
    return ColumnProfile(name, span, whole, found, count, missing, written, quantiles=quantiles)
