"""Run a sweep, print its outcome and exit: shared by `dpsweep run` and the driver of a submitted sweep."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Final, NoReturn

import typer
from rich.console import Console

from dpsweep.orchestration.commands.ending import INTERRUPTED
from dpsweep.orchestration.comparison.plain_text import for_terminal

if TYPE_CHECKING:
    from dpsweep.orchestration.pipeline import Outcome, RunRequest


NOT_RECORDED: Final = 3
"""Exit code if all results are on disk, and not all of them in MLflow."""


def run_to_the_end(request: RunRequest, as_json: bool) -> NoReturn:
    """Run the sweep and exit: with 0, with 1 if a trial failed, 3 if MLflow lacks records, 130 when interrupted."""
    from dpsweep.orchestration.pipeline import ConsoleDisplay, run_sweep

    display = ConsoleDisplay(Console(stderr=True))
    try:
        outcome = run_sweep(request, display)
    except KeyboardInterrupt:
        missing = display.missing_in_mlflow()
        print(f"interrupted; {missing or 'the same command continues where it stopped'}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    show_outcome(outcome, as_json)
    if outcome.recording and (missing := outcome.recording.missing()):
        print(for_terminal(f"error: {missing}"), file=sys.stderr)
        raise typer.Exit(NOT_RECORDED)
    raise typer.Exit(1 if outcome.record.failed else 0)


def show_outcome(outcome: Outcome, as_json: bool) -> None:
    """Print the outcome to stdout, as tables or as one JSON object."""
    from dpsweep.orchestration.commands.printed_tables import outcome_object, print_outcome

    if as_json:
        print_json(outcome_object(outcome))
    else:
        print_outcome(outcome)


def print_json(value: object) -> None:
    """Print ``value`` as indented JSON. Raises: ValueError for NaN and infinities."""
    print(json.dumps(value, indent=2, allow_nan=False))
