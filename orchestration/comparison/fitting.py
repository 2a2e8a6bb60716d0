"""Tables and lines for terminals that are narrower than they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dpsweep.orchestration.comparison.formats import MISSING

UNBOUNDED = 100_000
"""A width, in characters, that no output reaches."""


def print_line(console: Console, text: Text) -> None:
    """Print one line; on a terminal it is broken between words, unless that would break a long path."""
    is_long = any(len(word) > console.width for word in text.plain.split())
    console.print(text, soft_wrap=is_long or not console.is_terminal)


@dataclass(frozen=True)
class Fitting:
    """A table that, where it is wider than the terminal, is printed as its first column with the others below."""

    table: Table

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widest = max((cell_len(_plain(cell)) for cell in self.table.columns[0].cells), default=0)
        return Measurement(widest, Measurement.get(console, options, self.table).maximum)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        needed = Measurement.get(console, options.update(width=UNBOUNDED), self.table)
        if needed.minimum <= options.max_width:
            yield self.table
            return
        first, *others = self.table.columns
        for place, (name, row) in enumerate(zip(first.cells, self.table.rows, strict=True)):
            cells = ((_plain(column.header), _plain(list(column.cells)[place])) for column in others)
            words = "; ".join(f"{heading} {cell}".strip() for heading, cell in cells if cell not in ("", MISSING))
            yield Text(_plain(name), style=row.style or "bold", no_wrap=True, overflow="ignore")
            yield Padding(Text(words, style=row.style or "", overflow="fold"), (0, 0, 0, 2))


def _plain(cell: RenderableType) -> str:
    """Return the text of a cell; "" for a picture such as a progress bar."""
    return cell.plain if isinstance(cell, Text) else cell if isinstance(cell, str) else ""
