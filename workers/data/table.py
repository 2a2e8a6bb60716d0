"""CSV and Parquet files with declared label, group, user and feature columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.csv as csv
import pyarrow.parquet as parquet
from pydantic import FiniteFloat
from torch import Tensor

from accounting.errors import InvalidInput, PrivateDetail
from accounting.reasons import Reason
from accounting.registry import nearest
from workers.data.base import Source, Split, make_split, numbered, repeated
from workers.data.conventions import MISSING_SPELLINGS, Convention, parsed
from workers.data.files import reader_of, reading, require_path
from workers.data.labels import Classes, Flags, Labels, NoLabels, TableTask, Targets, label_columns
from workers.data.spelling import Value, Values, as_declared, names
from workers.data.tabular import (
    Categorical,
    Column,
    Numeric,
    attributes,
    complete_rows,
    encode_table,
    indices,
    intersected,
    intersected_indices,
    is_numeric,
    numbers,
)

_MAX_CATEGORIES: Final = 1000
"""Largest number of distinct values of an undeclared text column; one feature per value could exhaust memory."""


Range = tuple[FiniteFloat, FiniteFloat]


@dataclass(frozen=True)
class Roles:
    """Names of the columns that have a role. named: those that the sweep file gives. The others are from the first line
    of the file, which may be a row of a table without a header, so that errors keep them private."""

    labels: tuple[str, ...]
    groups: tuple[str, ...]
    user: str | None
    features: tuple[str, ...]
    named: frozenset[str] = frozenset()

    def called(self, name: str) -> str:
        """What errors call a column: by its name only if the sweep file gives it."""
        known = {*self.labels, *self.groups, self.user, *self.named}
        return f"column {name!r}" if name in known else A_COLUMN

    @property
    def used(self) -> list[str]:
        users = () if self.user is None else (self.user,)
        return list(dict.fromkeys((*self.labels, *self.groups, *users, *self.features)))


@dataclass(frozen=True)
class Declared:
    """Values that the user declares for columns. Undeclared ones are taken from the rows, which is not private."""

    task: str
    ranges: Mapping[str, Range]
    categories: Mapping[str, Values]
    classes: Values | None
    groups: Mapping[str, Values]
    numbers: Mapping[str, Convention] = field(default_factory=dict)

    def covers(self, name: str) -> bool:
        """Whether the range or the categories of a feature are declared."""
        return name in self.ranges or name in self.categories

    def __post_init__(self) -> None:
        if self.classes is not None and self.task != "classification":
            raise InvalidInput(f"`classes` are of classification, but the task is {self.task}; leave them out")

    def texts(self, labels: Sequence[str], groups: Sequence[str], user: str | None) -> dict[str, list[Value]]:
        """The columns to read as text even if they hold numbers, each with its declared values."""
        columns: dict[str, list[Value]] = {} if user is None else {user: []}
        grouped = ((group, self.groups.get(group)) for group in groups)
        classes = ((label, self.classes) for label in labels if self.task == "classification")
        written = ((name, None) for name in self.numbers)
        for name, values in (*classes, *grouped, *self.categories.items(), *written):
            columns.setdefault(name, []).extend(values or ())
        return columns


@dataclass(frozen=True)
class Encoding:
    """Converts rows of a table to examples.

    group_values: values of each group column. group_names: names of their intersections, as shown in results. reasons:
    what was taken from the rows because it was not declared. notes: of which columns, as far as the sweep file names
    them.
    """

    roles: Roles
    columns: tuple[Column, ...]
    labels: Labels
    group_values: Mapping[str, tuple[str, ...]]
    group_names: tuple[str, ...]
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]

    def split(self, table: pa.Table, first_id: int, user_names: tuple[str, ...]) -> Split:
        """The split of all complete rows; rows with a missing value are left out. first_id: id of the first row."""
        rows = complete_rows(table)
        complete = table.take(rows)
        features = encode_table(complete, self.columns)
        return self.joined(features, complete, rows + first_id, user_names, self.labels.encode(complete))

    def joined(
        self,
        features: npt.NDArray[np.generic] | Tensor,
        complete: pa.Table,
        ids: npt.NDArray[np.int64],
        user_names: tuple[str, ...],
        labels: npt.NDArray[np.generic],
    ) -> Split:
        """The split of these features and labels, with groups and users from the ``complete`` rows."""
        user = self.roles.user
        return make_split(
            features,
            labels,
            intersected_indices(complete, self.group_values, "group column "),
            example_ids=ids,
            user_ids=None if user is None else indices(complete[user], user_names, "user column"),
        )


def table(
    path: str,
    label: str | Sequence[str],
    features: Sequence[str] | None = None,
    group: str | Sequence[str] | None = None,
    user: str | None = None,
    test_path: str | None = None,
    ranges: Mapping[str, Range] | None = None,
    categories: Mapping[str, Values] | None = None,
    classes: Values | None = None,
    groups: Values | Mapping[str, Values] | None = None,
    numbers: Mapping[str, Convention] | None = None,
    task: TableTask = "classification",
) -> Source:
    """Rows of a .parquet, .csv or .tsv file (UTF-8 or UTF-16, with a header; commas, semicolons or tabs separate).

    label: the column of classes; for task ``regression``, one or several columns of numbers, scaled if in ``ranges``;
    for ``multi_label``, columns of 0 and 1. group: one column, or several, such as ["sex", "race"], whose intersections
    are the groups; by default the classes are the groups in classification, and other tasks have one group. user: the
    column that names the owner of each row. features: columns; by default all without another role.

    ranges: {column: [low, high]}, by which numbers are scaled. categories: {column: [values]}; these and all text
    columns become one-hot. classes, groups: declared values; for several group columns, {column: [values]}. Ranges,
    categories, classes and groups that are not declared are taken from the rows, which is not private; a note says so,
    and these groups are shown as "group 1", "group 2". Rows with a missing value (in CSV an empty field, NA, NaN or
    null, unless that is declared as a value) are left out. A column of lists of equally many numbers, such as an
    embedding, is read as columns "emb[0]", "emb[1]", ...; other nested columns can have no role. numbers: {column:
    point or comma}, the decimal sign of columns that write numbers with thousands, a currency, percent or a unit; a
    text that is no number is missing. Example ids count the rows of the file, then those of ``test_path``.

    Raises: InvalidInput for unknown columns and undeclared values; DataCorruption for unreadable files.
    """
    labels = label_columns(label, task)
    by = () if group is None and task != "classification" else attributes("table", labels if group is None else group)
    declared = Declared(task, ranges or {}, categories or {}, classes, declared_groups(by, groups), numbers or {})
    texts = declared.texts(labels, by, user)
    rows = _with_numbers(read_table(path, texts), declared, path)
    described = (*declared.ranges, *declared.categories, *declared.numbers)
    roles = _roles(rows.column_names, labels, by, user, features, described)
    tables = [used_columns(rows, roles, texts, path, declared.numbers)]
    if test_path is not None:
        require_other(test_path, path)
        others = _with_numbers(read_table(test_path, texts), declared, test_path)
        tables.append(used_columns(others, roles, texts, test_path, declared.numbers))
    encoding = encoding_of(tables[0], roles, declared)
    users = user_names(tables, user)
    splits = [encoding.split(part, first_id, users) for part, first_id in zip(tables, (0, rows.num_rows), strict=False)]
    left_out, total = sum(len(part) for part in tables) - sum(map(len, splits)), sum(len(part) for part in tables)
    missing = f"{left_out:,} of {total:,} rows ({left_out / total:.1%}) are left out: they lack a value"
    return Source(
        Path(path).stem,
        splits[0],
        splits[1] if len(splits) > 1 else None,
        encoding.group_names,
        encoding.labels.names,
        task=task,
        notes=(*encoding.notes, missing) if left_out else encoding.notes,
        reasons=encoding.reasons,
    )


def _with_numbers(rows: pa.Table, declared: Declared, path: str) -> pa.Table:
    """The rows with the columns of ``numbers`` as numbers. Raises: InvalidInput for an unknown column."""
    for name, convention in declared.numbers.items():
        if name not in rows.column_names:
            raise no_column(name, path, rows.column_names)
        rows = rows.set_column(rows.column_names.index(name), name, parsed(rows[name], convention))
    return rows


def require_other(test_path: str, path: str) -> None:
    """Raises: InvalidInput when both paths are the same file."""
    if Path(test_path).expanduser().resolve() == Path(path).expanduser().resolve():
        raise InvalidInput(f"test_path is the training table {path} itself; give other rows, or leave it out")


def user_names(tables: Sequence[pa.Table], user: str | None) -> tuple[str, ...]:
    """The distinct users of all tables."""
    return () if user is None else distinct(pa.chunked_array([chunk for part in tables for chunk in part[user].chunks]))


def declared_groups(by: Sequence[str], groups: Values | Mapping[str, Values] | None) -> Mapping[str, Values]:
    """Declared values by group column. Raises: InvalidInput for unknown columns, or one list for several columns."""
    if groups is None:
        return {}
    if not by:
        raise InvalidInput("`groups` declares values of groups, but no column is named by `group`; name it")
    if isinstance(groups, Mapping):
        for name in groups:
            if name not in by:
                raise InvalidInput(
                    f"`groups` declares values of {name!r}, which is no group column; {nearest(name, by)}"
                )
        return groups
    if len(by) > 1:
        raise InvalidInput(
            f"`groups` lists values of one group column, but there are {len(by)}; give them by column, such as "
            f"{{{by[0]}: [...], {by[1]}: [...]}}"
        )
    return {by[0]: groups}


_UTF_16: Final = (b"\xff\xfe", b"\xfe\xff")


def _read_csv(path: Path, texts: Mapping[str, Values]) -> pa.Table:
    """The table, with the columns ``texts`` read as text: 007 stays 007, and NA if it is among their values."""
    with path.open("rb") as file:
        start = file.readline(1 << 16)
    encoding = "utf-16" if start.startswith(_UTF_16) else "utf8"
    convert = csv.ConvertOptions(
        column_types=dict.fromkeys(texts, pa.string()), null_values=list(MISSING_SPELLINGS), strings_can_be_null=False
    )
    parse = csv.ParseOptions(newlines_in_values=True, delimiter=_delimiter(path, start.decode(encoding, "replace")))
    rows = csv.read_csv(path, csv.ReadOptions(encoding=encoding), parse, convert)
    if any(map(pa.types.is_binary, rows.schema.types)):  # what Arrow makes of text that is not UTF-8
        raise pa.ArrowInvalid("invalid UTF8 data")
    columns = [_without_missing(rows[place], texts.get(name, ())) for place, name in enumerate(rows.column_names)]
    return pa.Table.from_arrays(columns, names=rows.column_names)


def _delimiter(path: Path, header: str) -> str:
    """The separator of the header: a tab or semicolon if it has one and no comma."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    return "," if "," in header else next((each for each in ("\t", ";") if each in header), ",")


def _without_missing(values: pa.ChunkedArray, declared: Values) -> pa.ChunkedArray:
    """Texts with null for what stands for a missing value, unless it is declared as a value."""
    if not pa.types.is_string(values.type):
        return values
    missing = [each for each in MISSING_SPELLINGS if each not in names(declared)]
    return compute.if_else(compute.is_in(values, value_set=pa.array(missing)), pa.scalar(None, pa.string()), values)


def _read_parquet(path: Path, texts: Mapping[str, Values]) -> pa.Table:
    """The table, with a column for each place of lists of equally many numbers."""
    rows = parquet.read_table(path)
    columns: list[tuple[str, pa.ChunkedArray]] = []
    for name, values in zip(rows.column_names, rows.columns, strict=True):
        columns += _places(name, values) or [(name, values)]
    return pa.Table.from_arrays([values for _, values in columns], names=[name for name, _ in columns])


def _places(name: str, values: pa.ChunkedArray) -> list[tuple[str, pa.ChunkedArray]]:
    """Columns ``name[0]``, ``name[1]``, ... of lists of numbers, all of one length; none for any other column."""
    kind = values.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)):
        return []
    lengths = compute.unique(compute.list_value_length(values)).drop_null().to_pylist()
    if len(lengths) != 1 or not 0 < lengths[0] <= _MOST_PLACES:
        return []
    return [(f"{name}[{place}]", compute.list_element(values, place)) for place in range(lengths[0])]


_MOST_PLACES: Final = 10_000

READERS: Mapping[str, Callable[[Path, Mapping[str, Values]], pa.Table]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}
"""Readers by file name extension."""


def read_table(path: str, texts: Mapping[str, Values]) -> pa.Table:
    """The rows of a .csv, .tsv or .parquet file. texts: columns of a CSV file to read as text, with declared values.

    Raises: InvalidInput for a missing file, a folder, another file type or a repeated column name; DataCorruption for a
    file that cannot be read.
    """
    found = require_path(path)
    reader = reader_of(found, READERS)
    with reading(found):
        rows = reader(found, texts)
        columns = rows.column_names
    require_different_columns(columns, found)
    return rows


A_COLUMN: Final = "a column"
"""What errors call a column whose name only the file gives."""


def no_column(name: str, path: str | Path, columns: Sequence[str]) -> InvalidInput:
    """The error for a column that a file lacks. The names that it has are private: they may be values of its first row
    where it has no header."""
    error = InvalidInput(
        f"there is no column {name!r} in {path}; spell it as the first line of the file does, or give the file a first "
        "line of names (those that are there are withheld, as they may be a row)"
    )
    error.__cause__ = PrivateDetail(nearest(name, columns))
    return error


def require_different_columns(columns: Sequence[str], path: Path) -> None:
    """Raises: InvalidInput for a file with several columns of one name."""
    if repeat := repeated(columns):
        raise InvalidInput(
            f"the table {path} has more than one column of the same name; rename them, or give the file a first "
            "line of names"
        ) from PrivateDetail(f"the name {repeat!r}")


def _roles(
    columns: Sequence[str],
    labels: tuple[str, ...],
    groups: tuple[str, ...],
    user: str | None,
    features: Sequence[str] | None,
    described: Sequence[str],
) -> Roles:
    chosen = [name for name in columns if name not in (*labels, *groups, user)] if features is None else features
    if both := next((label for label in labels if label in chosen), None):
        raise InvalidInput(f"the label column {both!r} is also a feature; leave it out of `features`")
    if repeat := repeated(chosen):
        raise InvalidInput(f"`features` names {repeat!r} more than once; name it once")
    return Roles(labels, groups, user, tuple(chosen), frozenset((*(features or ()), *described)))


def used_columns(
    rows: pa.Table, roles: Roles, texts: Mapping[str, Values], path: str, numbers: Container[str] = ()
) -> pa.Table:
    """The columns with a role: numbers unchanged, others as text, spelt like the values declared in ``texts``."""
    for name in roles.used:
        if name not in rows.column_names:
            raise no_column(name, path, rows.column_names)
    columns = {name: rows[name] for name in roles.used}
    return pa.table(
        {
            name: column
            if is_numeric(column) and (name not in texts or name in numbers)
            else as_declared(column, texts.get(name, ()), f"{roles.called(name)} of {path}")
            for name, column in columns.items()
        }
    )


def encoding_of(rows: pa.Table, roles: Roles, declared: Declared) -> Encoding:
    """The declared encoding; ranges, categories, classes and groups not declared are taken from the complete rows."""
    targets = roles.labels if declared.task == "regression" else ()
    for name in (*declared.ranges, *declared.categories):
        if name not in roles.features and not (name in targets and name in declared.ranges):
            raise InvalidInput(
                f"{name!r} has a range or categories, but is no feature; correct it, or name it in `features`"
            ) from PrivateDetail(nearest(name, roles.features))
        if name in declared.ranges and name in declared.categories:
            raise InvalidInput(f"column {name!r} has both a range and categories; keep one of them")
    complete = _complete(rows, roles)
    labels = _labels(complete, roles, declared)
    group_values = {
        name: labels.names
        if name in roles.labels and declared.task == "classification" and name not in declared.groups
        else _declared_or_distinct(declared.groups.get(name), complete[name])
        for name in roles.groups
    }
    shown = intersected(group_values) if group_values else ("all",)
    by_label = [name for name in roles.groups if name in roles.labels and name not in declared.groups]
    is_declared = not _undeclared_groups(roles, declared) and (declared.classes is not None or not by_label)
    return Encoding(
        roles,
        tuple(_column(complete[name], name, declared, roles) for name in roles.features),
        labels,
        group_values,
        shown if is_declared else numbered("group", len(shown)),
        _undeclared(roles, declared),
        () if not (open_columns := _open_columns(roles, declared)) else (f"no range or categories: {open_columns}",),
    )


def _labels(complete: pa.Table, roles: Roles, declared: Declared) -> Labels:
    match declared.task:
        case "regression":
            ranges = {name: span for name, span in declared.ranges.items() if name in roles.labels}
            return Targets(roles.labels, ranges)
        case "multi_label":
            return Flags(roles.labels)
        case "language_modelling":
            return NoLabels()
    (label,) = roles.labels
    return Classes(label, _declared_or_distinct(declared.classes, complete[label]))


def _undeclared(roles: Roles, declared: Declared) -> tuple[Reason, ...]:
    """What is taken from the rows because it is not declared."""
    undeclared: dict[Reason, bool] = {
        "ranges_from_rows": any(not declared.covers(name) for name in roles.features),
        "classes_from_rows": declared.classes is None and declared.task == "classification",
        "groups_from_rows": bool(_undeclared_groups(roles, declared)),
    }
    return tuple(reason for reason, is_undeclared in undeclared.items() if is_undeclared)


def _open_columns(roles: Roles, declared: Declared) -> str:
    """Names in the sweep file of features whose range or categories are taken from the rows."""
    return ", ".join(name for name in roles.features if name in roles.named and not declared.covers(name))


def _undeclared_groups(roles: Roles, declared: Declared) -> list[str]:
    """Group columns whose values are taken from the rows, without the label column, whose values are the classes."""
    classes = roles.labels if declared.task == "classification" else ()
    return [name for name in roles.groups if name not in declared.groups and name not in classes]


def _complete(rows: pa.Table, roles: Roles) -> pa.Table:
    """The rows without a missing value. Raises: InvalidInput when there is none."""
    if rows.num_rows == 0:
        raise InvalidInput("the table has no rows; give a file with at least one")
    complete = rows.take(complete_rows(rows))
    if complete.num_rows == 0:
        missing = {name: rows.num_rows - len(complete_rows(rows.select([name]))) for name in rows.column_names}
        worst = max(missing, key=missing.__getitem__)
        raise InvalidInput(
            f"no row is complete; {roles.called(worst)} lacks most values: leave it out of `features`"
        ) from PrivateDetail(f"{worst!r} has no value in {missing[worst]} of {rows.num_rows} rows")
    return complete


def _column(values: pa.ChunkedArray, name: str, declared: Declared, roles: Roles) -> Column:
    if name in declared.categories:
        return Categorical(name, names(declared.categories[name]))
    if name in declared.ranges:
        return Numeric(name, *declared.ranges[name])
    called = roles.called(name)
    return _learnt_range(values, name, called) if is_numeric(values) else _learnt_categories(values, name, called)


def _learnt_range(values: pa.ChunkedArray, name: str, called: str) -> Numeric:
    found = numbers(values, name)
    low, high = float(found.min()), float(found.max())
    if not math.isfinite(high - low):
        raise InvalidInput(
            f"{called} has values too large for a range taken from the rows; declare its range, which cuts them"
        ) from PrivateDetail(f"{name!r} has values from {low} to {high}")
    return Numeric(name, low, high if high > low else low + max(1.0, 1e-9 * abs(low)))


def _learnt_categories(values: pa.ChunkedArray, name: str, called: str) -> Categorical:
    found = distinct(values)
    if len(found) > _MAX_CATEGORIES:
        raise InvalidInput(
            f"{called} has more than {_MAX_CATEGORIES} distinct texts; leave it out of `features`, declare its "
            "`categories`, or correct it where it should hold only numbers"
        ) from PrivateDetail(f"{name!r} has {len(found)} distinct texts such as {found[0]!r}")
    return Categorical(name, found)


def _declared_or_distinct(declared: Values | None, values: pa.ChunkedArray) -> tuple[str, ...]:
    return distinct(values) if declared is None else names(declared)


def distinct(texts: pa.ChunkedArray) -> tuple[str, ...]:
    """The distinct values, sorted as numbers if all are numbers, else as text."""
    found: list[str] = compute.unique(texts).drop_null().to_pylist()
    try:
        return tuple(sorted(found, key=float))
    except ValueError:
        return tuple(sorted(found))
