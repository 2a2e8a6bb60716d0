"""The terminal, as rich sees it."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table

from dpsweep.orchestration.comparison.formats import UNBOUNDED, Fitting


def stdout() -> Console:
    """Return the standard output as a rich console."""
    return Console()


def show(renderable: RenderableType) -> None:
    """Print tables and text so that words, such as the keys of trials, are never broken.

    On a terminal, text wraps between words, and a table that is too wide is stacked (`Fitting`). Elsewhere each row and
    each text is one line.
    """
    console = stdout()
    shown = Fitting(renderable) if console.is_terminal and isinstance(renderable, Table) else renderable
    needed = Measurement.get(console, console.options.update(width=UNBOUNDED), shown)
    console.width = max(console.width, needed.minimum) if console.is_terminal else max(1, needed.maximum)
    console.print(shown)
