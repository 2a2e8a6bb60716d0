"""Encodes columns of a table as features: numbers scaled by given ranges, categories one-hot by given values.

Nothing here is computed from other rows, so the encoding costs no privacy if ranges and values are declared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute

from dpsweep.accounting.errors import InvalidInput, PrivateDetail, keep_whole
from dpsweep.accounting.registry import nearest
from dpsweep.workers.data.base import repeated

Rows = npt.NDArray[np.float32]
NORM_OF_TEXT: Final = 3.0
"""Norm of the features of a text. That of nine standardised numbers lets a text count beside the columns of a table."""
_LETTERS: Final = 3
"""Letters of the n-grams of a text: they need no blanks between words, and survive a spelling mistake."""
_MOST_PLACES: Final = 2**20
_TEXTS_AT_ONCE: Final = 4096


class Column(Protocol):
    """Converts one column of a table to features."""

    @property
    def name(self) -> str: ...

    def encode(self, values: pa.ChunkedArray) -> Rows:
        """Return features [n, width] of values [n] without nulls."""
        ...


@dataclass(frozen=True)
class Numeric:
    """A number as (value - low) / (high - low), clamped to [0, 1]."""

    name: str
    low: float
    high: float

    def __post_init__(self) -> None:
        if not (self.low < self.high and math.isfinite(self.high - self.low)):
            raise InvalidInput(
                f"the range of column {self.name!r} is [{self.low}, {self.high}], but must be increasing and finite"
            )

    def encode(self, values: pa.ChunkedArray) -> Rows:
        within = np.clip(as_numbers(values, self.name), self.low, self.high)
        scaled: Rows = ((within - self.low) / (self.high - self.low)).astype(np.float32)
        return scaled[:, None]


@dataclass(frozen=True)
class Unscaled:
    """A number as it is, within what float32 holds."""

    name: str

    def encode(self, values: pa.ChunkedArray) -> Rows:
        most = float(np.finfo(np.float32).max)
        return np.clip(as_numbers(values, self.name), -most, most).astype(np.float32)[:, None]


@dataclass(frozen=True)
class Categorical:
    """A category as a one-hot row. An undeclared value becomes all zeros, or InvalidInput if ``closed``."""

    name: str
    categories: tuple[str, ...]
    closed: bool = False

    def __post_init__(self) -> None:
        if not self.categories or len(set(self.categories)) < len(self.categories):
            raise InvalidInput(
                f"categories of {self.name!r} are {list(self.categories)}, but must be at least one, all different"
            )

    def encode(self, values: pa.ChunkedArray) -> Rows:
        what, names = f"column {self.name!r}", self.categories
        position = indices(values, names, what) if self.closed else positions(values, names)
        rows = np.zeros((len(position), len(names)), dtype=np.float32)
        known = np.flatnonzero(position >= 0)
        rows[known, position[known]] = 1.0
        return rows


@dataclass(frozen=True)
class Hashed:
    """A text as the counts of its letter triples, hashed to ``places`` features, scaled to norm `NORM_OF_TEXT`.

    A text without a letter becomes all zeros. Neither a vocabulary nor a weight is taken from the rows.
    """

    name: str
    places: int

    def __post_init__(self) -> None:
        keep_whole(self, "places", f"places of the texts {self.name!r}", at_least=1, at_most=_MOST_PLACES)

    def encode(self, values: pa.ChunkedArray) -> Rows:
        from sklearn.feature_extraction.text import HashingVectorizer  # late: it takes a second

        hashing = HashingVectorizer(
            analyzer="char_wb", ngram_range=(_LETTERS, _LETTERS), n_features=self.places, dtype=np.float32
        )
        rows = np.zeros((len(values), self.places), dtype=np.float32)
        for start in range(0, len(rows), _TEXTS_AT_ONCE):
            texts = values.slice(start, _TEXTS_AT_ONCE).to_pylist()
            hashing.transform(texts).toarray(out=rows[start : start + len(texts)])
        rows *= NORM_OF_TEXT
        return rows


def is_numeric(values: pa.ChunkedArray) -> bool:
    """Return whether the column holds integers, floating-point numbers or decimals."""
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    return any(is_kind(values.type) for is_kind in kinds)


def holds_lists(kind: pa.DataType) -> bool:
    """Return whether the values of a column of this type are lists."""
    return any(is_kind(kind) for is_kind in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def kind_of(values: pa.Array | pa.ChunkedArray) -> str:
    """Return the type of a column for errors, without the names in nested ones, which may be words of the rows."""
    return str(values.type).partition("<")[0]


def as_numbers(values: pa.ChunkedArray, name: str) -> npt.NDArray[np.float64]:
    """Return [n] values of column ``name`` as float64; whole numbers beyond 2^53 are rounded."""
    try:
        return np.asarray(values.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)
    except pa.ArrowException as error:
        raise InvalidInput(
            f"column {name!r} has a range but holds more than numbers; declare its categories, or how it writes "
            "numbers with `numbers`, or correct it"
        ) from error


def as_text(values: pa.Array | pa.ChunkedArray, what: str) -> pa.Array | pa.ChunkedArray:
    """Return strings, of whole numbers without a decimal point; NaN is null. Raises: InvalidInput for nested types."""
    if pa.types.is_floating(values.type):
        values = compute.if_else(compute.is_nan(values), None, values)
    try:
        return values.cast(pa.string())
    except pa.ArrowException as error:
        raise InvalidInput(
            f"{what} holds {kind_of(values)}, but only numbers, text, booleans and dates can be read"
        ) from error


def positions(values: pa.ChunkedArray, names: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return [n]: index in ``names`` of each value as a string; -1 for values that are not in ``names``."""
    found = compute.index_in(values.cast(pa.string()), value_set=pa.array(names, pa.string()))
    return np.asarray(found.cast(pa.int64()).fill_null(-1).to_numpy(), dtype=np.int64)


def indices(values: pa.ChunkedArray, names: Sequence[str], what: str) -> npt.NDArray[np.int64]:
    """Return `positions` of values that must all be in ``names``. Raises: InvalidInput otherwise."""
    found = positions(values, names)
    if (found < 0).any():
        stranger = str(values[int(np.flatnonzero(found < 0)[0])])
        raise InvalidInput(
            f"{what} has a value that is neither declared nor in the rows that they are taken from; declare or mend it"
        ) from PrivateDetail(f"the value {stranger!r}; {nearest(stranger, names)}")
    return found


def encoded_columns(table: pa.Table, columns: Sequence[Column]) -> Rows:
    """Return [n, total width]: the encoded columns, concatenated."""
    if not columns:
        raise InvalidInput("no feature column is left; name at least one")
    return np.concatenate([column.encode(table[column.name]) for column in columns], axis=1)


def without(columns: Sequence[Column], exclude: Collection[str], source: str) -> list[Column]:
    """Return the columns not named in ``exclude``. Raises: InvalidInput when it names an unknown column."""
    names = [column.name for column in columns]
    for name in exclude:
        if name not in names:
            raise InvalidInput(f"data source {source!r}: cannot exclude {name!r}; {nearest(name, names)}")
    return [column for column in columns if column.name not in exclude]


def choose_groups(
    source: str, group: str | Sequence[str], known: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return the values of the `attributes` that ``group`` names. Raises: InvalidInput also for an unknown one."""
    chosen = attributes(source, group)
    for name in chosen:
        if name not in known:
            raise InvalidInput(f"data source {source!r} has no groups by {name!r}; {nearest(name, known)}")
    return {name: known[name] for name in chosen}


def attributes(source: str, group: str | Sequence[str]) -> tuple[str, ...]:
    """Return the attributes that ``group`` names. Raises: InvalidInput unless it is one, or several different ones."""
    named = (group,) if isinstance(group, str) else tuple(group)
    if not named or repeated(named) is not None:
        raise InvalidInput(
            f"data source {source!r}: group is {group!r}, but must be one attribute or several different ones"
        )
    return named


def intersected(values: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names of the intersections of attributes: one value of each, the last attribute changing fastest.

    Raises: InvalidInput where several attributes have more than 100,000.

    >>> intersected({"sex": ("Female", "Male"), "race": ("Black", "White")})
    ('Female × Black', 'Female × White', 'Male × Black', 'Male × White')
    """
    if math.prod(map(len, values.values())) > max(_MOST_GROUPS, *map(len, values.values())):
        raise InvalidInput(
            f"{' and '.join(map(repr, values))} make more than {_MOST_GROUPS:,} groups together; name fewer by "
            "`group`, or sort their values into fewer"
        )
    return tuple(" × ".join(chosen) for chosen in itertools.product(*values.values()))


_MOST_GROUPS: Final = 100_000


def intersected_indices(
    table: pa.Table, values: Mapping[str, tuple[str, ...]], what: str = ""
) -> npt.NDArray[np.int64]:
    """Return [n]: the group of each row, as an index into `intersected`; ``table`` has a column for each attribute.

    what: prefix of the attribute's name in errors.
    """
    found = np.zeros(table.num_rows, dtype=np.int64)
    for name, names in values.items():
        found = found * len(names) + indices(table[name], names, f"{what}{name!r}" if what else name)
    return found


def lacks(values: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    """Return where a column lacks a value: null, NaN, or an infinite number, which no range holds."""
    known = compute.is_finite(values) if pa.types.is_floating(values.type) else values.is_valid()
    return ~np.asarray(known.fill_null(False).to_numpy(), dtype=bool)


def holds_bytes(kind: pa.DataType) -> bool:
    """Return whether values of the type are bytes, or have them in a field ``bytes``, as the package datasets stores
    pictures.
    """
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def complete_rows(table: pa.Table) -> npt.NDArray[np.int64]:
    """Return the indices of the rows that lack no value."""
    complete = np.ones(table.num_rows, dtype=bool)
    for column in table.columns:
        complete &= ~lacks(column)
    return np.flatnonzero(complete)
