"""The command ``dpsweep``.

Exit codes: 0 for success, 1 if a trial failed or stored files are damaged or cannot be written. Code 2 means invalid
input (one line per mistake, nothing started), 3 that all results are on disk but not all in MLflow, 130 an
interruption.
"""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from dpsweep.accounting.errors import DpsweepError, InvalidInput, Unreachable, UnsupportedMechanism
from dpsweep.accounting.jobs.working_directory import require_harmless_working_directory
from dpsweep.orchestration.commands import (
    audit,
    calibrate,
    cluster_jobs,
    dashboard,
    epsilon,
    init,
    options,
    owner_report,
    plan_command,
    results_commands,
    status_command,
    upkeep_commands,
)
from dpsweep.orchestration.commands.options import (
    AllowCode,
    AsJson,
    Folder,
    MaxGpuHours,
    MaxHours,
    MaxTrials,
    Retry,
    StopAfterFailures,
    SweepFile,
    TrackingUri,
)
from dpsweep.orchestration.commands.running import ended_by_signals, run_to_the_end, show_outcome
from dpsweep.orchestration.comparison.formats import for_terminal, name_for_terminal
from dpsweep.orchestration.execution.environment import EMBEDDED, prepare_environment
from dpsweep.orchestration.store.layout import SweepFiles, absolute

app = typer.Typer(
    name="dpsweep",
    help="Sweeps of differentially private training: how private, for whom, at what cost in fairness.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
init.register(app)
epsilon.register(app)
calibrate.register(app)
owner_report.register(app)
audit.register(app)
cluster_jobs.register(app)
status_command.register(app)
dashboard.register(app)
upkeep_commands.register(app)
results_commands.register(app)
plan_command.register(app)


@app.command(**options.listed(options.RUN, "run sweeps/quickstart.yaml --output runs/quickstart"))
def run(
    sweep: SweepFile,
    output: Annotated[str | None, typer.Option(help="Folder or URI of the sweep (default: runs/NAME).")] = None,
    address: Annotated[
        str,
        typer.Option(
            help="Ray: 'local' starts an embedded cluster; 'auto' or HOST:PORT joins a running one; 'in-process' does "
            "without Ray, one trial at a time, for debugging."
        ),
    ] = EMBEDDED,
    tracking_uri: TrackingUri = None,
    allow_code: AllowCode = None,
    retry: Retry = None,
    name: Annotated[str | None, typer.Option(help="Name in MLflow (default: the sweep's name).")] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="DIR",
            help="Another sweep: its finished trials that are the same are taken, not trained. May be repeated.",
        ),
    ] = None,
    max_hours: MaxHours = None,
    max_gpu_hours: MaxGpuHours = None,
    max_trials: MaxTrials = None,
    stop_after_failures: StopAfterFailures = None,
    until: Annotated[
        Literal["told-apart"] | None,
        typer.Option(help="Add seeds until every method is told from the best; each costs privacy, which is counted."),
    ] = None,
    max_seeds: Annotated[int, typer.Option(min=2, help="With --until: most seeds of a setting.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Train, account and compare every trial of a sweep; a folder that holds it, or an earlier version, is continued.

    A sweep file is code: it runs the functions that it names in the modules of its folder.
    """
    from dpsweep.orchestration.execution.shared_connection import ray_ahead
    from dpsweep.orchestration.sweeps.schema import parse_sweep
    from dpsweep.orchestration.sweeps.text import read_text
    from dpsweep.orchestration.sweeps.user_code import permitted

    text = read_text(sweep)
    spec = parse_sweep(text, str(sweep))
    code = permitted(spec, sweep.resolve().parent, allow_code or ())
    prepare_environment(address)
    with ray_ahead(spec, output, address, code) as connect:
        from dpsweep.orchestration.pipeline import RunRequest
        from dpsweep.orchestration.store.limits import Limits

        limits = Limits(max_hours, max_trials, stop_after_failures, max_gpu_hours)
        chosen = (limits, tuple(retry or ()), tuple(source or ()))
        most = None if until is None else max_seeds
        asked = RunRequest(
            spec, text, output, address, tracking_uri, code, *chosen, name=name, most_seeds=most, connect=connect
        )
        run_to_the_end(asked, as_json)


@app.command(**options.listed(options.RESULTS, "report runs/quickstart --watch"))
def report(
    folder: Folder,
    watch: Annotated[
        bool, typer.Option("--watch", help="Write it again as trials end, until the sweep has; the page renews itself.")
    ] = False,
    summary: Annotated[
        Path | None,
        typer.Option("--summary", help="Print its first screen to this PDF, by Chromium.", metavar="FILE"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify the stored files of a sweep and write its report again; with --watch, show the report growing first."""
    from dpsweep.accounting.records.files import read_bytes
    from dpsweep.orchestration.commands.options import write_file
    from dpsweep.orchestration.pipeline import render_again
    from dpsweep.orchestration.report.writing import growing_report, summary_pdf
    from dpsweep.orchestration.store.release_modes import release_mode

    for trials in growing_report(SweepFiles(absolute(folder))) if watch else ():
        print(f"{trials} trials in the report", file=sys.stderr, flush=True)
    outcome = render_again(folder)
    if summary is not None:
        printed = summary_pdf(read_bytes(outcome.files.report).decode())
        write_file("--summary", summary, printed, release_mode(outcome.record.disclosure).is_sensitive)
    show_outcome(outcome, as_json)


@app.command(**options.listed(options.PRIVACY, "forget runs/quickstart"))
def forget(
    folder: Folder,
) -> None:
    """Delete the noise keys of the trials that have not finished; to resume them costs privacy again.

    A trial keeps its key, in its private checkpoint, until it has finished: with it a resumed trial repeats its noise.
    """
    from dpsweep.orchestration.execution.upkeep import forget_keys

    forgotten = forget_keys(folder)
    for key in forgotten:
        print(f"forgotten: {name_for_terminal(key)}")
    print(f"{len(forgotten)} trials kept a key; what they have shown stays counted if they are resumed")


def main() -> None:
    """Run the command; print errors that a user can act on, one line each, and set the exit code."""
    try:
        require_harmless_working_directory()
        with ended_by_signals():
            app()
    except (InvalidInput, Unreachable, UnsupportedMechanism) as error:
        _print_error(error)
        sys.exit(2)
    except DpsweepError as error:
        _print_error(error)
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print("error: the disk is full; free some space, and the same command continues", file=sys.stderr)
        sys.exit(1)


def _print_error(error: DpsweepError) -> None:
    for line in str(error).splitlines():
        print(for_terminal(f"error: {line}"), file=sys.stderr)
