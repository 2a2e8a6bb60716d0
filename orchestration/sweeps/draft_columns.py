"""Which columns of a table can be features of a draft, and why the others are left out."""

from __future__ import annotations

import math
import re
from typing import Final

import pyarrow as pa

from dpsweep.orchestration.sweeps.column_names import may_name_codes
from dpsweep.orchestration.sweeps.text_column import quoted
from dpsweep.workers.data import ColumnProfile

MOST_VALUES: Final = 50
"""Maximum number of distinct values of a category, class or group column that a draft lists."""
_MOST_MISSING: Final = 0.5
"""Largest share of missing values in a feature column; training leaves out rows with a missing value."""


def unusable(column: ColumnProfile) -> str | None:
    """Return why the column cannot be a feature of the draft, as a relative clause; None if it can."""
    if column.unreadable is not None:
        kind = column.unreadable
        if column.holds_bytes:
            return (
                f"which holds bytes; if they are pictures, draft with --image {quoted(column.name)} to learn from them"
            )
        is_fixed = pa.types.is_fixed_size_list(kind) and not pa.types.is_boolean(kind.value_type)
        fixed = ", of no fixed size where rows have none," if is_fixed else ""
        return f"whose values are of type {kind}; lists of equally many numbers{fixed} can be features"
    if column.same_as:
        return f"whose values are those of {quoted(column.same_as)}"
    if column.distinct == 0:
        return "which has no values"
    if column.distinct == 1:
        marked = f"; {' and '.join(map(quoted, column.markers))} counts as missing" if column.markers else ""
        return f"which has the same value in every row{' that has one' if column.missing else ''}{marked}"
    if column.missing > _MOST_MISSING:
        return f"which lacks {column.missing:.0%} of its values: rows without a value are left out of training"
    if column.is_order:
        return "whose whole numbers only count the rows, as those of an identifier do"
    if column.has_pictures:
        return f"which names files of pictures; to learn from these instead, draft with --image {quoted(column.name)}"
    if column.span is None and column.values is None and may_name_codes(column.name) and not column.is_prose:
        if column.all_different:
            return "which is different in every row, as an identifier is"
        cure = "declare the categories that matter, or read their signs with --text"
        return f"which has {column.distinct:,} different codes, by its name, more than {MOST_VALUES}; {cure}"
    if column.ways:
        return f"which writes numbers in several ways, such as {' and '.join(map(quoted, column.ways[:3]))}; use one"
    if column.has_dates:
        return "which holds dates or times; as numbers, such as days since one of them, they can be features"
    if column.has_lists:
        return "whose texts are lists of numbers; as lists of a .parquet file they can be features"
    if column.strange and not column.is_prose:
        such = quoted(column.strange)
        return f"which holds numbers and texts such as {such}; leave those fields empty, or write numbers"
    if column.span is None and column.values is None and not column.is_prose:
        if column.all_different:
            return "which is different in every row, as an identifier is; if it is a text, read it with --text"
        how = "declare its categories to use it, or read it as texts with --text"
        return f"which has {column.distinct:,} different texts, more than {MOST_VALUES}; {how}"
    if column.span is not None and not math.isfinite(2.0 * (column.span[1] - column.span[0])):
        return "whose numbers are too large for a range"
    return "whose name is too long for a key of a sweep file" if is_too_long(column.name) else None


def are_codes(column: ColumnProfile) -> bool:
    """Return whether the numbers of a column are codes by its name, such as zip codes, and no amounts."""
    of_numbers = column.span is not None and column.whole and not column.places
    return of_numbers and column.distinct > 2 and may_name_codes(column.name)


def may_be_amounts(column: ColumnProfile) -> bool:
    """Return whether a column is of codes by its name alone: its values are written as amounts are, too."""
    return may_name_codes(column.name) and all(re.fullmatch("0|[1-9][0-9]*", each) for each in column.values or ())


def is_too_long(name: str) -> bool:
    """Return whether PyYAML, which takes no longer key than 1024 characters, may not take the name as one."""
    return len(quoted(name)) > 1000
