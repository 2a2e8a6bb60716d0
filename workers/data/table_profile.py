"""Profile of a table, column by column, from which a sweep is drafted. Computed from the rows, so private data."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.registry import nearest
from dpsweep.workers.data.conventions import (
    MISSING_SPELLINGS,
    Written,
    are_written_as_thousands,
    is_date,
    is_list,
    is_picture,
    is_prose,
    number_of,
    parsed,
    strange_among_numbers,
    written_in_several_ways,
    written_numbers,
)
from dpsweep.workers.data.source_files import reading
from dpsweep.workers.data.table import distinct
from dpsweep.workers.data.table_files import places_of, proposed_encoding, read_table_file, repeated_names
from dpsweep.workers.data.tabular import as_numbers, as_text, holds_bytes, is_numeric, lacks
from dpsweep.workers.machine.folders import at_home


@dataclass(frozen=True)
class ColumnProfile:
    """Profile of one column.

    `span`: smallest and largest number; None if the column does not hold numbers.
    `whole`: whether all numbers are whole.
    `values`: distinct values as text, as a sweep declares them; None for more than the limit.
    `distinct`: number of distinct values.
    `missing`: share of the rows without a value, in [0, 1].
    `written`: how the texts write numbers, if they do.
    `markers`: texts besides the empty one that count as missing.
    `unreadable`: the type of values that cannot be read.
    `places`: number of places of an embedding, whose numbers are described together; 0 for one value a row.
    `all_different`: whether no two rows have the same value.
    `is_order`: whether whole numbers only count the rows, as identifiers do.
    `same_as`: an earlier column of equal values.
    `rare`: the listed values of fewer than `FEW_ROWS` rows.
    `least`: number of rows that have the rarest listed value.
    `largest`: share of the rows that have the most frequent listed value.
    `apart`: a number that many rows share, far from all others.
    `ways`: texts that write numbers in several ways.
    `strange`: a text among others that write numbers.
    `tells_class`: whether its values alone give the class of nearly every row, as in a column that is filled in after
    the outcome.
    `may_be_thousands`: whether points may separate thousands.
    `has_lists`: whether texts spell lists of numbers.
    `has_dates`: whether they spell dates or times, or numbers do, such as 20200131.
    `has_pictures`: whether texts name files of pictures.
    `is_prose`: whether most texts have several words.
    `deviation`: standard deviation of the numbers.
    """

    name: str
    span: tuple[float, float] | None = None
    whole: bool = False
    values: tuple[str, ...] | None = None
    distinct: int = 0
    missing: float = 0.0
    written: Written | None = None
    markers: tuple[str, ...] = ()
    unreadable: pa.DataType | None = None
    places: int = 0
    is_order: bool = False
    all_different: bool = False
    same_as: str = ""
    rare: tuple[str, ...] = ()
    apart: float | None = None
    ways: tuple[str, ...] = ()
    has_lists: bool = False
    has_dates: bool = False
    has_pictures: bool = False
    is_prose: bool = False
    deviation: float = 0.0
    strange: str = ""
    tells_class: bool = False
    may_be_thousands: bool = False
    least: int = 0
    largest: float = 0.0

    @property
    def holds_bytes(self) -> bool:
        """Whether the column holds bytes, as of pictures."""
        return self.unreadable is not None and holds_bytes(self.unreadable)


@dataclass(frozen=True)
class TableProfile:
    """The columns of a file, and its number of rows. `encoding`: to be declared, if the file is not UTF-8.

    `repeated`: names of several columns of the file. `has_values_as_names`: whether the names look like a row of
    values, as in a file without names."""

    rows: int
    columns: tuple[ColumnProfile, ...]
    encoding: str | None = None
    repeated: frozenset[str] = frozenset()
    has_values_as_names: bool = False

    def column(self, name: str, role: str) -> ColumnProfile:
        """Return the column called ``name``.

        Raises: InvalidInput if there is none: with the nearest name, unless one is a number. Then all may be a row of
        a table without names.
        """
        for column in self.columns:
            if column.name == name:
                return column
        several = [part.strip() for part in name.split(",")]
        if len(several) > 1 and {*several} <= {each.name for each in self.columns}:
            first = f"draft by {several[0]!r}, then list several in the file (docs/data.md)"
            raise InvalidInput(
                f"the {role} column {name!r} is not in the table, but {' and '.join(map(repr, several))} are; "
                f"{'repeat --label for each' if role == 'label' else first}"
            )
        if any(number_of(each.name, "point") is not None for each in self.columns):
            raise InvalidInput(
                f"the {role} column {name!r} is not in the table; its first line holds numbers, so it is not shown, as "
                "it may be a row: look at it, and give the table a first line of names"
            )
        alone = "; it has one column: are columns separated by another sign than , ; | or tab?" * (
            len(self.columns) == 1
        )
        raise InvalidInput(
            f"the {role} column {name!r} is not in the table; {nearest(name, [each.name for each in self.columns])}"
            f"{alone}"
        )

    def with_prose(self, name: str) -> TableProfile:
        """Return the profile in which the column called ``name`` holds texts of several words."""
        columns = (replace(each, values=None, is_prose=True) if each.name == name else each for each in self.columns)
        return replace(self, columns=tuple(columns))


def profile_table(
    path: str, texts: tuple[str, ...], most_values: int, named: tuple[str, ...] = (), classes: str | None = None
) -> TableProfile:
    """Return the profile of a .csv, .tsv, .jsonl or .parquet file.

    `texts`: columns read as text, even if they hold numbers. named: columns that the file should have, by which its
    encoding is found. Values are listed up to ``most_values``. classes: the column of classes, if the task is known to
    be classification.

    Raises: InvalidInput for a missing file, one without rows and one that is packed, DataCorruption for one that cannot
    be read.
    """
    file = at_home(path)
    encoding = None
    if file.suffix.lower() in _TEXT_FILES and os.path.isfile(file):  # False for a name that is too long
        with reading(file):
            encoding = proposed_encoding(file, named)
    first = read_table_file(path, dict.fromkeys(texts, ()), encoding)
    if first.num_rows == 0:
        raise InvalidInput(f"the table {path} has no rows; give a table with a header and at least one row")
    spelt = read_table_file(path, dict.fromkeys(first.column_names, MISSING_SPELLINGS[1:]), encoding)
    as_texts = {*texts, *(name for name in first.column_names if not _holds_numbers(first[name], spelt[name]))}
    rows = read_table_file(path, dict.fromkeys(as_texts, ()), encoding)
    written = {name: _written(rows[name]) for name in rows.column_names if name in as_texts and name not in texts}
    plain = [name for name in rows.column_names if name not in as_texts]
    if _has_commas(written.values()) and not any(_has_points(rows[name], spelt[name]) for name in plain):
        as_texts.update(thousands := {name for name in plain if _may_be_thousands(spelt[name])})
        rows = read_table_file(path, dict.fromkeys(as_texts, ()), encoding)
        written = {name: _with_commas(way) for name, way in written.items()}
        written.update((name, _with_commas(_written(rows[name]))) for name in thousands)
    embeddings = {
        name: places
        for name, places in places_of(rows.column_names).items()
        if len(places) > 1 and not as_texts & {*places}
    }
    single = [name for name in rows.column_names if not any(name in places for places in embeddings.values())]
    columns = [
        _as_spelt(_column(name, rows[name], name in as_texts, most_values, written.get(name)), spelt[name])
        for name in single
    ]
    if classes is not None:
        codes = np.where(lacks(rows[classes]), -1, _codes(rows[classes]))
        columns = [replace(each, tells_class=_tells(each, rows[each.name], codes, most_values)) for each in columns]
    lists = (_embedding(name, rows.select(places)) for name, places in embeddings.items())
    found = (*_without_repetition(columns, rows), *lists)
    are_values = file.suffix.lower() in _TEXT_FILES and _are_values(found)
    return TableProfile(rows.num_rows, found, encoding, repeated_names(rows), are_values)


_TEXT_FILES: Final = (".csv", ".tsv")
_LOOKED_AT: Final = 1000
"""Maximum number of texts of a column that are looked at for numbers, lists and dates."""


FEW_ROWS: Final = 10
_APART: Final = 0.01
"""Minimum share of the rows that have a number far from all others, for it to count as a mark."""


def _are_values(columns: Sequence[ColumnProfile]) -> bool:
    """Return whether every name could stand below it in its column, and a number at least does."""
    listed = [each for each in columns if each.span is not None or each.values is not None]
    of_numbers = [each.span is not None and number_of(each.name, "point") is not None for each in listed]
    return any(of_numbers) and all(
        is_number or each.name in (each.values or ()) for is_number, each in zip(of_numbers, listed, strict=True)
    )


def _counts(values: pa.ChunkedArray) -> dict[str, int]:
    """Return the number of rows by text."""
    return {str(each["values"]): int(each["counts"]) for each in values.value_counts().to_pylist()}


def _of_values(column: ColumnProfile, known: pa.ChunkedArray) -> ColumnProfile:
    """Return the profile with how many rows have the listed values."""
    if column.values is None:
        return column
    counts = _counts(known)
    rare = tuple(value for value in column.values if counts[value] < FEW_ROWS)
    return replace(column, rare=rare, least=min(counts.values()), largest=max(counts.values()) / len(known))


def _apart(present: npt.NDArray[np.float64]) -> float | None:
    """Return the smallest or largest number if many rows share it and it lies far from all others, as -999 does."""
    different, counts = np.unique(present, return_counts=True)
    if len(different) < _FEWEST_BESIDE + 1:
        return None
    low, high = different[1] - different[0], different[-1] - different[-2]
    for place, gap, span in ((0, low, different[-1] - different[1]), (-1, high, different[-2] - different[0])):
        if gap > span and counts[place] >= max(2, _APART * len(present)):
            return float(different[place])
    return None


_UNTOLD: Final = 0.05
"""Share of the rows outside the most frequent class that a column which tells the class may leave unexplained."""
_FEWEST_BESIDE: Final = 10
"""Minimum number of different numbers beside a mark."""


def _without_repetition(columns: list[ColumnProfile], rows: pa.Table) -> list[ColumnProfile]:
    """Return the profiles, each with the first column of equal values."""
    found, alike = list[ColumnProfile](), defaultdict[ColumnProfile, list[str]](list)
    for column in columns:
        earlier = alike[replace(column, name="")] if column.distinct > 1 else []
        same = next((name for name in earlier if rows[name].equals(rows[column.name])), "")
        earlier += [] if same else [column.name]
        found.append(replace(column, same_as=same) if same else column)
    return found


def _embedding(name: str, rows: pa.Table) -> ColumnProfile:
    """Return the profile of all places of an embedding together."""
    values = [as_numbers(rows[place], place) for place in rows.column_names]
    known = np.isfinite(np.stack(values)).all(0)
    if not known.any():
        return ColumnProfile(name, missing=1.0)
    low, high = (float(edge([edge(each[known]) for each in values])) for edge in (np.min, np.max))
    missing = 1.0 - float(known.mean())
    return ColumnProfile(name, (low, high), distinct=rows.num_rows, missing=missing, places=len(values))


def _written(values: pa.ChunkedArray) -> Written | None:
    """Return how a column of texts writes numbers, if it does."""
    if not pa.types.is_string(values.type):
        return None
    return written_numbers(_counts(values.drop_null()))


def _has_commas(written: Iterable[Written | None]) -> bool:
    """Return whether a column has decimal commas for certain, and none has decimal points for certain."""
    return {way.convention for way in written if way is not None and way.certain} == {"comma"}


def _has_points(values: pa.ChunkedArray, spelt: pa.ChunkedArray) -> bool:
    """Return whether a column of plain numbers has decimal points, and these are not of thousands."""
    return pa.types.is_floating(values.type) and not _may_be_thousands(spelt)


def _with_commas(written: Written | None) -> Written | None:
    """Return how a column writes numbers in a table of decimal commas: with commas, where they may be."""
    return replace(written, convention="comma") if written is not None and written.ambiguous else written


def _may_be_thousands(spelt: pa.ChunkedArray) -> bool:
    if not pa.types.is_string(spelt.type):
        return False
    texts = compute.unique(spelt).drop_null().slice(0, _LOOKED_AT).to_pylist()
    return are_written_as_thousands([each for each in texts if each not in MISSING_SPELLINGS])


def _as_spelt(column: ColumnProfile, spelt: pa.ChunkedArray) -> ColumnProfile:
    """Return the profile with the texts that count as missing, and whether its numbers may be thousands."""
    unread = column.written.unread if column.written else ()
    markers = tuple(dict.fromkeys((*_markers(spelt), *unread)))
    doubtful = column.span is not None and column.written is None and _may_be_thousands(spelt)
    return replace(column, markers=markers, may_be_thousands=doubtful)


def _markers(spelt: pa.ChunkedArray) -> tuple[str, ...]:
    """Return the texts of a column that count as missing, without the empty one."""
    if not pa.types.is_string(spelt.type):
        return ()
    return tuple(sorted(set(compute.unique(spelt).drop_null().to_pylist()).intersection(MISSING_SPELLINGS[1:])))


def _holds_numbers(values: pa.ChunkedArray, spelt: pa.ChunkedArray) -> bool:
    """Return whether a column holds numbers, and not codes such as 007, whose zeros a number would lose."""
    if not is_numeric(values):
        return False
    is_text = pa.types.is_string(spelt.type)
    return not (is_text and compute.any(compute.match_substring_regex(spelt, r"^[+-]?0[0-9]")).as_py())


@np.errstate(over="ignore", invalid="ignore")  # numbers near the largest have an infinite deviation
def _column(
    name: str, values: pa.ChunkedArray, is_text: bool, most_values: int, written: Written | None
) -> ColumnProfile:
    if written is not None:
        values, is_text = parsed(values, written.convention), False
    if pa.types.is_floating(values.type):
        values = compute.if_else(compute.is_finite(values), values, None)
    try:
        known = as_text(values, f"column {name!r}").drop_null()
    except InvalidInput:
        return ColumnProfile(name, unreadable=values.type, missing=values.null_count / len(values))
    count, missing = compute.count_distinct(known).as_py(), 1.0 - len(known) / len(values)
    found = distinct(known) if 0 < count <= most_values else None
    present = np.zeros(0) if is_text or not is_numeric(values) else as_numbers(values.drop_null(), name)
    different = count == len(values)
    column = ColumnProfile(name, values=found, distinct=count, missing=missing, all_different=different)
    column = _of_values(column, known)
    if present.size == 0:
        texts = [] if found is not None else compute.unique(known).slice(0, _LOOKED_AT).to_pylist()
        return replace(
            column,
            ways=written_in_several_ways(texts),
            has_lists=bool(texts) and all(map(is_list, texts)),
            has_dates=bool(texts) and (pa.types.is_temporal(values.type) or all(map(is_date, texts))),
            has_pictures=bool(texts) and all(map(is_picture, texts)),
            is_prose=sum(map(is_prose, texts)) > len(texts) / 2,
            strange=strange_among_numbers(texts),
        )
    whole = bool((present == present.round()).all())
    return replace(
        column,
        span=(float(present.min()), float(present.max())),
        whole=whole,
        written=written,
        is_order=whole and different and _counts_rows(present),
        apart=_apart(present),
        has_dates=whole and found is None and _are_dates(present),
        deviation=float(np.nan_to_num(present.std(), nan=np.inf, posinf=np.inf)),
    )


def _tells(column: ColumnProfile, values: pa.ChunkedArray, labels: npt.NDArray[np.int64], most_values: int) -> bool:
    """Return whether the column alone explains nearly all rows outside the most frequent class. Each listed value has
    one class, or each part of its numbers, which as many cuts divide as separate the classes.

    labels [rows]: the class of each row, -1 without one.
    """
    if column.values is None and column.span is None:
        return False
    if column.written is not None:
        values = parsed(values, column.written.convention)
    known = ~lacks(values) & (labels >= 0)
    classes = labels[known]
    if not 2 <= (kinds := len(np.unique(classes))) <= most_values:
        return False
    if column.values is not None:
        parts = _codes(values)[known]
    else:
        from sklearn.tree import DecisionTreeClassifier  # late: importing it takes a second

        ranks = np.unique(as_numbers(values, column.name)[known], return_inverse=True)[1].reshape(-1, 1)
        parts = DecisionTreeClassifier(max_leaf_nodes=kinds).fit(ranks, classes).apply(ranks)
    found = np.zeros((int(parts.max()) + 1, int(classes.max()) + 1))
    np.add.at(found, (parts, classes), 1.0)
    by_chance = max(np.count_nonzero(found.any(1)) - np.count_nonzero(found.any(0)), 0)  # a value more fits a row
    return bool(found.sum() - found.max(1).sum() + by_chance <= _UNTOLD * (found.sum() - found.sum(0).max()))


def _codes(values: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Return the number of each row's text, -1 without one."""
    codes = as_text(values, "a column").combine_chunks().dictionary_encode().indices
    return np.asarray(codes.fill_null(-1).to_numpy(), dtype=np.int64)


def _are_dates(present: npt.NDArray[np.float64]) -> bool:
    """Return whether all whole numbers are dates such as 20200131."""
    months, days = present // 100 % 100, present % 100
    years = (present >= 1900_01_01) & (present <= 2100_12_31)
    return bool((years & (months >= 1) & (months <= 12) & (days >= 1) & (days <= 31)).all())


def _counts_rows(present: npt.NDArray[np.float64]) -> bool:
    """Return whether different whole numbers are ascending, or leave hardly any number between them out."""
    steps = np.diff(present)
    return bool((steps > 0).all() or (steps < 0).all()) or float(np.ptp(present)) < 1.5 * present.size
