"""The columns of a table that say whose row it is: one owner, or several in one column or in several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from dpsweep.accounting.errors import InvalidInput, PrivateDetail
from dpsweep.workers.data.base import repeated
from dpsweep.workers.data.owners import NOBODY, Ids
from dpsweep.workers.data.tabular import as_text, holds_lists, indices

UserColumns = str | Sequence[str] | None
"""The column that says whose row it is, or several, whose rows may have as many owners."""
_MOST_OWNERS: Final = 64
"""Most owners of a row."""


@dataclass(frozen=True)
class OwnerColumns:
    """The columns ``names`` of owners. separator: between the owners in a text of the only column."""

    names: tuple[str, ...]
    separator: str | None

    @classmethod
    def of(cls, user: UserColumns, separator: str | None) -> OwnerColumns:
        """Raises: InvalidInput for repeated names, and for a separator without a single column."""
        found = () if user is None else (user,) if isinstance(user, str) else tuple(user)
        if user is not None and (not found or repeated(found) is not None):
            raise InvalidInput(f"user is {user!r}, but must be one column or several different ones")
        if separator is not None and (len(found) != 1 or not separator):
            raise InvalidInput(
                f"user_separator is {separator!r}, but must be the text between owners in one column `user`"
            )
        return cls(found, separator)

    @property
    def column(self) -> str | None:
        """Return the name of the only column of owners after `joined`."""
        return self.names[0] if self.names else None

    def joined(self, rows: pa.Table) -> pa.Table:
        """Return the table with one column in place of all columns of owners: as it is, or lists of texts.

        Null stands for a row without an owner. All columns must be there.
        """
        listed = [holds_lists(rows[name].type) for name in self.names]
        if len(self.names) < 2 and self.separator is None and not any(listed):
            return rows
        columns = [
            _of_lists(rows[name], name) if is_list else self._of_texts(rows[name], name)
            for name, is_list in zip(self.names, listed, strict=True)
        ]
        owners = [_different(chain.from_iterable(row)) for row in zip(*columns, strict=True)]
        found = pa.chunked_array([pa.array(owners, pa.list_(pa.string()))])
        place = rows.column_names.index(self.names[0])
        return rows.set_column(place, self.names[0], found).drop_columns(list(self.names[1:]))

    def _of_texts(self, values: pa.ChunkedArray, name: str) -> Iterator[list[str]]:
        texts = as_text(values, f"column {name!r}").to_pylist()
        if self.separator is None:
            return ([] if text is None else [text] for text in texts)
        return ([] if text is None else text.split(self.separator) for text in texts)


def _of_lists(values: pa.ChunkedArray, name: str) -> Iterator[list[str]]:
    for chunk in (each.cast(pa.list_(each.type.value_type)) for each in values.chunks):
        texts = as_text(chunk.flatten(), f"column {name!r}").to_pylist()
        ends = np.cumsum(compute.fill_null(compute.list_value_length(chunk), 0).to_numpy(zero_copy_only=False))
        yield from ([text for text in texts[start:end] if text] for start, end in zip([0, *ends], ends, strict=False))


def _different(owners: Iterable[str]) -> list[str] | None:
    """Return each owner once; None if there is none. Raises: InvalidInput for more than `_MOST_OWNERS`."""
    found = list(dict.fromkeys(filter(None, map(str.strip, owners))))
    if len(found) > _MOST_OWNERS:
        raise InvalidInput(
            f"a row has more than {_MOST_OWNERS} owners; leave such rows out of the table"
        ) from PrivateDetail(f"it has {len(found)}")
    return found or None


def people_in(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the owners in a column of `OwnerColumns.joined`, as often as they occur."""
    return compute.list_flatten(column) if pa.types.is_list(column.type) else column


def owners_in(column: pa.ChunkedArray, people: tuple[str, ...]) -> Ids:
    """Return the owners of each row as indices into ``people``: [n], or [n, k] for a column of lists."""
    found = indices(people_in(column), people, "user column")
    if not pa.types.is_list(column.type):
        return found
    counts = compute.list_value_length(column).to_numpy().astype(np.int64)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    owners = np.full((len(counts), int(counts.max(initial=1))), NOBODY)
    owners[np.repeat(np.arange(len(counts)), counts), np.arange(len(found)) - first] = found
    return owners
