"""`dpsweep submit`, `logs` and `stop`: sweeps as jobs of a cluster, which outlive the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn
from urllib.parse import urlsplit

import typer

from dpsweep.accounting.errors import DpsweepError, InvalidInput, StorageError, count_of
from dpsweep.accounting.records.encryption import KEY_VARIABLE, require_key
from dpsweep.accounting.records.files import exists
from dpsweep.orchestration.commands.options import (
    CLUSTER_ADDRESS,
    MaxGpuHours,
    MaxHours,
    MaxSeeds,
    MaxTrials,
    Retry,
    StopAfterFailures,
    SweepFile,
    Until,
    most_seeds,
    warn,
)
from dpsweep.orchestration.comparison.formats import file_size, for_terminal, listed
from dpsweep.orchestration.execution.environment import prepare_environment
from dpsweep.orchestration.tracking.access import SECRET, cluster_token, own_access, sealed
from dpsweep.orchestration.tracking.addresses import looks_secret, masked, secrets_of

if TYPE_CHECKING:
    from dpsweep.orchestration.execution.submission import ShippedCode, SubmittedSweep, SubmittedSweeps
    from dpsweep.orchestration.sweeps.schema import SweepSpec
    from dpsweep.workers.own_code.imports import UserCode

Address = Annotated[str, CLUSTER_ADDRESS]
JobName = Annotated[str, typer.Argument(help="The id of a job, or the output of its sweep.", metavar="ID|OUTPUT")]


def submit(
    sweep: SweepFile,
    output: Annotated[str, typer.Option(help="Folder or URI of the sweep, as every node of the cluster sees it.")],
    address: Address,
    name: Annotated[
        str | None, typer.Option(help="Name in MLflow, and first part of the job's id (default: the sweep's name).")
    ] = None,
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            envvar="MLFLOW_TRACKING_URI",
            help="MLflow, as the head sees it (default: SQLite on the head), or 'none'. This shell's login goes to "
            "the driver alone.",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Show what the job prints until it ends.")] = False,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V", help="Variable of the driver and the workers; no secrets. May be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan and package, but submit nothing.")] = False,
    allow_code: Annotated[
        list[str] | None, typer.Option(metavar="MODULE", help="As for `dpsweep run`; may be repeated.")
    ] = None,
    retry: Retry = None,
    max_hours: MaxHours = None,
    max_gpu_hours: MaxGpuHours = None,
    max_trials: MaxTrials = None,
    stop_after_failures: StopAfterFailures = None,
    until: Until = None,
    max_seeds: MaxSeeds = None,
    priority: Annotated[
        int, typer.Option(help="Trials of sweeps with a higher one begin first; none that runs is ended.")
    ] = 0,
    max_concurrent: Annotated[
        int | None,
        typer.Option(metavar="N", help="Begin a trial only while fewer than N of your trials train on the cluster."),
    ] = None,
    owner: Annotated[str | None, typer.Option(help="Whose sweep it is (default: your user name).")] = None,
) -> None:
    """Plan a sweep here, and run it as a job of a Ray cluster that goes on without this terminal.

    The same command again shows the running job, or continues the sweep once the job has ended. A running job keeps its
    limits.
    """
    prepare_environment(address)
    from dpsweep.orchestration.execution.submission import Asked, packaged, submission_id
    from dpsweep.orchestration.pipeline import require_room_for_seeds
    from dpsweep.orchestration.store.limits import Limits, Turn, this_user
    from dpsweep.orchestration.sweeps.schema import parse_sweep
    from dpsweep.orchestration.sweeps.text import read_text
    from dpsweep.orchestration.sweeps.user_code import permitted

    text = read_text(sweep)
    spec = parse_sweep(text, str(sweep))
    code = permitted(spec, sweep.resolve().parent, allow_code or ())
    variables = _variables(env or ())
    _require_absolute(output)
    jobs = None if dry_run else jobs_at(address)
    _require_own_output(spec, text, output, code, retry or ())
    trials = _planned(spec, code)
    job_id = submission_id(name or spec.name, spec.plain(), output)
    turn = Turn(owner or this_user(), priority, max_concurrent, time.time())
    limits = Limits(max_hours, max_trials, stop_after_failures, max_gpu_hours)
    asked = Asked(limits, tuple(retry or ()), turn, name, code.places, most_seeds(until, max_seeds))
    if asked.most_seeds is not None:
        require_room_for_seeds(spec, asked.most_seeds)
    asked.limits.require_use(max(each.gpus for each in spec.resources))
    with packaged(text, sweep.name, output, code, asked, _tracking(tracking_uri)) as package:
        _describe(package)
        if jobs is None:
            _say(f"{job_id}: {count_of(trials, 'trial')} would be submitted to {address}, with output {output}")
            return
        job = jobs.submit(job_id, output, package, variables, turn, warn)
    _say(f"{job.id}: {count_of(trials, 'trial')}, {job.state.lower()} at {address}, output {job.output}")
    _say(f"`dpsweep status {job.id} --address {address}` shows its progress, and where MLflow compares its trials")
    if follow:
        _follow(jobs, job)


def logs(
    job: JobName,
    address: Address,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job ends.")] = False,
) -> None:
    """Print what the job of a submitted sweep has printed."""
    jobs = jobs_at(address)
    found = jobs.find(job)
    if follow:
        _follow(jobs, found)
    print(for_terminal(jobs.logs(found)), end="")


def stop(job: JobName, address: Address) -> None:
    """Stop the job of a submitted sweep as Ctrl-C would; submitting the sweep again continues it."""
    jobs = jobs_at(address)
    found = jobs.find(job)
    if found.has_ended:
        _say(f"{found.id} has ended already: {found.state.lower()}")
        return
    jobs.stop(found)
    _say(f"{found.id} is told to stop; submit the sweep again to continue it")
    tell_what_is_missing(found)


def tell_what_is_missing(job: SubmittedSweep) -> None:
    """Wait for the end of the stopped job's driver, and say what it has not recorded in MLflow."""
    from dpsweep.orchestration.store.layout import SweepFiles
    from dpsweep.orchestration.store.status_snapshot import SweepSnapshot, read_snapshot

    def seen() -> SweepSnapshot | None:
        for _ in range(_READS):  # this machine need not see the output, and a busy store may answer late
            with contextlib.suppress(DpsweepError):
                found = read_snapshot(SweepFiles(job.output).status)
                return found if found is not None and found.job == job.id else None
            time.sleep(0.5)
        return None

    deadline = time.monotonic() + _STOP_WITHIN
    while (snapshot := seen()) is not None and time.monotonic() < deadline:
        if snapshot.is_over or snapshot.is_stale():
            break
        time.sleep(0.5)
    if snapshot is not None and snapshot.recording is not None and snapshot.recording.trials:
        _say(snapshot.recording.missing() or snapshot.recording.line())


_STOP_WITHIN = 15.0
"""Seconds to wait until a driver has ended."""
_READS = 4
"""Attempts to read the status of a sweep that is told to stop."""


def drive() -> None:
    """Run the sweep of this process's job; started by `dpsweep.orchestration.execution.supervisor`."""
    from dpsweep.orchestration.commands.running import run_to_the_end
    from dpsweep.orchestration.sweeps.schema import parse_sweep

    prepare_environment("auto")
    from dpsweep.orchestration.execution.shared_connection import ray_ahead
    from dpsweep.orchestration.execution.submission import read_job
    from dpsweep.orchestration.tracking.access import unsealed

    job = read_job()
    require_key(job.key_check, f"the sweep in {job.output}")
    os.environ.update(unsealed(job.tracking, cluster_token()))  # of this process alone: workers start from Ray's own
    spec = parse_sweep(job.text, job.origin)
    from dpsweep.orchestration.pipeline import RunRequest

    tracking = os.environ.get("MLFLOW_TRACKING_URI")
    asked = job.asked
    with ray_ahead(spec, job.output, "auto", job.code) as connect:
        request = RunRequest(
            spec,
            job.text,
            job.output,
            "auto",
            tracking,
            job.code,
            asked.limits,
            asked.retry,
            turn=asked.turn,
            name=asked.name,
            submitted_from=asked.submitted_from,
            most_seeds=asked.most_seeds,
            connect=connect,
        )
        run_to_the_end(request, as_json=False)


def tell_failed(message: str) -> None:
    """Tell whom this job's sweep names that it failed; started by `dpsweep.orchestration.execution.supervisor`."""
    from dpsweep.orchestration.execution.status_file import tell_failed as tell
    from dpsweep.orchestration.execution.submission import read_job
    from dpsweep.orchestration.store.layout import output_files
    from dpsweep.orchestration.sweeps.schema import parse_sweep

    prepare_environment("auto")
    job = read_job()
    spec = parse_sweep(job.text, job.origin)
    if spec.notify:
        tell(
            spec.notify,
            output_files(job.output, spec.name),
            spec.name,
            message,
            warn,
        )


def jobs_at(address: str) -> SubmittedSweeps:
    """Return the jobs of the cluster at ``address``. Raises: InvalidInput if it does not answer or requires another
    token.
    """
    prepare_environment(address)
    from dpsweep.orchestration.execution.submission import SubmittedSweeps

    return SubmittedSweeps(address)


def _follow(jobs: SubmittedSweeps, job: SubmittedSweep) -> NoReturn:
    """Print the job's output until it ends; exit with 0 if it succeeded, else 1. Ctrl-C does not stop the job."""
    try:
        for lines in jobs.follow(job):
            print(for_terminal(lines), end="", flush=True)
    except KeyboardInterrupt:
        print(for_terminal(f"{job.id} goes on without this terminal; `dpsweep stop` ends it"), file=sys.stderr)
        raise typer.Exit(130) from None
    raise typer.Exit(0 if jobs.find(job.id).state == "SUCCEEDED" else 1)


def _planned(spec: SweepSpec, code: UserCode) -> int:
    """Plan the sweep and return its number of trials. Raises: InvalidInput with one line per reason for a refusal."""
    from dpsweep.orchestration.store.layout import SweepFiles, absolute, default_output
    from dpsweep.orchestration.sweeps.plan import plan_sweep
    from dpsweep.orchestration.sweeps.planned import accept

    plan = accept(plan_sweep(spec, code), SweepFiles(absolute(default_output(spec.name))))
    for warning in plan.warnings:
        warn(warning)
    return len(plan.trials)


def _variables(given: Sequence[str]) -> dict[str, str]:
    """Return the texts ``K=V`` as a mapping. Raises: InvalidInput for other text, and for the variable of the
    encryption key.
    """
    pairs = [text.partition("=") for text in given]
    for text, (name, equals, _) in zip(given, pairs, strict=True):
        if not equals or not name.isidentifier():
            raise InvalidInput(f"--env is {text!r}, but must be NAME=VALUE")
        if name == KEY_VARIABLE:
            raise InvalidInput(
                f"--env names {KEY_VARIABLE}, but Ray stores and prints such variables; set it where Ray is started"
            )
        if looks_secret(name):
            own = "; leave it out, as this shell's login of MLflow goes to the driver alone" if name in SECRET else ""
            warn(f"--env {name}: Ray keeps and shows such variables, to everyone who can use the cluster{own}")
    return {name: value for name, _, value in pairs}


def _tracking(uri: str | None) -> str:
    """Return where and as whom the driver records, sealed with the token of the cluster; without one, no secret is
    sent.
    """
    access, token = own_access() | ({"MLFLOW_TRACKING_URI": uri} if uri else {}), cluster_token()
    if uri and urlsplit(uri).hostname in ("127.0.0.1", "localhost", "::1"):
        warn(f"the head will look for MLflow at {masked(uri)} on itself; give the one that the head knows")
    if token is None:
        secret = {name for name, value in access.items() if name in SECRET or secrets_of(value)}
        if secret:
            text = f"not sent: {listed(sorted(secret))}, as the cluster has no token to keep it from others"
            warn(f"{text}; start the cluster with RAY_AUTH_MODE=token")
        access = {name: value for name, value in access.items() if name not in secret}
    return sealed(access, token or "")


def _require_absolute(output: str) -> None:
    if "://" not in output and not output.startswith("/"):
        raise InvalidInput(
            f"--output is {output!r}, which depends on where a process runs; give a URI such as s3://BUCKET/NAME, or "
            "the absolute path of a folder that all nodes share"
        )


def _require_own_output(spec: SweepSpec, text: str, output: str, code: UserCode, retry: Sequence[str]) -> None:
    """Refuse an output that holds another sweep, or results of other code, where this machine can read it.

    Else say so. Raises: InvalidInput, DataCorruption as the job itself would.
    """
    from dpsweep.orchestration.comparison.stored import stored_record
    from dpsweep.orchestration.execution.same_code import ANEW, begun_with_other_code, refuse
    from dpsweep.orchestration.execution.upkeep import named_trials
    from dpsweep.orchestration.store.layout import SweepFiles
    from dpsweep.orchestration.sweeps.manifest import opened_manifest, read_manifest

    files = SweepFiles(output)
    try:
        is_seen = "://" in output or exists(str(Path(output).parent))
        stored = read_manifest(files)
        opened_manifest(stored, spec, text, files.root)
        if stored is not None:
            anew = tuple(chain.from_iterable(named_trials(files, retry).values()))
            refuse(begun_with_other_code(files, stored_record(files).points, code, anew), files, ANEW)
    except StorageError as error:
        _warn_of_unseen_output(output, str(error))
        return
    if not is_seen:
        _warn_of_unseen_output(output, "there is no such folder on this machine")


def _warn_of_unseen_output(output: str, reason: str) -> None:
    warn(f"whether {output} holds another sweep cannot be seen from here ({reason}); the job will tell")


def _describe(package: ShippedCode) -> None:
    """Print the files to send with their sizes, and the files of the user's packages that are left out."""
    files = ", ".join(f"{name} ({file_size(size)})" for name, size in package.own)
    _say(f"sent: {files}; dpsweep ({file_size(package.dpsweep)}); no data")
    if package.left_out:
        print(for_terminal(f"not sent, by their endings: {', '.join(package.left_out)}"), file=sys.stderr)


def _say(text: str) -> None:
    """Print text, made safe by `for_terminal`, because others may have chosen the names in it."""
    print(for_terminal(text))
