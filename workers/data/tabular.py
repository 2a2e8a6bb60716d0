"""Columns of a table as features: numbers scaled by declared ranges, categories one-hot by declared values.

Declared means public: nothing is learnt from the rows, so encoding costs no privacy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute

from accounting.errors import InvalidInput
from accounting.registry import nearest

Rows = npt.NDArray[np.float32]


class Column(Protocol):
    """How one column of a table becomes features."""

    @property
    def name(self) -> str: ...

    @property
    def width(self) -> int:
        """Number of features."""
        ...

    def encode(self, values: pa.ChunkedArray) -> Rows:
        """[n] values without nulls -> [n, width]."""
        ...


@dataclass(frozen=True)
class Numeric:
    """A number as (value - low) / (high - low), cut to [0, 1]."""

    name: str
    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise InvalidInput(
                f"the range of column {self.name!r} is [{self.low}, {self.high}], but must be increasing"
            )

    @property
    def width(self) -> int:
        return 1

    def encode(self, values: pa.ChunkedArray) -> Rows:
        numbers = values.cast(pa.float64()).to_numpy()
        scaled: Rows = np.clip((numbers - self.low) / (self.high - self.low), 0.0, 1.0).astype(np.float32)
        return scaled[:, None]


@dataclass(frozen=True)
class Categorical:
    """A category as a one-hot row; a value outside the declared ones is all zeros."""

    name: str
    categories: tuple[str, ...]

    @property
    def width(self) -> int:
        return len(self.categories)

    def encode(self, values: pa.ChunkedArray) -> Rows:
        position = positions(values, self.categories)
        rows = np.zeros((len(position), self.width), dtype=np.float32)
        known = np.flatnonzero(position >= 0)
        rows[known, position[known]] = 1.0
        return rows


def positions(values: pa.ChunkedArray, names: Sequence[str]) -> npt.NDArray[np.int64]:
    """[n]: where each value, as a string, stands in ``names``; -1 where it does not."""
    found = compute.index_in(values.cast(pa.string()), value_set=pa.array(names, pa.string()))
    return np.asarray(found.cast(pa.int64()).fill_null(-1).to_numpy(), dtype=np.int64)


def indices(values: pa.ChunkedArray, names: Sequence[str], what: str) -> npt.NDArray[np.int64]:
    """`positions`, with an error for values that are not in ``names``."""
    found = positions(values, names)
    if (found < 0).any():
        stranger = values[int(np.flatnonzero(found < 0)[0])]
        raise InvalidInput(f"{what} has the value {str(stranger)!r}; {nearest(str(stranger), names)}")
    return found


def encode_table(table: pa.Table, columns: Sequence[Column]) -> Rows:
    """[n, total width], the columns side by side."""
    if not columns:
        raise InvalidInput("no feature column is left; name at least one")
    return np.concatenate([column.encode(table[column.name]) for column in columns], axis=1)


def without(columns: Sequence[Column], exclude: Collection[str], source: str) -> list[Column]:
    """The columns not named in ``exclude``, or `InvalidInput` if it names one that is not there."""
    names = [column.name for column in columns]
    for name in exclude:
        if name not in names:
            raise InvalidInput(f"data source {source!r}: cannot exclude {name!r}; {nearest(name, names)}")
    return [column for column in columns if column.name not in exclude]


def choose_group(source: str, group: str, names: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The group names of the attribute ``group``, or `InvalidInput` with the valid attributes."""
    if group not in names:
        raise InvalidInput(f"data source {source!r} has no groups by {group!r}; {nearest(group, names)}")
    return names[group]


def complete_rows(table: pa.Table) -> npt.NDArray[np.int64]:
    """Indices of the rows without a null or NaN."""
    complete = np.ones(table.num_rows, dtype=bool)
    for column in table.columns:
        complete &= ~column.is_null(nan_is_null=True).to_numpy()
    return np.flatnonzero(complete)
