"""The command ``dpsweep``.

Exit codes: 0 when all is well, 1 when a trial failed or a store cannot be trusted, 2 for input that cannot be used
(one line for each mistake, nothing started), 130 when interrupted.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from accounting.errors import DpsweepError, InvalidInput, Unreachable, UnsupportedMechanism
from orchestration import cli_accounting
from orchestration.environment import EMBEDDED, prepare_environment

if TYPE_CHECKING:
    from orchestration.publication import Outcome
    from orchestration.sweep import SweepSpec

app = typer.Typer(
    name="dpsweep",
    help="Sweeps of differentially private training: how private, for whom, at what cost in fairness.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cli_accounting.register(app)

SweepFile = Annotated[Path, typer.Argument(help="The sweep file (YAML).", metavar="SWEEP")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]


@app.command()
def run(
    sweep: SweepFile,
    output: Annotated[str | None, typer.Option(help="Folder or URI of the sweep (default: runs/NAME).")] = None,
    address: Annotated[
        str, typer.Option(help="Ray: 'local' starts an embedded cluster; 'auto' or HOST:PORT joins a running one.")
    ] = EMBEDDED,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the sweep that the folder holds.")] = False,
    tracking_uri: Annotated[
        str | None,
        typer.Option(envvar="MLFLOW_TRACKING_URI", help="MLflow (default: a SQLite store in the sweep's folder)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train, account and compare every trial of a sweep."""
    from orchestration.sweep import parse_sweep
    from orchestration.sweep_text import read_text

    text = read_text(sweep)
    spec = parse_sweep(text, str(sweep))
    prepare_environment(address)
    _make_importable(sweep, spec)
    from orchestration.pipeline import RunRequest, run_sweep

    try:
        outcome = run_sweep(RunRequest(spec, text, output, address, resume, tracking_uri), Console(stderr=True))
    except KeyboardInterrupt:
        print("interrupted; the same command with --resume continues where it stopped", file=sys.stderr)
        raise typer.Exit(130) from None
    _print_outcome(outcome, as_json)
    raise typer.Exit(1 if outcome.record.failed else 0)


@app.command()
def plan(sweep: SweepFile, as_json: AsJson = False) -> None:
    """Show what a sweep would do: noise, steps, worst-case epsilon and bytes of each trial; trains nothing."""
    from orchestration.plan import plan_sweep
    from orchestration.sweep import parse_sweep
    from orchestration.sweep_text import read_text
    from orchestration.tables import plan_rows, plan_table, stdout

    spec = parse_sweep(read_text(sweep), str(sweep))
    _make_importable(sweep, spec)
    planned = plan_sweep(spec)
    if as_json:
        _print_json(plan_rows(planned))
    else:
        stdout().print(plan_table(planned))
    for warning in planned.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for reason in planned.reasons():
        print(f"refused: {reason}", file=sys.stderr)
    raise typer.Exit(2 if planned.refusals else 0)


@app.command()
def report(
    folder: Annotated[str, typer.Argument(help="Folder or URI that `dpsweep run` wrote.", metavar="DIR")],
    as_json: AsJson = False,
) -> None:
    """Write the report of a sweep again, from what is on disk."""
    from orchestration.pipeline import render_again

    _print_outcome(render_again(folder), as_json)


def main() -> None:
    """Entry point of the command: turns errors that a user can act on into one line each."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app()
    except (InvalidInput, Unreachable, UnsupportedMechanism) as error:
        _complain(error)
        sys.exit(2)
    except DpsweepError as error:
        _complain(error)
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print("error: the disk is full; free some space, and the same command with --resume continues", file=sys.stderr)
        sys.exit(1)


def _make_importable(sweep_file: Path, spec: SweepSpec) -> None:
    """Find the user's ``module:function`` in the working directory and beside the sweep file.

    Processes that this one starts, an embedded cluster's workers among them, find it through PYTHONPATH.
    """
    if spec.user_modules:
        found = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        added = [folder for folder in (str(Path.cwd()), str(sweep_file.resolve().parent)) if folder not in found]
        sys.path += added
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*found, *added]))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _complain(error: DpsweepError) -> None:
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr)


def _print_outcome(outcome: Outcome, as_json: bool) -> None:
    from orchestration.tables import outcome_object, print_outcome

    if as_json:
        _print_json(outcome_object(outcome))
    else:
        print_outcome(outcome)


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))
