"""The protocol of columns of a draft that models read in place of features, and what drafts say of any column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from dpsweep.orchestration.sweeps.draft_scale import Scale
from dpsweep.workers.data import ColumnProfile, TableProfile, TableTask


def rows_lacking(column: ColumnProfile) -> str:
    """Return how many rows are left out because this column lacks a value."""
    return f"missing in {column.missing:.1%} of the rows, which are left out"


class ReadColumn(Protocol):
    """A column of texts or pictures."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str:
        """Name of the column's values in errors, and of the option of `dpsweep init` that gives it."""
        ...

    @property
    def source(self) -> str:
        """Data source that reads it."""
        ...

    @property
    def options(self) -> Sequence[tuple[str, str | None]]:
        """Return the options of `dpsweep init` that give it, by their names."""
        ...

    def accepts(self, column: ColumnProfile) -> bool:
        """Return whether it is this column, and its type is read, which tables do not read."""
        ...

    def section(self, table: TableProfile) -> Iterator[str]:
        """Yield the lines of the section `data` that name it. table: profile of the table that has it."""
        ...

    def model(self, head: str) -> Iterator[str]:
        """Yield the lines of its preprocessing and model. head: a remark on a linear model for the task."""
        ...

    def scale(self, rows: int, task: TableTask, outputs: int, deviation: float | None) -> Scale:
        """Return the learning rate and bound of that model; arguments as of `scale_of`."""
        ...
