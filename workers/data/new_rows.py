"""Encodes the rows of another table, such as new people, as a trained model reads them.

Only what a sweep declares is used, so that neither the training table nor anything read off its rows is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpsweep.accounting.errors import InvalidInput, count_of
from dpsweep.workers.data.conventions import Convention
from dpsweep.workers.data.spelling import CellValues
from dpsweep.workers.data.table import (
    Declared,
    Range,
    Roles,
    as_described,
    declared_column,
    require_columns,
    require_once,
    used_columns,
)
from dpsweep.workers.data.table_files import places_of, read_table_file
from dpsweep.workers.data.tabular import (
    Categorical,
    Column,
    Hashed,
    Numeric,
    Unscaled,
    as_numbers,
    complete_rows,
    encoded_columns,
    lacks,
    positions,
)


@dataclass(frozen=True)
class Columns:
    """Declared features of a table in their order, in the words of the sweep file (`table`), without other columns.

    `outputs`: names of the model's outputs; None for classes that are not declared. `targets`: ranges of targets.
    """

    features: Sequence[str]
    ranges: Mapping[str, Range]
    categories: Mapping[str, CellValues]
    numbers: Mapping[str, Convention]
    unscaled: Sequence[str]
    hashed: Mapping[str, int]
    ignore_case: Sequence[str]
    encoding: str | None
    task: str
    outputs: Sequence[str] | None
    targets: Mapping[str, Range]

    @property
    def declared(self) -> Declared:
        """Return how the features are encoded."""
        ways = self.numbers, self.unscaled, self.hashed, self.ignore_case
        return Declared("regression", self.ranges, self.categories, None, {}, *ways)

    @property
    def encoders(self) -> list[Column]:
        """Return the encoders of the features."""
        found = (declared_column(name, self.declared) for name in self.features)
        return [each for each in found if each is not None]

    @property
    def example_shape(self) -> list[int]:
        """Return the shape of a row: its number of features."""
        return [sum(map(_width, self.encoders))]

    @property
    def leading_numbers(self) -> int:
        """Return how many features are numbers before the first that is part of a category or a text."""
        return sum(1 for _ in itertools.takewhile(lambda each: isinstance(each, Numeric | Unscaled), self.encoders))

    @property
    def example(self) -> dict[str, Any]:
        """Return a row made of declarations: middles of ranges, first categories; lists stand for embeddings."""
        row: dict[str, Any] = {each.name: self._value(each) for each in self.encoders}
        for name, places in places_of(self.features).items():
            row[name] = [row.pop(place) for place in places]
        return row

    def _value(self, column: Column) -> str | float:
        match column:
            case Categorical(_, categories):
                return categories[0]
            case Hashed():
                return "text"
            case Numeric(name, low, high):
                middle = (low + high) / 2.0
                if name not in self.numbers:
                    return middle
                return f"{middle:f}".replace(".", "," if self.numbers[name] == "comma" else ".")
        return "0" if column.name in self.numbers else 0.0

    @property
    def scaled(self) -> list[int]:
        """Return the places of the features that ranges scale to [0, 1]."""
        ends = itertools.accumulate(map(_width, self.encoders))
        return [end - 1 for end, each in zip(ends, self.encoders, strict=True) if isinstance(each, Numeric)]

    def encoded(self, path: str) -> NewRows:
        """Return the rows of a .csv, .tsv, .jsonl or .parquet file, which may have other columns, too, in any order.

        A value that is no declared category becomes all zeros, and a number is cut at its range, as in training; notes
        count them. Raises: InvalidInput for a column that lacks or is there twice, one of another type, and no rows;
        DataCorruption for a file that cannot be read.
        """
        declared = self.declared
        texts = declared.texts((), (), ())
        rows = read_new_table(path, texts, self.encoding)
        places = places_of(self.features)
        for name, found in places_of(rows.column_names).items():
            if name in places and len(found) != len(places[name]):
                raise InvalidInput(
                    f"{name!r} holds lists of {len(found)} numbers in {path}, but of {len(places[name])} in training"
                )
        require_columns(self.features, path, rows.column_names)
        require_once(self.features, rows, path, "leave one of them")
        described = as_described(rows, declared, path)
        roles = Roles((), (), None, tuple(self.features), frozenset(self.features))
        used = used_columns(described, roles, texts, path, declared.numbers)
        complete = complete_rows(used)
        taken = used.take(complete)
        notes = (*_incomplete(used, len(complete), self.numbers), *_undeclared(taken, self.encoders))
        return NewRows(encoded_columns(taken, self.encoders), complete, used.num_rows, notes)


def read_new_table(path: str, texts: Mapping[str, CellValues], encoding: str | None) -> pa.Table:
    """Return a new table, as `read_table_file` does. encoding: of text files. Raises: InvalidInput for no rows."""
    is_text = path.lower().endswith((".csv", ".tsv"))
    rows = read_table_file(path, texts, encoding if is_text else None)
    if not rows.num_rows:
        raise InvalidInput(f"the table {path} has no rows; give one with at least one")
    return rows


def _width(column: Column) -> int:
    match column:
        case Categorical():
            return len(column.categories)
        case Hashed():
            return column.places
    return 1


@dataclass(frozen=True)
class NewRows:
    """Encoded rows of a new table. `features`: of the complete rows, whose places among all ``total`` are `complete`.

    `notes`: sentences on values that are missing or undeclared.
    """

    features: npt.NDArray[np.generic]
    complete: npt.NDArray[np.int64]
    total: int
    notes: tuple[str, ...]


def _incomplete(rows: pa.Table, complete: int, written: Container[str]) -> Iterator[str]:
    """Yield how many rows have no features, as they lack a value, and the columns that lack it.

    written: columns whose way to write numbers is declared.
    """
    if complete == rows.num_rows:
        return
    lacking = {name: int(lacks(rows[name]).sum()) for name in rows.column_names}
    lacking = {name: count for name, count in lacking.items() if count}
    named = ", ".join(f"{name} {count:,}" for name, count in lacking.items())
    otherwise = " or write numbers otherwise than declared" * any(name in written for name in lacking)
    share = f"{rows.num_rows - complete:,} of {count_of(rows.num_rows, 'row')}"
    yield f"{share} have no prediction: they lack a value{otherwise} ({named})"


def _undeclared(rows: pa.Table, encoders: Sequence[Column]) -> Iterator[str]:
    """Yield how many rows hold a value that the sweep does not declare, by column."""
    total = count_of(rows.num_rows, "row")
    for column in encoders:
        match column:
            case Categorical(name, categories):
                strange = int((positions(rows[name], categories) < 0).sum())
                if strange:
                    yield f"{name}: {strange:,} of {total} hold no declared category, and count as none"
            case Numeric(name, low, high):
                given = as_numbers(rows[name], name)
                beyond = int(((given < low) | (given > high)).sum())
                if beyond:
                    yield f"{name}: {beyond:,} of {total} lie outside the range {low:g} to {high:g}, and are cut"
