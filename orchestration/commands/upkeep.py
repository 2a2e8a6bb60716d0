"""`dpsweep verify`, `dpsweep prune` and `dpsweep delete`: the stored files of a sweep."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from accounting.errors import DataCorruption, InvalidInput
from orchestration.commands import panels
from orchestration.comparison.plain_text import for_terminal
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


def delete(
    folder: Folder,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
) -> None:
    """Delete a sweep that nobody runs: its trials, models, reports and local MLflow store; asks first.

    What it has released stays counted: attempts/ is kept, and a sweep that is run in this folder again adds to it.
    Other files in the folder, runs on an MLflow server and copies elsewhere are left alone.
    """
    from orchestration.comparison.stored import stored_record
    from orchestration.execution.removal import delete_sweep, remains

    files = SweepFiles(absolute(folder))
    record = stored_record(files)
    what = f"the sweep {record.sweep.name} in {files.root}: {len(record.points)} trials"
    if not yes and not _confirmed(for_terminal(f"Delete {what}, with their models, reports and private files?")):
        typer.echo("nothing was deleted")
        raise typer.Exit(1)
    counted = delete_sweep(files)
    typer.echo(for_terminal(f"deleted {what}"))
    if counted:
        typer.echo(
            f"what {len(counted)} of them released cannot be taken back: it stays recorded in {files.root}/attempts, "
            "and counts if they are trained again there. Models and reports that were shared, and runs on an MLflow "
            "server, are not deleted"
        )
    if left := remains(files):
        typer.echo(for_terminal(f"left, because not of the sweep: {', '.join(left)}"))


def _confirmed(question: str) -> bool:
    """Raises: InvalidInput where nobody can answer."""
    try:
        return typer.confirm(question)
    except typer.Abort as error:
        raise InvalidInput("no answer, so nothing was deleted; give --yes to delete without being asked") from error


def register(app: typer.Typer) -> None:
    """Add the commands ``verify``, ``prune`` and ``delete`` to ``app``."""
    app.command(**panels.listed(panels.RESULTS, "verify runs/quickstart"))(verify)
    app.command(**panels.listed(panels.RESULTS, "prune runs/quickstart --norms --older-than 30"))(prune)
    app.command(**panels.listed(panels.RESULTS, "delete runs/quickstart"))(delete)
