"""Any CSV or Parquet file with declared label, group, user and feature columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.csv as csv
import pyarrow.parquet as parquet

from accounting.errors import InvalidInput
from accounting.registry import lookup, nearest
from workers.data.base import Source, Split, make_split
from workers.data.files import require_path
from workers.data.tabular import Categorical, Column, Numeric, complete_rows, encode_table, indices

READERS: Mapping[str, Callable[[Path], pa.Table]] = {".csv": csv.read_csv, ".parquet": parquet.read_table}
"""By file name extension."""

Names = Sequence[str | int]


@dataclass(frozen=True)
class Roles:
    """Which column is what, by name."""

    label: str
    group: str
    user: str | None
    features: tuple[str, ...]

    @property
    def used(self) -> list[str]:
        users = () if self.user is None else (self.user,)
        return list(dict.fromkeys((self.label, self.group, *users, *self.features)))


@dataclass(frozen=True)
class Encoding:
    """How rows become examples; ``learnt`` names what had to be taken from the rows, for want of a declaration."""

    roles: Roles
    columns: tuple[Column, ...]
    class_names: tuple[str, ...]
    group_names: tuple[str, ...]
    learnt: tuple[str, ...]

    def split(self, table: pa.Table, first_id: int, user_names: tuple[str, ...]) -> Split:
        """The complete rows; the others are left out."""
        rows = complete_rows(table)
        complete = table.take(rows)
        roles = self.roles
        return make_split(
            encode_table(complete, self.columns),
            indices(complete[roles.label], self.class_names, f"label column {roles.label!r}"),
            indices(complete[roles.group], self.group_names, f"group column {roles.group!r}"),
            example_ids=rows + first_id,
            user_ids=None if roles.user is None else indices(complete[roles.user], user_names, "user column"),
        )


def table(
    path: str,
    label: str,
    features: Sequence[str] | None = None,
    group: str | None = None,
    user: str | None = None,
    test_path: str | None = None,
    ranges: Mapping[str, Sequence[float]] | None = None,
    categories: Mapping[str, Names] | None = None,
    classes: Names | None = None,
    groups: Names | None = None,
) -> Source:
    """Rows of a .csv (with a header) or .parquet file.

    label, group, user: columns; the label's classes are the groups by default. features: columns (all without
    another role by default). Numbers are scaled by ``ranges`` {column: [low, high]}; text columns, and those in
    ``categories`` {column: [values]}, become one-hot. What is not declared is taken from the rows, which is not
    private: the notes say so. Rows with a missing value are left out; example ids count rows of the file, then
    those of ``test_path``.
    """
    train = _read(path)
    roles = _roles(train, label, group or label, user, features)
    train = train.select(roles.used)
    tables = [train] if test_path is None else [train, _read(test_path).select(roles.used)]
    encoding = _encoding(tables[0], roles, ranges or {}, categories or {}, classes, groups)
    if group is None and groups is None:
        encoding = replace(encoding, group_names=encoding.class_names)
    users = () if user is None else _distinct(pa.concat_tables([part.select([user]) for part in tables])[user])
    splits = [
        encoding.split(part, first_id, users) for part, first_id in zip(tables, (0, train.num_rows), strict=False)
    ]
    dropped = sum(part.num_rows - len(split) for part, split in zip(tables, splits, strict=True))
    return Source(
        Path(path).stem,
        splits[0],
        splits[1] if len(splits) > 1 else None,
        encoding.group_names,
        encoding.class_names,
        notes=_notes(encoding.learnt, dropped),
    )


def _read(path: str) -> pa.Table:
    """The file's rows; booleans and dictionaries as text."""
    found = require_path("table", path)
    reader = lookup(READERS, found.suffix.lower(), "file type")
    try:
        rows = reader(found)
    except (pa.ArrowException, OSError) as error:
        raise InvalidInput(f"cannot read the table {found}: {' '.join(str(error).split())}") from error
    as_text = (pa.types.is_boolean, pa.types.is_dictionary)
    columns = {
        name: column.cast(pa.string()) if any(is_type(column.type) for is_type in as_text) else column
        for name, column in zip(rows.column_names, rows.columns, strict=True)
    }
    return pa.table(columns)


def _roles(rows: pa.Table, label: str, group: str, user: str | None, features: Sequence[str] | None) -> Roles:
    special = {label, group, *(() if user is None else (user,))}
    chosen = tuple(name for name in rows.column_names if name not in special) if features is None else tuple(features)
    roles = Roles(label, group, user, chosen)
    for name in roles.used:
        if name not in rows.column_names:
            raise InvalidInput(f"there is no column {name!r}; {nearest(name, rows.column_names)}")
    if label in chosen:
        raise InvalidInput(f"the label column {label!r} is also a feature; leave it out of `features`")
    return roles


def _encoding(
    rows: pa.Table,
    roles: Roles,
    ranges: Mapping[str, Sequence[float]],
    categories: Mapping[str, Names],
    classes: Names | None,
    groups: Names | None,
) -> Encoding:
    """What is declared, completed from the complete ones of ``rows``."""
    for name in (*ranges, *categories):
        if name not in roles.features:
            raise InvalidInput(
                f"{name!r} has a range or categories, but is no feature; {nearest(name, roles.features)}"
            )
    complete = rows.take(complete_rows(rows))
    if complete.num_rows == 0:
        raise InvalidInput("no row is complete; choose `features` without the columns that have missing values")
    learnt = [name for name in roles.features if name not in ranges and name not in categories]
    columns = tuple(_column(complete[name], name, ranges, categories) for name in roles.features)
    return Encoding(
        roles,
        columns,
        _declared_or_distinct(classes, complete[roles.label], "classes"),
        _declared_or_distinct(groups, complete[roles.group], "groups"),
        tuple(learnt),
    )


def _column(
    values: pa.ChunkedArray, name: str, ranges: Mapping[str, Sequence[float]], categories: Mapping[str, Names]
) -> Column:
    if name in categories:
        return Categorical(name, _names(categories[name], f"categories of column {name!r}"))
    is_number = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
    if name in ranges:
        if not is_number:
            raise InvalidInput(
                f"column {name!r} has a range but holds text, not only numbers; declare its categories, or correct it"
            )
        return Numeric(name, *_low_high(ranges[name], name))
    if not is_number:
        return Categorical(name, _distinct(values))
    extremes = compute.min_max(values).as_py()
    low, high = float(extremes["min"]), float(extremes["max"])
    return Numeric(name, low, high if high > low else low + 1.0)


def _low_high(declared: object, name: str) -> tuple[float, float]:
    match declared:
        case [int() | float() as low, int() | float() as high] if math.isfinite(low) and math.isfinite(high):
            return low, high
    raise InvalidInput(f"the range of column {name!r} is {declared!r}, but must be [low, high], two finite numbers")


def _names(declared: Names, what: str) -> tuple[str, ...]:
    if isinstance(declared, str) or not isinstance(declared, Sequence):
        raise InvalidInput(f"{what} are {declared!r}, but must be a list of values")
    return tuple(str(value) for value in declared)


def _declared_or_distinct(declared: Names | None, values: pa.ChunkedArray, what: str) -> tuple[str, ...]:
    return _distinct(values) if declared is None else _names(declared, what)


def _distinct(values: pa.ChunkedArray) -> tuple[str, ...]:
    """The distinct values in their own order (numbers by size, text by letter), as strings."""
    unique = compute.unique(values.combine_chunks()).drop_null()
    return tuple(unique.take(compute.sort_indices(unique)).cast(pa.string()).to_pylist())


def _notes(learnt: tuple[str, ...], dropped: int) -> tuple[str, ...]:
    notes = []
    if learnt:
        notes.append(
            f"not private: ranges or categories of {', '.join(learnt)} were taken from the rows themselves, outside "
            "every guarantee; declare them in `ranges` and `categories`"
        )
    if dropped:
        notes.append(f"{dropped} rows with a missing value are left out")
    return tuple(notes)
