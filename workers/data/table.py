"""CSV and Parquet files with declared label, group, user and feature columns."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute
from pydantic import FiniteFloat
from torch import Tensor

from dpsweep.accounting.errors import InvalidInput, PrivateDetail
from dpsweep.accounting.mechanism.reasons import Reason
from dpsweep.accounting.registry import nearest
from dpsweep.workers.data.base import Source, Split, make_split, numbered, repeated
from dpsweep.workers.data.conventions import Convention, parsed
from dpsweep.workers.data.label_columns import Classes, Flags, Labels, NoLabels, TableTask, Targets, label_columns
from dpsweep.workers.data.owner_columns import OwnerColumns, UserColumns, owners_in, people_in
from dpsweep.workers.data.spelling import CellValue, CellValues, as_declared, declared_groups, names
from dpsweep.workers.data.table_files import places_of, read_table_file, repeated_names
from dpsweep.workers.data.tabular import (
    Categorical,
    Column,
    Hashed,
    Numeric,
    Unscaled,
    as_numbers,
    attributes,
    complete_rows,
    encoded_columns,
    intersected,
    intersected_indices,
    is_numeric,
    lacks,
    positions,
)
from dpsweep.workers.dataset_description import NO_GROUPS
from dpsweep.workers.machine.folders import at_home

_MAX_CATEGORIES: Final = 1000
"""Largest number of distinct values of an undeclared text column; one feature per value could exhaust memory."""
_MANY_TEXTS: Final = 20
"""Number of undeclared categories up to which a few rows may all have different ones."""
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
        """Return what errors call a column: by its name only if the sweep file gives it."""
        return f"column {name!r}" if name in self.known else A_COLUMN

    @property
    def known(self) -> frozenset[str]:
        """Columns that the sweep file names."""
        return frozenset(filter(None, (*self.labels, *self.groups, self.user, *self.named)))

    @property
    def used(self) -> list[str]:
        users = () if self.user is None else (self.user,)
        return list(dict.fromkeys((*self.labels, *self.groups, *users, *self.features)))


@dataclass(frozen=True)
class Declared:
    """Values that the user declares for columns. Undeclared ones are taken from the rows, which is not private."""

    task: str
    ranges: Mapping[str, Range]
    categories: Mapping[str, CellValues]
    classes: CellValues | None
    groups: Mapping[str, CellValues]
    numbers: Mapping[str, Convention] = field(default_factory=dict)
    unscaled: Sequence[str] = ()
    hashed: Mapping[str, int] = field(default_factory=dict)
    ignore_case: Sequence[str] = ()

    @property
    def ways(self) -> tuple[Collection[str], ...]:
        """Names of features by each way of encoding."""
        return self.ranges, self.categories, self.unscaled, self.hashed

    def covers(self, name: str) -> bool:
        """Return whether it is declared how a feature is encoded."""
        return any(name in way for way in self.ways)

    def __post_init__(self) -> None:
        if self.classes is not None and self.task != "classification":
            raise InvalidInput(f"`classes` are of classification, but the task is {self.task}; leave them out")

    def texts(self, labels: Sequence[str], groups: Sequence[str], users: Sequence[str]) -> dict[str, list[CellValue]]:
        """Return the columns to read as text even if they hold numbers, each with its declared values."""
        columns: dict[str, list[CellValue]] = {user: [] for user in users}
        grouped = ((group, self.groups.get(group)) for group in groups)
        classes = ((label, self.classes) for label in labels if self.task == "classification")
        written = ((name, None) for name in (*self.numbers, *self.hashed, *self.ignore_case))
        for name, values in (*classes, *grouped, *self.categories.items(), *written):
            columns.setdefault(name, []).extend(values or ())
        return columns


@dataclass(frozen=True)
class Encoding:
    """Converts rows of a table to examples.

    group_values: values of each group column.
    group_names: names of their intersections, as shown in results.
    reasons: what was taken from the rows because it was not declared.
    notes: the columns concerned, as far as the sweep file names them.
    """

    roles: Roles
    columns: tuple[Column, ...]
    labels: Labels
    group_values: Mapping[str, tuple[str, ...]]
    group_names: tuple[str, ...]
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]

    def split(self, table: pa.Table, first_id: int, user_names: tuple[str, ...]) -> Split:
        """Return the split of the rows without a missing value. first_id: id of the first row."""
        rows = complete_rows(table)
        complete = table.take(rows)
        features = encoded_columns(complete, self.columns)
        return self.joined(features, complete, rows + first_id, user_names, self.labels.encode(complete))

    def joined(
        self,
        features: npt.NDArray[np.generic] | Tensor,
        complete: pa.Table,
        ids: npt.NDArray[np.int64],
        user_names: tuple[str, ...],
        labels: npt.NDArray[np.generic],
    ) -> Split:
        """Return the split of these features and labels, with groups and users from the ``complete`` rows."""
        user = self.roles.user
        return make_split(
            features,
            labels,
            intersected_indices(complete, self.group_values, "group column "),
            example_ids=ids,
            user_ids=None if user is None else owners_in(complete[user], user_names),
        )


def table(
    path: str,
    label: str | Sequence[str],
    features: Sequence[str] | None = None,
    group: str | Sequence[str] | None = None,
    user: UserColumns = None,
    user_separator: str | None = None,
    test_path: str | None = None,
    ranges: Mapping[str, Range] | None = None,
    categories: Mapping[str, CellValues] | None = None,
    classes: CellValues | None = None,
    groups: CellValues | Mapping[str, CellValues] | None = None,
    numbers: Mapping[str, Convention] | None = None,
    unscaled: Sequence[str] = (),
    hashed: Mapping[str, int] | None = None,
    encoding: str | None = None,
    ignore_case: Sequence[str] = (),
    task: TableTask = "classification",
) -> Source:
    """Return the rows of a .parquet or .jsonl file, or of a .csv or .tsv file with a header. Commas, semicolons, tabs
    or bars separate the fields of CSV.

    label: the column of classes; for task ``regression``, one or several columns of numbers, scaled if in ``ranges``;
    for ``multi_label``, columns of 0 and 1.
    group: one column, or several, such as ["sex", "race"], whose intersections are the groups; by default the classes
    are the groups in classification, and other tasks have one group.
    user: the column that names the owner of each row; several columns, a column of lists, or a text with
    ``user_separator`` between the names, for rows with several owners.
    features: columns; by default all without another role.

    ranges: {column: [low, high]}, by which numbers are scaled. categories: {column: [values]}; these and all text
    columns become one-hot. classes, groups: declared values; for several group columns, {column: [values]}. Ranges,
    categories, classes and groups that are not declared are taken from the rows, which is not private. A note tells it,
    and these groups are shown as "group 1", "group 2". Rows with a missing value (in CSV an empty field, NA, NaN or
    null, unless that is declared as a value) are left out, and notes count them. A column of lists of equally many
    numbers, such as an embedding, is read as columns "emb[0]", "emb[1]", ...; its own name stands for all of them.
    Other nested columns can have no role. Example ids count the rows of the file, then of ``test_path``.

    numbers: {column: point or comma}, the decimal sign of columns that write numbers with thousands, a currency,
    percent or a unit; a text that is no number is missing.
    unscaled: numbers that are taken as they are, for a preprocessing that scales them, such as ``robust_ranges``.
    hashed: {column: places}, texts as counts of their letter triples, hashed to so many features; no vocabulary is
    taken from the rows.
    encoding: of CSV, by default UTF-8, or as a byte order mark says.
    ignore_case: columns that are read in lower case.
    Outer blanks of texts in CSV are left out. Of several columns of one name, the second is called "name.1"; list
    ``features`` then.

    Raises: InvalidInput for unknown columns and undeclared values; DataCorruption for unreadable files.
    """
    labels = label_columns(label, task)
    by = () if group is None and task != "classification" else attributes("table", labels if group is None else group)
    given = Declared(
        task,
        ranges or {},
        categories or {},
        classes,
        declared_groups(by, groups),
        numbers or {},
        unscaled,
        hashed or {},
        ignore_case,
    )
    owners = OwnerColumns.of(user, user_separator)
    texts = given.texts(labels, by, owners.names)

    def read(place: str) -> pa.Table:
        return owned(as_described(read_table_file(place, texts, encoding), given, place), owners, place)

    rows = read(path)
    places = places_of(rows.column_names)
    declared, features = _by_place(given, places), None if features is None else _expanded(features, places)
    described = (*itertools.chain(*declared.ways), *declared.numbers)
    roles = _roles(rows.column_names, labels, by, owners.column, features, described)
    _require_single(rows, roles, features, path)
    tables = [used_columns(rows, roles, texts, path, declared.numbers)]
    if test_path is not None:
        require_other(test_path, path)
        tables.append(used_columns(read(test_path), roles, texts, test_path, declared.numbers))
    encoded = encoding_of(tables[0], roles, declared)
    users = user_names(tables, owners.column)
    splits = [encoded.split(part, first_id, users) for part, first_id in zip(tables, (0, rows.num_rows), strict=False)]
    return Source(
        Path(path).stem,
        splits[0],
        splits[1] if len(splits) > 1 else None,
        encoded.group_names,
        encoded.labels.names,
        task=task,
        notes=(*encoded.notes, *rows_left_out([(part, complete_rows(part)) for part in tables], encoded)),
        reasons=encoded.reasons,
        columns=_columns(encoded, declared, encoding),
    )


def _columns(encoded: Encoding, declared: Declared, encoding: str | None) -> dict[str, Any] | None:
    """Return what a model needs to read other rows (`new_rows.Columns`); None unless all features are declared."""
    features = encoded.roles.features
    if not all(map(declared.covers, features)):
        return None
    by_name = {key: getattr(declared, key) for key in ("ranges", "categories", "numbers", "hashed")}
    listed = {key: getattr(declared, key) for key in ("unscaled", "ignore_case")}
    return {
        "features": [*features],
        **{key: {name: each[name] for name in features if name in each} for key, each in by_name.items()},
        **{key: [name for name in features if name in each] for key, each in listed.items()},
        **read_alike(encoded, declared, encoding),
    }


def read_alike(encoded: Encoding, declared: Declared, encoding: str | None) -> dict[str, Any]:
    """Return the plain values that every `row_readers.RowReader` holds: of the file, and of the model's outputs."""
    return {
        "encoding": encoding,
        "task": declared.task,
        "outputs": None if "classes_from_rows" in encoded.reasons else [*encoded.labels.names],
        "targets": {name: declared.ranges[name] for name in encoded.roles.labels if name in declared.ranges},
    }


def owned(rows: pa.Table, owners: OwnerColumns, path: str | Path) -> pa.Table:
    """Return the rows with one column of owners (`OwnerColumns.joined`).

    Raises: InvalidInput for an unknown column, and where several are called so.
    """
    require_columns(owners.names, path, rows.column_names)
    require_once(owners.names, rows, path)
    return owners.joined(rows)


def require_once(names: Sequence[str], rows: pa.Table, path: str | Path, step: str = "rename the others") -> None:
    """Raise InvalidInput where the table has more than one column of one of these names; step: what to do then."""
    if both := next((name for name in names if name in repeated_names(rows)), None):
        raise InvalidInput(f"the table {path} has more than one column called {both!r}; {step}")


def as_described(rows: pa.Table, declared: Declared, path: str) -> pa.Table:
    """Return the rows with the columns of ``numbers`` as numbers, and the columns of ``ignore_case`` in lower case.

    Raises: InvalidInput for an unknown column.
    """
    described = (*declared.numbers, *declared.ignore_case)
    require_columns(described, path, rows.column_names)
    for name in described:
        values = rows[name]
        if name in declared.numbers:
            values = parsed(values, declared.numbers[name])
        elif pa.types.is_string(values.type):
            values = compute.utf8_lower(values)
        rows = rows.set_column(rows.column_names.index(name), name, values)
    return rows


def _by_place(declared: Declared, places: Mapping[str, Sequence[str]]) -> Declared:
    """Return the declaration with the columns of an embedding in place of its name. places: of `places_of`."""
    ranges = {each: span for name, span in declared.ranges.items() for each in places.get(name, [name])}
    return replace(declared, ranges=ranges, unscaled=_expanded(declared.unscaled, places))


def _expanded(named: Sequence[str], places: Mapping[str, Sequence[str]]) -> Sequence[str]:
    return [each for name in named for each in places.get(name, [name])]


def _require_single(rows: pa.Table, roles: Roles, features: Sequence[str] | None, path: str) -> None:
    """Raises: InvalidInput where it is unclear which of several columns of one name is meant."""
    require_once((*roles.labels, *roles.groups), rows, path)
    if (repeat := repeated_names(rows)) and features is None:
        raise InvalidInput(
            f"the table {path} has more than one column of the same name; list the `features`, where the second is "
            'called "name.1", rename them, or give the file a first line of names'
        ) from PrivateDetail(f"the name {min(repeat)!r}")


def rows_left_out(tables: Sequence[tuple[pa.Table, npt.NDArray[np.int64]]], encoding: Encoding) -> tuple[str, ...]:
    """Return how many rows are left out for lack of a value, by column, and by declared label and group.

    tables: each with the indices of its complete rows. No guarantee is for the rows that are left out, as they are in
    no data set; the counts are exact.
    """
    incomplete = [rows.take(np.setdiff1d(np.arange(rows.num_rows), complete)) for rows, complete in tables]
    total, lacking = sum(rows.num_rows for rows, _ in tables), sum(rows.num_rows for rows in incomplete)
    if lacking == 0:
        return ()
    by_column: Counter[str] = Counter()
    infinite = 0
    for rows in incomplete:
        for name in rows.column_names:
            called = f"{name!r}" if name in encoding.roles.known else "other columns"
            by_column[called] += (count := int(lacks(rows[name]).sum()))
            infinite += count - int(rows[name].is_null(nan_is_null=True).to_numpy().sum())
    listed = [f"{called} {count:,}" for called, count in by_column.most_common(_MOST_NAMED) if count]
    said = f"{lacking:,} of {total:,} rows ({lacking / total:.1%}) are left out: they lack a value"
    if infinite:
        said += " or hold an infinite number"
    is_declared = bool(encoding.group_values) and encoding.group_names == intersected(encoding.group_values)
    declared = dict(encoding.group_values) if is_declared else {}
    if isinstance(encoding.labels, Classes) and "classes_from_rows" not in encoding.reasons:
        declared = {encoding.labels.column: encoding.labels.names, **declared}
    by_value = (_by_value(incomplete, name, values) for name, values in declared.items())
    return (
        f"{said} ({', '.join(listed)})" if listed else said,
        *_lacking_one(incomplete, total, encoding.roles),
        *by_value,
    )


_MOST_NAMED: Final = 20
"""Largest number of columns that a note on missing values names."""
_COSTLY: Final = 0.1
"""Share of all rows that one feature costs, from which on a note says how many."""


def _lacking_one(incomplete: Sequence[pa.Table], total: int, roles: Roles) -> Iterator[str]:
    """Yield how many rows lack one feature and nothing else, for each that costs many of all rows."""
    lacking = [rows.filter(pa.array(sum(map(lacks, rows.columns)) == 1)) for rows in incomplete if rows.num_rows]
    for name in (each for each in roles.features if each in roles.known):
        alone = sum(int(lacks(rows[name]).sum()) for rows in lacking)
        if alone >= _COSTLY * total:
            yield f"{alone:,} of these lack {name!r} alone, and stay if it is no feature"


def _by_value(incomplete: Sequence[pa.Table], name: str, values: Sequence[str]) -> str:
    """Return how many rows of each declared value are left out. The others are protected: not counted."""
    found = Counter(place for rows in incomplete for place in positions(rows[name], values).tolist())
    counts = [f"{value} {found[place]:,}" for place, value in enumerate(values)]
    return f"rows left out by {name}: {', '.join([*counts, *([f'not known {found[-1]:,}'] if found[-1] else [])])}"


def require_other(test_path: str, path: str) -> None:
    """Raise InvalidInput when both paths are the same file."""
    if at_home(test_path).resolve() == at_home(path).resolve():
        raise InvalidInput(f"test_path is the training table {path} itself; give other rows, or leave it out")


def user_names(tables: Sequence[pa.Table], user: str | None) -> tuple[str, ...]:
    """Return the distinct users of all tables."""
    if user is None:
        return ()
    return distinct(pa.chunked_array([chunk for part in tables for chunk in people_in(part[user]).chunks], pa.string()))


A_COLUMN: Final = "a column"
"""Name in errors of a column that only the file names."""


def require_columns(needed: Iterable[str], path: str | Path, columns: Sequence[str]) -> None:
    """Raise InvalidInput unless a file has all columns ``needed``. The names that it has are private: they may be
    values of its first row where it has no header."""
    for name in needed:
        if name not in columns:
            raise InvalidInput(
                f"there is no column {name!r} in {path}; spell it as the first line of the file does, or give the file "
                "a first line of names (those that are there are withheld, as they may be a row)"
            ) from PrivateDetail(nearest(name, columns))


def refuse_repeated(name: str, path: Path) -> NoReturn:
    """Raise InvalidInput for a file in which several columns are called ``name``, which is private."""
    raise InvalidInput(
        f"the table {path} has more than one column of the same name; rename them, or give the file a first line of "
        "names"
    ) from PrivateDetail(f"the name {name!r}")


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
    rows: pa.Table, roles: Roles, texts: Mapping[str, CellValues], path: str, numbers: Container[str] = ()
) -> pa.Table:
    """Return the columns with a role: numbers and owners unchanged, others as text, spelt as declared in ``texts``."""
    require_columns(roles.used, path, rows.column_names)
    columns = {name: rows[name] for name in roles.used}
    return pa.table(
        {
            name: column
            if (is_numeric(column) and (name not in texts or name in numbers))
            or (name == roles.user and pa.types.is_list(column.type))
            else as_declared(column, texts.get(name, ()), f"{roles.called(name)} of {path}")
            for name, column in columns.items()
        }
    )


def encoding_of(rows: pa.Table, roles: Roles, declared: Declared) -> Encoding:
    """Return the encoding; ranges, categories, classes and groups not declared are taken from the complete rows."""
    targets = roles.labels if declared.task == "regression" else ()
    for name in itertools.chain(*declared.ways):
        if name not in roles.features and not (name in targets and name in declared.ranges):
            raise InvalidInput(
                f"{name!r} has a range or categories, but is no feature; correct it, or name it in `features`"
            ) from PrivateDetail(nearest(name, roles.features))
        if sum(name in way for way in declared.ways) > 1:
            raise InvalidInput(
                f"column {name!r} has more than one of a range, categories and a place in `unscaled` or `hashed`; keep "
                "one of them"
            )
    complete = _complete(rows, roles)
    labels = _labels(complete, roles, declared)
    group_values = {
        name: labels.names
        if name in roles.labels and declared.task == "classification" and name not in declared.groups
        else _declared_or_distinct(declared.groups.get(name), complete[name])
        for name in roles.groups
    }
    shown = intersected(group_values) if group_values else NO_GROUPS
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
    """Return what is taken from the rows because it is not declared."""
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
    """Return the rows without a missing value. Raises: InvalidInput when there is none."""
    if rows.num_rows == 0:
        raise InvalidInput("the table has no rows; give a file with at least one")
    complete = rows.take(complete_rows(rows))
    if complete.num_rows == 0:
        missing = {name: int(lacks(rows[name]).sum()) for name in rows.column_names}
        worst = max(missing, key=missing.__getitem__)
        can_go = worst in roles.features and len(roles.features) > 1
        step = "leave it out of `features`" if can_go else "correct it, or name another"
        raise InvalidInput(f"no row is complete; {roles.called(worst)} lacks most values: {step}") from PrivateDetail(
            f"{worst!r} has no value in {missing[worst]} of {rows.num_rows} rows"
        )
    return complete


def declared_column(name: str, declared: Declared) -> Column | None:
    """Return the encoder of a feature; None if its encoding is not declared."""
    if name in declared.categories:
        return Categorical(name, names(declared.categories[name]))
    if name in declared.ranges:
        return Numeric(name, *declared.ranges[name])
    if name in declared.unscaled:
        return Unscaled(name)
    if name in declared.hashed:
        return Hashed(name, declared.hashed[name])
    return None


def _column(values: pa.ChunkedArray, name: str, declared: Declared, roles: Roles) -> Column:
    if declared_encoder := declared_column(name, declared):
        return declared_encoder
    called = roles.called(name)
    return _learnt_range(values, name, called) if is_numeric(values) else _learnt_categories(values, name, called)


def _learnt_range(values: pa.ChunkedArray, name: str, called: str) -> Numeric:
    found = as_numbers(values, name)
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
    if len(found) > max(_MANY_TEXTS, len(values) / 2):
        raise InvalidInput(
            f"{called} has another text in most rows, of which no category can be learnt; leave it out of `features`, "
            "or declare its `categories`, or that it is `hashed`, or by `numbers` how it writes numbers"
        ) from PrivateDetail(f"{name!r} has {len(found)} distinct texts in {len(values)} rows, such as {found[0]!r}")
    return Categorical(name, found)


def _declared_or_distinct(declared: CellValues | None, values: pa.ChunkedArray) -> tuple[str, ...]:
    return distinct(values) if declared is None else names(declared)


def distinct(texts: pa.ChunkedArray) -> tuple[str, ...]:
    """Return the distinct values, sorted as numbers if all are numbers, else as text."""
    found: list[str] = compute.unique(texts).drop_null().to_pylist()
    try:
        return tuple(sorted(found, key=float))
    except ValueError:
        return tuple(sorted(found))
