"""`dpsweep status` and `list`: the progress of a sweep by its status file, and the sweeps of a folder or cluster."""

from __future__ import annotations

import contextlib
import datetime
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dpsweep.accounting.errors import DataCorruption, InvalidInput, StorageError, count_of
from dpsweep.accounting.mechanism.reasons import in_words, union
from dpsweep.accounting.records.files import exists
from dpsweep.accounting.registry import lookup, one_of
from dpsweep.orchestration.commands.cluster_jobs import jobs_at
from dpsweep.orchestration.commands.options import CLUSTER_ADDRESS, AsJson, show, stdout, warn
from dpsweep.orchestration.commands.useless_options import is_given, useless
from dpsweep.orchestration.comparison.formats import (
    Fitting,
    at_most,
    clock,
    dim_table,
    no_progress,
    number,
    per_unit,
    percent,
    plain_text,
    seconds,
)
from dpsweep.orchestration.comparison.metrics import measured
from dpsweep.orchestration.store.layout import SweepFiles, folder_at, sweep_at
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.status import RecordingStatus
from dpsweep.orchestration.store.status_snapshot import (
    LOST,
    PERIOD,
    STALE_AFTER,
    ClusterSnapshot,
    SweepSnapshot,
    TrialSnapshot,
    read_snapshot,
)
from dpsweep.orchestration.tracking.addresses import serving

if TYPE_CHECKING:
    from dpsweep.orchestration.execution.submission import SubmittedSweep

AnyAddress = Annotated[str | None, CLUSTER_ADDRESS]

MOST_SHOWN: Final = 30
"""Number of trials that are all shown by default; of more, those that run and have failed, and a summary."""
_WORDS: Final = one_of([each.value for each in TrialState])


def status(
    context: typer.Context,
    sweep: Annotated[str, typer.Argument(help="Folder or URI of a sweep, or the id of a job.", metavar="DIR|URI|ID")],
    address: AnyAddress = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show every change until the sweep has ended.")] = False,
    trials: Annotated[
        bool, typer.Option("--trials", help=f"Show every trial; by default those of up to {MOST_SHOWN} trials.")
    ] = False,
    state: Annotated[
        list[str] | None,
        typer.Option(metavar="STATE", help=f"Show the trials in this state: {_WORDS}; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch one object per line.")] = False,
) -> None:
    """Show how far a sweep has come, and whether its driver is alive, from any machine that sees the folder."""
    states = [lookup({each.value: each for each in TrialState}, word, "state") for word in state or ()]
    console = stdout()
    if watch and not as_json and not console.is_terminal and (trials or states):
        option = "--trials" if trials else "--state"
        raise useless(option, "with --watch off a terminal", "a change is one line on all trials", "drop one of them")
    files, asked = _found(sweep, address)
    if asked is None and is_given(context, "address"):
        because, step = "its own status file is read", "drop it, or give the id of a job"
        raise useless("--address", f"for the folder {files.root}", because, step)
    if asked is not None and address is not None and watch:
        asked = _awaited(asked, files, address)
    now = _current(files)
    if asked is not None:
        warn_of_another(asked, now)
    now = _required(now, files)
    if asked is not None and not watch:
        has_died(asked, now)
    close_in_mlflow(files, now)
    _warn_of_full_disk(files, now)
    shown: Iterable[SweepSnapshot] = _snapshots(files, asked, address) if watch else [now]
    if as_json:
        for snapshot in shown:
            print(json.dumps(as_object(snapshot), allow_nan=False), flush=True)
        return
    if not watch:
        show(picture(now, states, trials))
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            for snapshot in shown:
                live.update(picture(snapshot, states, trials), refresh=True)
    else:
        said = ""
        for snapshot in shown:
            line = headline(snapshot)
            if line.plain != said:  # the driver may write nothing new for a while
                console.print(line, soft_wrap=True)
            said = line.plain


def _warn_of_full_disk(files: SweepFiles, found: SweepSnapshot) -> None:
    """Warn if the status may be old because its driver cannot write; one that says how it ended is the last."""
    if found.is_over and found.state != LOST:
        return
    with contextlib.suppress(OSError):  # nothing there, or not for this user: told by whoever reads the status
        if "://" not in files.root and shutil.disk_usage(files.root).free == 0:
            warn(f"the disk of {files.root} is full, so that what follows may be old; free some space")


def _found(sweep: str, address: str | None) -> tuple[SweepFiles, SubmittedSweep | None]:
    """Return the folder or URI ``sweep``, or the output of the job with that id at ``address`` and the job."""
    files = sweep_at(sweep)
    if address is None or "/" in sweep or _current(files) is not None:
        return files, None
    job = jobs_at(address).find(sweep)
    return SweepFiles(job.output), job


def _awaited(asked: SubmittedSweep, files: SweepFiles, address: str) -> SubmittedSweep:
    """Wait until the driver of the job has written a status, or the job has ended; returns the job as it is then."""
    jobs = jobs_at(address)
    while not asked.has_ended and not _is_by(asked, _current(files)):
        time.sleep(PERIOD)
        asked = jobs.find(asked.id)
    return asked


def _is_by(asked: SubmittedSweep, found: SweepSnapshot | None) -> bool:
    return found is not None and found.job == asked.id


def warn_of_another(asked: SubmittedSweep, found: SweepSnapshot | None) -> None:
    """Warn if another driver than that of the job wrote the status, such as that of an earlier job of the sweep.

    Raises: InvalidInput if there is no status yet, or the job has ended before there was one.
    """
    if found is not None and _is_by(asked, found):
        return
    if asked.has_ended:
        state, so_far = f"has {asked.state.lower()}", "before its sweep had a status"
        logs = f"`dpsweep logs {asked.id}` shows how it ended"
    else:
        state, so_far = f"is {asked.state.lower()}", "and its driver has written no status yet"
        logs = f"ask again in some seconds; `dpsweep logs {asked.id}` shows how it starts"
    if found is None:
        raise InvalidInput(f"{asked.id} {state} {so_far}; {logs}")
    writer = found.job or "a run without a job"
    text = f"{asked.id} {state}; what follows is not its status, but what {writer} wrote to the same output"
    warn(f"{text}; {logs}")


def has_died(asked: SubmittedSweep, found: SweepSnapshot) -> bool:
    """Return whether the job has ended and no driver writes the status any more; warn if its own could not say so."""
    if not (asked.has_ended and found.is_stale()):
        return False
    if _is_by(asked, found):
        warn(
            f"{asked.id} has {asked.state.lower()}, and its driver did not say how: it was killed, or could not "
            f"write; `dpsweep logs {asked.id}` shows what it printed, and the same `dpsweep submit` continues it"
        )
    return True


def _current(files: SweepFiles) -> SweepSnapshot | None:
    """Return the status of the sweep, or that of its tuning where it is newer, which its name says; None without
    either.
    """
    own, tuning = read_snapshot(files.status), read_snapshot(files.of_tuning.status)
    if tuning is None or (own is not None and own.heartbeat >= tuning.heartbeat):
        return own
    return replace(tuning, name=f"{tuning.name} (tuning)")


def _is_followed(shown: SweepSnapshot, files: SweepFiles) -> bool:
    """Return whether the sweep itself is about to follow a tuning that has just ended."""
    own = read_snapshot(files.status)
    is_tuning = own is None or own.heartbeat != shown.heartbeat
    return is_tuning and shown.state in ("finished", "failed") and shown.age() < STALE_AFTER


def _required(found: SweepSnapshot | None, files: SweepFiles) -> SweepSnapshot:
    """Return what was read of the status of a sweep. Raises: InvalidInput if that is nothing."""
    if found is None and exists(files.of_selection.manifest):
        raise InvalidInput(
            f"the private selection of {files.root} runs, or was interrupted: how far it has come is not shown, as it "
            "tells how many candidates were drawn; the same `dpsweep run` continues it, and there is a status when "
            "the best are chosen"
        )
    if found is None:
        raise InvalidInput(
            f"there is no {files.status}: no sweep has started there, or not where this machine can read it; give the "
            "folder or URI of a sweep, or a job's id with --address"
        )
    return found


def _snapshots(files: SweepFiles, asked: SubmittedSweep | None, address: str | None) -> Iterator[SweepSnapshot]:
    """Yield each new snapshot until the sweep, or the job at ``address``, has ended; a stale one is repeated."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            snapshot = _required(_current(files), files)
            yield snapshot
            if snapshot.is_over and not _is_followed(snapshot, files):
                return
            if asked is not None and address is not None and snapshot.is_stale():
                with contextlib.suppress(InvalidInput):  # a cluster that does not answer now may do so later
                    asked = jobs_at(address).find(asked.id)
                if has_died(asked, snapshot):
                    return
            time.sleep(PERIOD)


def as_object(snapshot: SweepSnapshot) -> dict[str, Any]:
    """Return the snapshot as plain values for JSON, with its age in seconds and whether it is stale."""
    counts = {state.value: snapshot.counts()[state] for state in TrialState}
    return {**asdict(snapshot), "counts": counts, "age": snapshot.age(), "stale": snapshot.is_stale(), "checked": False}


def headline(snapshot: SweepSnapshot) -> Text:
    """Return one line with state, trials by state, time and, for a stale snapshot, its age."""
    counts = snapshot.counts()
    done = sum(count for state, count in counts.items() if state.has_ended)
    begun = sum(count for state, count in counts.items() if state.is_running)
    word = "interrupted" if begun and snapshot.is_over else "running"
    quiet = 0 if snapshot.is_over or snapshot.is_stale() else sum(trial.quiet is not None for trial in snapshot.trials)
    silent = f" ({quiet} without progress)" if quiet else ""
    left = f"{clock(snapshot.seconds_left)} to finish" if snapshot.seconds_left is not None else "? to finish"
    pending = counts[TrialState.PENDING]
    cluster = None if snapshot.is_over else snapshot.cluster  # of a lost driver nothing starts any more
    starting = min(pending, cluster.starting) if cluster is not None else 0
    begins = f"{starting} starting, " if starting else ""
    trials = (
        f"{done} of {len(snapshot.trials)} trials done, {begun} {word}{silent}, {begins}{pending - starting} waiting, "
        f"{counts[TrialState.FAILED]} failed; {clock(snapshot.elapsed)} elapsed"
    )
    if snapshot.is_stale():
        word = f"stale: no sign of its driver for {seconds(snapshot.age())}"
        return plain_text(f"{snapshot.name}: {word}; then {trials}", "bold yellow")
    ending = f", {left}" if snapshot.state == "running" else f"; {snapshot.reason}" if snapshot.reason else ""
    records = snapshot.state == "recording" and snapshot.recording is not None and snapshot.recording.goes_on
    state = snapshot.recording.line() if snapshot.recording and records else snapshot.state
    return plain_text(f"{snapshot.name}: {state}, {trials}{ending}", "bold")


def close_in_mlflow(files: SweepFiles, snapshot: SweepSnapshot | None) -> None:
    """End runs of the sweep that MLflow shows as running though its driver is gone."""
    if snapshot is not None and snapshot.may_run_in_mlflow():
        from dpsweep.orchestration.tracking.abandoned import end_abandoned

        if problem := end_abandoned(files, snapshot):
            warn(problem)


def picture(snapshot: SweepSnapshot, states: Sequence[TrialState] = (), show_all: bool = False) -> RenderableType:
    """Return the headline, the driver, the cluster, the recording, and trials: those in some ``states``, or all of
    many.
    """
    job = f", job {snapshot.job}" if snapshot.job else ""
    driver = f"driver on {snapshot.host} (pid {snapshot.pid}){job}, {_seen(snapshot.age())}"
    lines = [headline(snapshot), plain_text(driver, "dim")]
    again = "the same `dpsweep run` or `dpsweep submit` continues the sweep"
    if snapshot.is_stale():
        lines.append(plain_text(f"if the driver was killed, {again}"))
    elif snapshot.state == LOST:
        lines.append(plain_text(f"its driver has ended without saying how: it was killed, or could not write; {again}"))
    elif snapshot.state in ("interrupted", "stopped"):
        lines.append(plain_text(again))
    if snapshot.limits and snapshot.state not in ("finished", "failed"):
        lines.append(plain_text(f"limits of this run: {', '.join(snapshot.limits)}", "dim"))
    if snapshot.cluster is not None and not snapshot.is_over:
        lines.append(_cluster(snapshot.cluster))
    lines += map(plain_text, _devices(snapshot))
    if snapshot.recording is not None:
        lines += _recording(snapshot.recording)
    trials, hidden = _chosen(snapshot, states, show_all)
    failed = [
        plain_text("failed", "red") + plain_text(f" {trial.key}: {trial.error}") for trial in trials if trial.error
    ]
    given = union(trial.reasons for trial in snapshot.trials if trial.epsilon is not None)
    reasons = list(map(plain_text, in_words(given)))
    if any(trial.epsilon is not None for trial in snapshot.trials):
        reasons.append(plain_text(_AS_WRITTEN, "dim"))
    return Group(*lines, *([Fitting(_trials(snapshot, trials))] if trials else []), *reasons, *failed, *hidden)


def _seen(age: float) -> str:
    if age > -PERIOD:
        return f"seen {seconds(max(age, 0.0))} ago"
    return f"whose clock is {seconds(-age)} ahead of this machine's; until they agree, it is called stale late"


_AS_WRITTEN = (
    "epsilons are as the driver wrote them, and were not checked; `dpsweep verify` compares them with the traces"
)


def _recording(recording: RecordingStatus) -> list[Text]:
    if missing := recording.missing() if recording.failure else "":
        return [plain_text(missing, "yellow")]
    served = "" if recording.store.startswith("http") else f"`{serving(recording.store)}`, then "
    return [plain_text(f"MLflow: {served}{recording.page}", "dim")]


def _chosen(
    snapshot: SweepSnapshot, states: Sequence[TrialState], show_all: bool
) -> tuple[list[TrialSnapshot], list[Text]]:
    """Return the trials to show, and a summary of the others: by state, and their best result so far."""
    if states:
        found = [trial for trial in snapshot.trials if trial.state in states]
        return found, [] if found else [plain_text(f"no trial is {' or '.join(state.value for state in states)}")]
    if show_all or len(snapshot.trials) <= MOST_SHOWN:
        return list(snapshot.trials), []
    running = [trial for trial in snapshot.trials if trial.state.is_running]
    failed = [trial for trial in snapshot.trials if trial.state is TrialState.FAILED]
    trials = [*running[:_FIRST], *failed[:_FIRST]]
    others = len(snapshot.trials) - len(trials)
    more = f", --state failed the {len(failed)} failed ones" if len(failed) > _FIRST else ""
    text = f"{others} of {len(snapshot.trials)} trials are not shown: --trials shows all{more}"
    return trials, [*_ranges(snapshot), plain_text(text, "dim")]


def _ranges(snapshot: SweepSnapshot) -> list[Text]:
    """Least and largest result of the finished trials."""
    done = [trial for trial in snapshot.trials if trial.state is TrialState.FINISHED]
    found: dict[str, list[float]] = {"accuracy": [trial.accuracy for trial in done if trial.accuracy is not None]}
    for trial in done:
        for name, score in trial.scores.items():
            found.setdefault(name, []).append(score)
    parts = [f"{name} {number(min(each))} to {number(max(each))}" for name, each in found.items() if each]
    if costs := [trial.epsilon for trial in done if trial.epsilon is not None]:
        parts.append(f"epsilon {at_most(min(costs))} to {at_most(max(costs))}")
    return [plain_text(f"finished trials: {', '.join(parts)}")] if parts else []


_FIRST = 5
"""Running and failed trials that the summary shows."""


def _cluster(cluster: ClusterSnapshot) -> Text:
    whole: dict[str, float] = {}
    for node in cluster.nodes:
        for name, amount in node.resources.items():
            whole[name] = whole.get(name, 0.0) + amount
    have = ", ".join(f"{name} {amount:g} ({cluster.free.get(name, 0.0):g} free)" for name, amount in whole.items())
    text = f"{count_of(len(cluster.nodes), 'node')}: {have or 'without resources'}"
    if shortage := cluster.shortage():
        return plain_text(f"{text}; {shortage}", "yellow")
    waiting = (
        f"; {count_of(cluster.waiting, 'trial waits', 'trials wait')} for {_listed(cluster.trial)} each"
        if cluster.waiting
        else ""
    )
    return plain_text(f"{text}{waiting}")


def _devices(snapshot: SweepSnapshot) -> Iterator[str]:
    """Yield a line for each kind of device that trains or trained: trials, the highest peak memory, the mean
    utilization.
    """
    found = [trial.device for trial in snapshot.trials if trial.device is not None]
    for kind in sorted({(use.device.partition(":")[0], use.name) for use in found}):
        uses = [use for use in found if (use.device.partition(":")[0], use.name) == kind]
        busy = [use.utilization for use in uses if use.utilization is not None]
        shown = f", {percent(sum(busy) / len(busy))} busy" if busy else ""
        peak = max(use.peak_bytes for use in uses) / 2**20
        yield f"{count_of(len(uses), 'trial')} on {kind[0]} ({kind[1]}): at most {number(peak)} MiB each{shown}"


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())


def _trials(snapshot: SweepSnapshot, trials: Sequence[TrialSnapshot]) -> Table:
    table = dim_table("trial", "state", "epoch", "step", "epsilon", "on test data")
    for trial in trials:
        cut_off = trial.state.is_running and snapshot.is_over
        quiet = "" if snapshot.is_over or snapshot.is_stale() else no_progress(trial.quiet)
        word = "interrupted" if cut_off else trial.state.value
        state = plain_text(", ".join(filter(None, (word, quiet))), trial.state.style)
        epoch = str(trial.epoch) if trial.epoch is not None else ""
        table.add_row(
            plain_text(trial.key),
            state,
            epoch,
            f"{trial.step}/{trial.total_steps}",
            _epsilon(trial),
            plain_text(measured(trial.accuracy, trial.scores)),
        )
    return table


def _epsilon(trial: TrialSnapshot) -> str:
    if trial.private is False:
        return "none (not private)"
    whose = per_unit(trial.unit) if trial.epsilon is not None else ""
    return f"{at_most(trial.epsilon)}{whose}{' estimate' * (trial.epsilon is not None and bool(trial.reasons))}"


def list_sweeps(
    folder: Annotated[
        str | None,
        typer.Argument(
            help="Folder or URI below which sweeps are looked for; without it, --address.", metavar="FOLDER"
        ),
    ] = None,
    address: AnyAddress = None,
    as_json: AsJson = False,
) -> None:
    """List the sweeps below a folder; without a folder, the submitted sweeps of a cluster, the newest last."""
    if folder is not None:
        _list_stored(folder_at(folder), as_json)
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
    cluster = jobs_at(address)
    jobs = cluster.all()
    if as_json:
        plain = [asdict(job) | {"progress": _progress(job.output)} for job in jobs]
        typer.echo(json.dumps({"jobs": plain}))
        return
    now = cluster.now()
    rows = (
        (
            job.id,
            job.owner,
            job.priority,
            job.state.lower(),
            seconds(max(0.0, now - job.submitted)),
            "?" if (seen := _progress(job.output)) is None else f"{seen['done']} of {seen['trials']}",
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


def _show(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    table = dim_table(*columns)
    for row in rows:
        table.add_row(*map(plain_text, row))
    show(table)


def _counted(trials: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in trials.items())


def _minute(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(" ", "minutes")[:16]
