"""`dpsweep export`: the results of stored sweeps, for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from accounting.registry import lookup
from orchestration.commands.output_files import write_file
from orchestration.records.layout import SweepFiles, absolute

Folder = Annotated[str, typer.Argument(help="Folder or URI that `dpsweep run` wrote.", metavar="DIR")]


def export(
    folder: Folder,
    to: Annotated[Path, typer.Option(help="The file to write: .csv or .parquet.", metavar="FILE")],
) -> None:
    """Write one row per trial: its parameters that vary, its state, and every metric that the release mode shows.

    Withheld numbers are empty. The columns are those of `results()` in Python. With release: raw the file is readable
    by you only.
    """
    from orchestration.comparison.stored import stored_record
    from orchestration.comparison.table import FORMATS, trial_table
    from orchestration.records.release_modes import release_mode

    write = lookup(FORMATS, to.suffix, "format of --to")
    record = stored_record(SweepFiles(absolute(folder)))
    table = trial_table(record)
    write_file("--to", to, write(table), release_mode(record.disclosure).is_sensitive)
    typer.echo(f"{to}: {len(table)} trials, {len(table[0])} columns")


def register(app: typer.Typer) -> None:
    """Add the command ``export`` to ``app``."""
    app.command()(export)
