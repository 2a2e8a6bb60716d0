"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Folder = Annotated[str, typer.Argument(help="Folder or URI that `dpsweep run` wrote.", metavar="DIR")]
AllowCode = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE",
        help="A module or file.py that the sweep may run besides those in its own folder; may be repeated.",
    ),
]
SweepFile = Annotated[Path, typer.Argument(help="The sweep file (YAML).", metavar="SWEEP", readable=False)]
"""Whether it can be read is found when it is, and said in one line."""
Retry = Annotated[
    list[str] | None,
    typer.Option(
        metavar="failed|all|KEY",
        help="Trials to train anew, from nothing, though they have failed or finished; what they have released "
        "stays counted. May be repeated.",
    ),
]
MaxHours = Annotated[
    float | None, typer.Option(help="Stop after this time; the same command continues.", metavar="HOURS")
]
MaxGpuHours = Annotated[
    float | None,
    typer.Option(help="Stop when trials have held GPUs for so long, all together.", metavar="HOURS"),
]
MaxTrials = Annotated[int | None, typer.Option(min=1, help="Train at most this many trials in this run.")]
StopAfterFailures = Annotated[int | None, typer.Option(min=1, help="Stop when this many trials have failed.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]
TrackingUri = Annotated[
    str | None,
    typer.Option(
        envvar="MLFLOW_TRACKING_URI", help="MLflow (default: a SQLite store in the sweep's folder), or 'none'."
    ),
]
