"""`dpsweep init`: the first sweep file for a table of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from accounting.errors import InvalidInput
from orchestration.commands import panels
from orchestration.commands.output_files import write_file
from orchestration.comparison.plain_text import for_terminal


def init(
    data: Annotated[Path, typer.Argument(help="A table: .csv (UTF-8, with a header) or .parquet.", metavar="DATA")],
    label: Annotated[str, typer.Option(help="The column that models predict.")],
    group: Annotated[
        str | None, typer.Option(help="The column whose groups are compared (default: the label).")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="The file to write (default: the table's name, .yaml).")] = None,
) -> None:
    """Draft a commented sweep for a table: types, ranges and categories, to be confirmed as public.

    They are read off the rows, so the file is private data (mode 0600) until you have confirmed them.
    """
    from orchestration.sweeps.draft import draft_sweep

    target = Path(f"{data.stem}.yaml") if to is None else to
    if target.exists():
        raise InvalidInput(f"{target} exists and may hold your changes; name another file with --to")
    write_file("--to", target, draft_sweep(data, label, group).encode(), private=True)
    typer.echo(for_terminal(f"{target}: confirm what was read off the data, then: dpsweep plan {target}"))


def register(app: typer.Typer) -> None:
    """Add the command ``init`` to ``app``."""
    app.command(**panels.listed(panels.RUN, "init people.csv --label approved --group sex"))(init)
