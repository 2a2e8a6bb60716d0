"""`dpsweep list`: the sweeps below a folder, or the submitted ones of a cluster."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from dpsweep.accounting.errors import DataCorruption, InvalidInput, StorageError
from dpsweep.orchestration.commands import options
from dpsweep.orchestration.commands.cluster_jobs import jobs_at
from dpsweep.orchestration.commands.options import AsJson, show
from dpsweep.orchestration.commands.status_command import close_in_mlflow
from dpsweep.orchestration.comparison.formats import for_terminal, seconds
from dpsweep.orchestration.records.layout import SweepFiles, absolute
from dpsweep.orchestration.records.status_snapshot import read_snapshot


def list_sweeps(
    folder: Annotated[
        str | None,
        typer.Argument(
            help="Folder or URI below which sweeps are looked for; without it, --address.", metavar="FOLDER"
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            envvar="RAY_API_SERVER_ADDRESS", metavar="URL", help="The cluster's dashboard, such as http://HEAD:8265."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the sweeps below a folder; without a folder, the submitted sweeps of a cluster, the newest last."""
    if folder is not None:
        _list_stored(absolute(folder), as_json)
    elif address is not None:
        _list_jobs(address, as_json)
    else:
        raise InvalidInput("give a FOLDER below which sweeps lie, or the --address of a cluster they were submitted to")


def _list_stored(folder: str, as_json: bool) -> None:
    from dpsweep.orchestration.comparison.inventory import sweeps_below

    found = list(sweeps_below(folder))
    sweeps, problems = [each for each in found if not each.problem], [each.problem for each in found if each.problem]
    if not found:
        raise InvalidInput(
            f"{folder} holds no sweep, and no folder below it does; name one that `dpsweep run` wrote to"
        )
    for each in sweeps:
        close_in_mlflow(SweepFiles(each.folder), each.snapshot)
    if as_json:
        typer.echo(json.dumps({"sweeps": [each.as_dict() for each in found]}, allow_nan=False))
    elif sweeps:
        rows = (
            (each.name, each.state, _counted(each.trials), _minute(each.changed or 0.0), each.folder) for each in sweeps
        )
        _show(("sweep", "state", "trials", "last change (UTC)", "folder"), rows)
    if problems:
        raise DataCorruption("\n".join(problems))


def _list_jobs(address: str, as_json: bool) -> None:
    jobs = jobs_at(address).all()
    if as_json:
        plain = [asdict(job) | {"progress": _progress(job.output)} for job in jobs]
        typer.echo(json.dumps({"jobs": plain}))
        return
    now = time.time()
    rows = (
        (
            job.id,
            job.owner,
            job.priority,
            job.state.lower(),
            seconds(max(0.0, now - job.submitted)),
            _shown(_progress(job.output)),
            job.output,
        )
        for job in jobs
    )
    _show(("id", "owner", "priority", "state", "age", "progress", "output"), rows)


def _progress(output: str) -> dict[str, int] | None:
    """Return the trials that are over, and all trials, by the status in the output; None where that cannot be read
    from here.
    """
    try:
        found = read_snapshot(SweepFiles(output).status)
    except (DataCorruption, StorageError, InvalidInput):
        return None
    if found is None:
        return None
    return {"done": sum(trial.state.has_ended for trial in found.trials), "trials": len(found.trials)}


def _shown(progress: dict[str, int] | None) -> str:
    return "?" if progress is None else f"{progress['done']} of {progress['trials']}"


def _show(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, header_style="dim", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(for_terminal(cell)) for cell in row))
    show(table)


def _counted(trials: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in trials.items())


def _minute(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(" ", "minutes")[:16]


def register(app: typer.Typer) -> None:
    """Add the command ``list`` to ``app``."""
    app.command("list", **options.listed(options.RESULTS, "list runs"))(list_sweeps)
