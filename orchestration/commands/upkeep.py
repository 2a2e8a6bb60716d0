"""`dpsweep verify` and `dpsweep prune`: the stored files of a sweep."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from accounting.errors import DataCorruption, InvalidInput
from orchestration.records.layout import SweepFiles, absolute

Folder = Annotated[str, typer.Argument(help="Folder or URI that `dpsweep run` wrote.", metavar="DIR")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]


def verify(folder: Folder, as_json: AsJson = False) -> None:
    """Check every stored file of the trained trials against its sha256, length and counts, and every ε by its trace."""
    from orchestration.comparison.stored import stored_record
    from orchestration.execution.upkeep import damaged_files, trained

    files = SweepFiles(absolute(folder))
    record = stored_record(files)
    damaged, count = damaged_files(files, record), len(trained(record))
    if as_json:
        typer.echo(json.dumps({"trials": count, "damaged": damaged}))
    if damaged:
        raise DataCorruption("\n".join(damaged))
    if not as_json:
        typer.echo(f"{count} trained trials: every file is as it was when its trial ended")


def prune(
    folder: Folder,
    norms: Annotated[bool, typer.Option("--norms", help="Delete the norms of accounted trials.")] = False,
    older_than: Annotated[
        float, typer.Option(min=0.0, help="Only those of trials that ended at least so many days ago.", metavar="DAYS")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Delete what accounted trials no longer need: the norms of single examples, by far their largest files."""
    from orchestration.execution.upkeep import prune_norms

    if not norms:
        raise InvalidInput("nothing to delete was named; give --norms")
    pruned = prune_norms(SweepFiles(absolute(folder)), older_than * 86_400.0)
    if as_json:
        typer.echo(json.dumps({"pruned": pruned}))
        return
    for key in pruned:
        typer.echo(f"deleted the norms of {key}")
    typer.echo(
        f"norms of {len(pruned)} trials deleted; their stored epsilons, reports and owner reports stay. These trials "
        "can no longer be accounted with another delta or method, nor can `dpsweep epsilon --trial` read their norms"
        if pruned
        else "no accounted trial has norms that old; nothing was deleted"
    )


def register(app: typer.Typer) -> None:
    """Add the commands ``verify`` and ``prune`` to ``app``."""
    app.command()(verify)
    app.command()(prune)
