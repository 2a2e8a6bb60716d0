"""The command ``dpsweep``.

Exit codes: 0 for success, 1 if a trial failed or stored files are damaged or cannot be written. Code 2 means invalid
input (one line per mistake, nothing started), 3 that all results are on disk but not all in MLflow, 130 an
interruption.
"""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from dpsweep.accounting.errors import DpsweepError, InvalidInput, Unreachable, UnsupportedMechanism, count_of
from dpsweep.accounting.jobs.working_directory import require_harmless_working_directory
from dpsweep.orchestration.commands import (
    audit,
    calibrate,
    cluster_jobs,
    dashboard,
    epsilon,
    init,
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
    MaxSeeds,
    MaxTrials,
    Retry,
    StopAfterFailures,
    SweepFile,
    TrackingUri,
    Until,
    most_seeds,
)
from dpsweep.orchestration.commands.running import ended_by_signals, run_to_the_end, show_outcome
from dpsweep.orchestration.commands.useless_options import CheckedCommand
from dpsweep.orchestration.comparison.formats import for_terminal, name_for_terminal
from dpsweep.orchestration.execution.environment import EMBEDDED, prepare_environment
from dpsweep.orchestration.store.layout import sweep_at

app = typer.Typer(
    name="dpsweep",
    help="Sweeps of differentially private training: how private, for whom, at what cost in fairness.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


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
    until: Until = None,
    max_seeds: MaxSeeds = None,
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

        request = RunRequest(
            spec,
            text,
            output,
            address,
            tracking_uri,
            code,
            limits=Limits(max_hours, max_trials, stop_after_failures, max_gpu_hours),
            retry=tuple(retry or ()),
            sources=tuple(source or ()),
            name=name,
            most_seeds=most_seeds(until, max_seeds),
            connect=connect,
        )
        run_to_the_end(request, as_json)


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

    for trials in growing_report(sweep_at(folder)) if watch else ():
        print(f"{count_of(trials, 'trial')} in the report", file=sys.stderr, flush=True)
    outcome = render_again(folder)
    if summary is not None:
        printed = summary_pdf(read_bytes(outcome.files.report).decode())
        write_file("--summary", summary, printed, release_mode(outcome.record.disclosure).is_sensitive)
    show_outcome(outcome, as_json)
    if summary is not None and not as_json:
        print(for_terminal(f"summary: {summary}"))


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
    print(f"{count_of(len(forgotten), 'trial')} kept a key; what is shown stays counted where a trial is resumed")


_RUN, _CLUSTER, _RESULTS, _PRIVACY = "Run", "Cluster", "Results", "Privacy"
_TRIAL = "flat-constant-epsilon8-seed0-d02bd6168b"
_COMMANDS: Final[Sequence[tuple[str, Callable[..., None], str]]] = (
    (_RUN, init.init, "init people.csv --label approved --group sex"),
    (_PRIVACY, epsilon.epsilon, "epsilon --noise-multiplier 1.0 --sample-rate 0.01 --steps 2000 --delta 1e-6"),
    (_PRIVACY, calibrate.calibrate, "calibrate --target-epsilon 3 --delta 1e-5 --sample-rate 0.01 --epochs 50"),
    (_PRIVACY, owner_report.owner, f"owner-report runs/quickstart/trials/{_TRIAL} --example-id 17"),
    (_PRIVACY, owner_report.decrypt, "decrypt runs/quickstart/private/report.html --to report.html"),
    (_PRIVACY, audit.audit, f"audit runs/quickstart --only {_TRIAL}"),
    (_CLUSTER, cluster_jobs.submit, "submit sweeps/mnist.yaml --address http://HEAD:8265 --output s3://BUCKET/mnist"),
    (_CLUSTER, cluster_jobs.logs, "logs mnist-1f0c5e2a9b --address http://HEAD:8265 --follow"),
    (_CLUSTER, cluster_jobs.stop, "stop mnist-1f0c5e2a9b --address http://HEAD:8265"),
    (_CLUSTER, status_command.status, "status runs/quickstart --watch"),
    (_RESULTS, status_command.list_sweeps, "list runs"),
    (_RESULTS, dashboard.dashboard, "dashboard runs"),
    (_RESULTS, upkeep_commands.verify, "verify runs/quickstart"),
    (_RESULTS, upkeep_commands.account, "account runs/quickstart --delta 1e-6 --individual pld"),
    (_RESULTS, upkeep_commands.prune, "prune runs/quickstart --norms --older-than 30"),
    (_RESULTS, upkeep_commands.delete, "delete runs/quickstart"),
    (_RESULTS, upkeep_commands.record, "record runs/quickstart --tracking-uri http://HOST:5000"),
    (_RESULTS, results_commands.best, "best runs/quickstart --at-least worst_group=0.2"),
    (_RESULTS, results_commands.export, "export runs/quickstart --to results.csv"),
    (_RESULTS, results_commands.predict, f"predict runs/people/trials/{_TRIAL} new.csv --to predictions.csv"),
    (_RESULTS, results_commands.compare, "compare runs/quickstart runs/mnist --html comparison.html"),
    (_RUN, plan_command.plan, "plan sweeps/quickstart.yaml --probe --price-per-hour 0.40"),
    (_RUN, run, "run sweeps/quickstart.yaml --output runs/quickstart"),
    (_RESULTS, report, "report runs/quickstart --watch"),
    (_PRIVACY, forget, "forget runs/quickstart"),
)
"""Every command, in the order of ``dpsweep --help``: its group there, its function, and an example, which begins with
its name."""
for _panel, _command, _example in _COMMANDS:
    app.command(_example.split()[0], cls=CheckedCommand, rich_help_panel=_panel, epilog=f"Example: dpsweep {_example}")(
        _command
    )
for _command in (cluster_jobs.drive, cluster_jobs.tell_failed):
    app.command(hidden=True)(_command)


def main() -> None:
    """Run the command; print errors that a user can act on, one line each, and set the exit code."""
    try:
        _print_in_any_encoding()
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
    except (MemoryError, ImportError) as error:
        if isinstance(error, ImportError) and "failed to map segment" not in str(error):  # of a library as it is loaded
            raise
        print(
            "error: there is not enough memory; end other work, or raise the limit (ulimit -v, or the container's), "
            "and the same command continues",
            file=sys.stderr,
        )
        sys.exit(1)


def _print_in_any_encoding() -> None:
    """Print characters that the encoding of the output lacks, such as ε in Latin-1, as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where it is closed
            stream.reconfigure(errors="backslashreplace")


def _print_error(error: DpsweepError) -> None:
    for line in str(error).splitlines():
        print(for_terminal(f"error: {line}"), file=sys.stderr)
