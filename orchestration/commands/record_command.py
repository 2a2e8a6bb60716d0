"""`dpsweep record`: record a stored sweep in MLflow."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict

import typer

from dpsweep.orchestration.commands import options
from dpsweep.orchestration.commands.options import AsJson, Folder, TrackingUri
from dpsweep.orchestration.commands.running import NOT_RECORDED, print_json
from dpsweep.orchestration.comparison.formats import for_terminal
from dpsweep.orchestration.records.status import NOTHING_RECORDED, Recording

_LINE_INTERVAL = 5.0
"""Least seconds between two lines on the progress."""


def record(folder: Folder, tracking_uri: TrackingUri = None, as_json: AsJson = False) -> None:
    """Record a stored sweep in MLflow: what its driver could not record, or all of one that ran without MLflow.

    Also of a driver that was killed. Runs that MLflow has already are kept, and nothing is recorded twice. By default
    in the store that the driver recorded in. Exit code 3 if MLflow stays silent before everything is recorded.
    """
    from dpsweep.orchestration.pipeline import record_again

    def warn(sentence: str) -> None:
        print(for_terminal(f"warning: {sentence}"), file=sys.stderr)

    shown = _Printer()
    try:
        found = record_again(folder, tracking_uri, shown, warn)
    except KeyboardInterrupt:
        print(for_terminal(f"interrupted; {shown.last.missing() or 'the same command goes on'}"), file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print_json(asdict(found))
    if missing := found.missing():
        print(for_terminal(f"error: {missing}"), file=sys.stderr)
        raise typer.Exit(NOT_RECORDED)
    if not as_json:
        typer.echo(for_terminal(f"{found.count} trials are recorded in MLflow at {found.store}"))
        typer.echo(for_terminal(found.page))


class _Printer:
    """Prints how far the recording has come, at most once every `_LINE_INTERVAL` seconds."""

    def __init__(self) -> None:
        self.last = NOTHING_RECORDED
        self._printed = time.monotonic()

    def __call__(self, recording: Recording) -> None:
        self.last = recording
        if recording.goes_on and time.monotonic() - self._printed >= _LINE_INTERVAL:
            self._printed = time.monotonic()
            print(recording.line(), file=sys.stderr, flush=True)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(**options.listed(options.RESULTS, "record runs/quickstart --tracking-uri http://HOST:5000"))(record)
