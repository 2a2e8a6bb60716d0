"""The terminal, as rich sees it."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.measure import Measurement


def stdout() -> Console:
    """The standard output as a rich console."""
    return Console()


def show(renderable: RenderableType) -> None:
    """Print tables and text so that words, such as the keys of trials, are never broken.

    On a terminal, text wraps between words, and a table that is wider in spite of that goes beyond the edge. Elsewhere
    each row and each text is one line.
    """
    console = stdout()
    needed = Measurement.get(console, console.options.update(width=_UNBOUNDED), renderable)
    console.width = max(console.width, needed.minimum) if console.is_terminal else max(1, needed.maximum)
    console.print(renderable)


_UNBOUNDED = 100_000
"""A width, in characters, that no output reaches."""
