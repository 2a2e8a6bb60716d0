"""Labels from columns of a table: a class, real numbers, or several binary labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute

from dpsweep.accounting.errors import InvalidInput, PrivateDetail
from dpsweep.workers.data.tabular import Numeric, as_numbers, indices, is_numeric, kind_of

TableTask = Literal["classification", "regression", "multi_label"]
"""Tasks whose labels are columns of a table; names in `dpsweep.workers.tasks.TASKS`."""
_BINARY_SPELLINGS: Final = ("0", "1", "false", "true")
_BINARY_NUMBER: Final = r"^\+?([01])(\.0*)?(e[+-]?0+)?$"
"""0 or 1 as numbers are written in lower case, such as 1.000e+00."""


class Labels(Protocol):
    """Converts columns of a table to labels. names: of the outputs of a model."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def encode(self, table: pa.Table) -> npt.NDArray[np.generic]:
        """Return labels [n, ...] of the task, of rows without nulls."""
        ...


@dataclass(frozen=True)
class Classes:
    """Labels of classification, from one column of class names."""

    column: str
    names: tuple[str, ...]

    def encode(self, table: pa.Table) -> npt.NDArray[np.int64]:
        return indices(table[self.column], self.names, f"label column {self.column!r}")


@dataclass(frozen=True)
class Targets:
    """Labels of regression, from columns of numbers. A column in ``ranges`` is scaled to [0, 1] and clamped."""

    names: tuple[str, ...]
    ranges: Mapping[str, tuple[float, float]]

    def encode(self, table: pa.Table) -> npt.NDArray[np.float32]:
        columns = [self._column(table[name], name) for name in self.names]
        return np.stack(columns, 1).astype(np.float32)

    def _column(self, values: pa.ChunkedArray, name: str) -> npt.NDArray[np.generic]:
        if not is_numeric(values):
            raise InvalidInput(
                f"label column {name!r} holds {kind_of(values)}, but regression takes numbers; correct it, or set "
                "task: classification"
            )
        return (
            Numeric(name, *self.ranges[name]).encode(values)[:, 0] if name in self.ranges else as_numbers(values, name)
        )


@dataclass(frozen=True)
class Flags:
    """Labels of multi-label classification, from one column of 0 and 1, or false and true, for each label."""

    names: tuple[str, ...]

    def encode(self, table: pa.Table) -> npt.NDArray[np.int64]:
        return np.stack([self._column(table[name], name) for name in self.names], 1)

    def _column(self, values: pa.ChunkedArray, name: str) -> npt.NDArray[np.int64]:
        texts = pa.array(as_numbers(values, name)).cast(pa.string()) if is_numeric(values) else values
        spelt = compute.replace_substring_regex(compute.utf8_lower(texts.cast(pa.string())), _BINARY_NUMBER, r"\1")
        known = compute.index_in(spelt, value_set=pa.array(_BINARY_SPELLINGS))
        found = np.asarray(known.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False))
        if (found < 0).any():
            raise InvalidInput(
                f"label column {name!r} has a value besides 0 and 1, or false and true, which multi_label takes; "
                "correct it, or leave it out of `label`"
            ) from PrivateDetail(str(values[int(np.flatnonzero(found < 0)[0])]))
        return found % 2


@dataclass(frozen=True)
class NoLabels:
    """Zeros in place of labels that do not come from columns, such as the tokens of a language model."""

    names: tuple[str, ...] = ()

    def encode(self, table: pa.Table) -> npt.NDArray[np.int64]:
        return np.zeros(table.num_rows, dtype=np.int64)


def label_columns(label: str | Sequence[str], task: TableTask) -> tuple[str, ...]:
    """Return the columns of ``label``. Raises: InvalidInput for none, repeated ones, and several in classification."""
    named = (label,) if isinstance(label, str) else tuple(label)
    if not named or len(set(named)) < len(named):
        raise InvalidInput(f"label is {label!r}, but must be one column or several different ones")
    if task == "classification" and len(named) > 1:
        raise InvalidInput(
            f"label names {len(named)} columns, but classification has one; set task: multi_label for columns of 0 and "
            "1, or task: regression for numbers"
        )
    return named
