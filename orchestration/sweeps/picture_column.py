"""The column of pictures of a draft."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dpsweep.orchestration.sweeps.draft_scale import Scale, scale_of_pictures
from dpsweep.orchestration.sweeps.read_column import rows_lacking
from dpsweep.orchestration.sweeps.text_column import quoted
from dpsweep.workers.data import ColumnProfile, TableProfile, TableTask


@dataclass(frozen=True)
class PictureColumn:
    """A column that names files of pictures, which are read from the folder of the table, or that holds pictures."""

    name: str

    @property
    def kind(self) -> str:
        return "image"

    @property
    def source(self) -> str:
        return "image_table"

    @property
    def options(self) -> list[tuple[str, str | None]]:
        """Return the option of `dpsweep init` that gives it."""
        return [("image", self.name)]

    def accepts(self, column: ColumnProfile) -> bool:
        """Return whether it is this column, and holds the bytes of pictures."""
        return column.name == self.name and column.holds_bytes

    def section(self, table: TableProfile) -> Iterator[str]:
        """Yield the lines of a draft that name it. table: profile of the table that has it."""
        column = table.column(self.name, self.kind)
        lacking = f"; {rows_lacking(column)}" if column.missing else ""
        if column.holds_bytes:
            yield f"  image: {quoted(self.name)}    # the pictures themselves{lacking}"
        else:
            yield f"  image: {quoted(self.name)}    # names of files{lacking}"
            yield "  # folder: /data/pictures    # where these names start, if not in the folder of the table"
        yield f"  size: {SIDE}    # pictures are resized to {SIDE} x {SIDE}; more pixels take longer"

    def model(self, head: str) -> Iterator[str]:
        """Yield the lines of the model. head: a remark on a linear model for the task."""
        yield f"model: logistic    # {head}; or a function of your own"
        yield "# Of 10,000 pictures on a network may learn more: cnn_papernot, with bound 0.1 and learning_rate 0.5."
        yield "# Of photographs, so may one trained on public pictures: frozen_features and vision, in docs/data.md."

    def scale(self, rows: int, task: TableTask, outputs: int, deviation: float | None) -> Scale:
        """Return the learning rate and bound; arguments as of `scale_of`."""
        return scale_of_pictures(SIDE, rows, task, deviation)


SIDE: Final = 32
"""Pixels of a side of drafted pictures."""
