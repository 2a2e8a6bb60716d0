"""Run one sweep file: the request, its outcome, and plan, training, accounting, results, MLflow and report."""

from __future__ import annotations

import contextlib
import functools
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from dpsweep.accounting.errors import DataCorruption, count_of
from dpsweep.accounting.records.files import closed_to_strangers, exists
from dpsweep.accounting.records.local_files import make_private_file, make_private_folder
from dpsweep.orchestration.comparison.formats import listed
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.execution.backend import Backend, Connect, Opening
from dpsweep.orchestration.execution.backends import backend, opening, plan_at
from dpsweep.orchestration.execution.coordinator import Coordinator, initial_status
from dpsweep.orchestration.execution.environment import EMBEDDED, open_cluster
from dpsweep.orchestration.execution.given_data import delete_left_copies
from dpsweep.orchestration.execution.notices import Notices
from dpsweep.orchestration.execution.publication import publisher
from dpsweep.orchestration.execution.reuse import take_finished
from dpsweep.orchestration.execution.same_code import ANEW, begun_with_other_code, refuse
from dpsweep.orchestration.execution.shared_connection import own_connection
from dpsweep.orchestration.execution.status_file import StatusFile, earlier_driver
from dpsweep.orchestration.execution.storage_checks import require_answer, require_client, require_space
from dpsweep.orchestration.execution.upkeep import named_trials, start_anew
from dpsweep.orchestration.store.layout import SweepFiles, output_files
from dpsweep.orchestration.store.limits import FIRST_COME, NO_LIMITS, NOTHING_SPENT, Limits, Spent, Turn
from dpsweep.orchestration.store.ownership import exclusive
from dpsweep.orchestration.store.release_modes import release_mode
from dpsweep.orchestration.store.status import RecordingStatus, SweepStatus, TrialStatus
from dpsweep.orchestration.store.status_snapshot import SweepSnapshot
from dpsweep.orchestration.sweeps.manifest import (
    Manifest,
    opened_manifest,
    past_of,
    read_manifest,
    require_in_place,
    write_manifest,
)
from dpsweep.orchestration.sweeps.planned import Plan, accept
from dpsweep.orchestration.sweeps.schema import SweepSpec, parse_sweep
from dpsweep.orchestration.tracking.addresses import LOCAL_SERVER, experiment_name, is_server, masked
from dpsweep.orchestration.tracking.embedded import embedded_tracking_uri
from dpsweep.orchestration.tracking.given_stores import note_given
from dpsweep.orchestration.tracking.opening import open_tracker
from dpsweep.orchestration.tracking.tracker import NO_TRACKING, Tracker
from dpsweep.workers.own_code.imports import NO_CODE, UserCode
from dpsweep.workers.own_code.own_record import has_changed, names_weights, with_digests_of_weights


@dataclass(frozen=True)
class Outcome:
    """The record of a run, its files and its MLflow store, which may be `NO_TRACKING`.

    `seconds`: duration of the run.
    `stopped`: the limit that ended the run early, else None.
    `recording`: in MLflow, which may be incomplete; None without MLflow.
    `decision`: what to take, in sentences, as its report says.
    `unknown_cost`: why no baseline tells what privacy costs, as of `Findings`.
    `spent`: of the limits, so far.
    `adds_trials`: whether the run goes on, with further trials in the sweep.
    """

    record: SweepRecord
    files: SweepFiles
    tracking_uri: str
    seconds: float
    stopped: str | None = None
    recording: RecordingStatus | None = None
    decision: tuple[str, ...] = ()
    unknown_cost: str = ""
    spent: Spent = NOTHING_SPENT
    adds_trials: bool = False


def adds_nothing(record: SweepRecord) -> bool:
    """Return False: the run ends with this stage, whatever its record is."""
    return False


@dataclass(frozen=True)
class RunRequest:
    """A sweep to run, and where.

    `text`: content of the sweep file.
    `output`: folder or URI; None for runs/NAME.
    `address`: ``--address``.
    `tracking_uri`: None for the SQLite store in the sweep's folder, `NO_TRACKING` for none.
    `code`: the user's own modules that may be imported.
    `limits`: when the run stops early.
    `retry`: trials to train again from nothing: ``failed``, ``all``, keys or unique prefixes of keys; ignored by a
    driver that its job has restarted, which continues within the same limits.
    `sources`: folders of sweeps whose finished trials are copied instead of training them.
    `turn`: the place of the sweep among those that share a running cluster.
    `name`: of the sweep in MLflow; by default that of the sweep file, or the one that an earlier run of the folder was
    given.
    `most_seeds`: add seeds, up to this number, until settings can be told apart (`dpsweep.orchestration.pipeline.run`);
    None for the seeds of the file.
    `submitted_from`: `places` on the machine that submitted the sweep, if another one did.
    `connect`: connects to Ray; sweeps that run in turn may share the connection.
    `spent`: of the limits, by earlier stages of the run.
    `adds_trials_after`: whether the run adds trials to the sweep once the stage has this record.
    `unrecorded`: in MLflow, by an earlier stage, which gave up; this one does without, and names it in its outcome.
    """

    sweep: SweepSpec
    text: str
    output: str | None = None
    address: str = EMBEDDED
    tracking_uri: str | None = None
    code: UserCode = NO_CODE
    limits: Limits = NO_LIMITS
    retry: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    turn: Turn = FIRST_COME
    name: str | None = None
    most_seeds: int | None = None
    submitted_from: Mapping[str, str] | None = None
    connect: Connect = own_connection
    spent: Spent = NOTHING_SPENT
    adds_trials_after: Callable[[SweepRecord], bool] = adds_nothing
    unrecorded: RecordingStatus | None = None

    def of(self, text: str) -> RunRequest:
        """Return the request for ``text`` in place of the sweep's file.

        The sweep is what a later run reads in the stored text, so that no value is refused after training.
        """
        return replace(self, sweep=parse_sweep(text), text=text)

    @property
    def places(self) -> Mapping[str, str]:
        """Return where the user's own modules were read, as `UserCode.places`."""
        return self.code.places if self.submitted_from is None else self.submitted_from

    @functools.cached_property
    def files(self) -> SweepFiles:
        """Paths of the files of the sweep; its folder is looked at once."""
        return output_files(self.output, self.sweep.name)


class Display(Protocol):
    """Shows the progress of a run."""

    def warn(self, message: str) -> None:
        """Show a warning, one sentence."""

    def ended(self, trial: TrialStatus) -> None:
        """Show that a trial has ended; called in the thread that ended the trial."""

    def watching(self, status: SweepStatus) -> AbstractContextManager[None]:
        """Show the state of the sweep for the duration of a ``with`` block."""


class NoDisplay:
    """A `Display` that shows nothing; the default of `run_sweep`."""

    def warn(self, message: str) -> None:
        return

    def ended(self, trial: TrialStatus) -> None:
        return

    def watching(self, status: SweepStatus) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


NO_DISPLAY = NoDisplay()


def run_stage(request: RunRequest, display: Display) -> Outcome:
    """Run one sweep file to its report; `run_sweep` says what a sweep with ``tune`` runs. Raises: as `run_sweep`."""
    files = request.files
    tracking_uri = request.tracking_uri or embedded_tracking_uri(files.local_folder)
    tracking_uri = NO_TRACKING if request.unrecorded else tracking_uri
    _require_services(request, tracking_uri)
    with closed_to_strangers(), exclusive(files):  # first: no other command changes the folder while this one plans
        return _run_exclusively(request, tracking_uri, display)


def _run_exclusively(request: RunRequest, tracking_uri: str, display: Display) -> Outcome:
    """Plan and run the sweep in its folder, in which no other driver runs."""
    sweep, files = request.sweep, request.files
    stored = read_manifest(files)
    plan, manifest = _planned(request, stored)
    for warning in filter(None, (*plan.warnings, open_cluster(request.address))):
        display.warn(warning)
    earlier = earlier_driver(files.status)
    status = _initial_status(request, plan, earlier.spent if earlier else request.spent, display)
    code = with_digests_of_weights(request.code, (planned.spec for planned in plan.trials))
    asked = Opening(request.address, sweep, files, code, display.warn, request.connect, request.turn)
    begins = opening(request.address) if request.retry else backend(request.address, plan, files)
    with begins(asked) as execution:
        if release_mode(sweep.disclosure).is_sensitive:
            _close_folder(request, tracking_uri)
        delete_left_copies(request.code, files)
        tracker = open_tracker(tracking_uri, files)
        status.recording = recording_in(tracking_uri, tracker, files, manifest.sweep_id)
        write_manifest(files, manifest)
        anew = _started_anew(request, plan, request.retry if earlier is None else (), display)
        _take_over(request, plan, manifest, display)
        _require_selected(sweep, plan, files)
        with (
            _status_file(request, manifest, status, execution, display, earlier).kept_current(),
            Coordinator(
                sweep,
                plan,
                manifest,
                files,
                tracker,
                status,
                execution,
                anew,
                display.warn,
                publisher(request.address),
            ) as coordinator,
            display.watching(status),
        ):
            if stored is not None:
                display.warn(_continuation_warning(status, files, coordinator.no_longer_asked))
                if manifest.versions != stored.versions:
                    display.warn(_versions_warning(stored.versions, manifest.versions))
            execution.train(coordinator.pending(), coordinator, manifest.sweep_id)
            require_in_place(files)
            record, shown = coordinator.finish()
            status.adds_trials = not status.stopped_by and not record.failed and request.adds_trials_after(record)
        require_in_place(files)
        if status.stopped_by:
            display.warn(f"stopped early: {status.stopped_by}")
    return Outcome(
        record,
        files,
        tracking_uri,
        status.elapsed,
        stopped=status.stopped_by,
        recording=status.recording or request.unrecorded,
        decision=shown.decision,
        unknown_cost=shown.unknown_cost,
        spent=status.spent,
        adds_trials=status.adds_trials,
    )


def _require_services(request: RunRequest, tracking_uri: str) -> None:
    """Raise `InvalidInput` for limits of no use here, and for storage that cannot be used."""
    request.limits.require_use(max(each.gpus for each in request.sweep.resources))
    require_answer(request.files.root)
    if tracking_uri != NO_TRACKING and not is_server(tracking_uri):
        require_client(request.files.artifacts)


def _planned(request: RunRequest, stored: Manifest | None) -> tuple[Plan, Manifest]:
    """Return the plan of the sweep, and its manifest, not yet stored; the one that is ``stored`` is extended by the
    trials that the file asks for now.

    Raises: InvalidInput for a trial that cannot run, a folder of another sweep, and a lack of disk space.
    """
    sweep, files = request.sweep, request.files
    manifest = opened_manifest(stored, sweep, request.text, files.root)
    plan = accept(plan_at(request.address, sweep, request.code, past_of(manifest), files), files)
    if not (sweep.adapted and sweep.adapted.drawn):  # the space that drawn candidates need would tell their number
        require_space(files, plan)
    calibrations = {**manifest.calibrations, **plan.calibrations}
    places = {**manifest.code, **request.places}
    return plan, replace(manifest, calibrations=calibrations, title=request.name or manifest.title, code=places)


def _initial_status(request: RunRequest, plan: Plan, spent: Spent, display: Display) -> SweepStatus:
    """Return the status before any trial starts. spent: of the limits, by earlier stages, and by earlier drivers
    of the same job.
    """
    gpus = {planned.key: request.sweep.reserved(planned.spec).gpus for planned in plan.trials}
    return SweepStatus(initial_status(plan), display.ended, request.limits, gpus, spent)


def _status_file(
    request: RunRequest,
    manifest: Manifest,
    status: SweepStatus,
    execution: Backend,
    display: Display,
    earlier: SweepSnapshot | None,
) -> StatusFile:
    """earlier: the last status by a killed driver of the same job, if there is one."""
    sweep = request.sweep
    targets = () if sweep.adapted is not None and sweep.adapted.is_tuning else sweep.notify
    return StatusFile(
        request.files.status,
        sweep.name,
        manifest.sweep_id,
        sweep.disclosure,
        status,
        execution.cluster,
        display.warn,
        execution.show,
        Notices(targets, request.files.root, earlier.told if earlier else (), display.warn),
    )


def _close_folder(request: RunRequest, tracking_uri: str) -> None:
    """Make the sweep's folder, and MLflow's database and artifacts in it, readable by their owner only."""
    make_private_folder(str(request.files.local_folder))
    if request.tracking_uri is None:
        make_private_file(tracking_uri.removeprefix("sqlite:///"))  # SQLite's journals take its mode
        if "://" not in request.files.root:
            make_private_folder(request.files.artifacts)  # also in a copy of the sweep's folder


def _started_anew(request: RunRequest, plan: Plan, retry: Sequence[str], display: Display) -> tuple[str, ...]:
    """Delete the files of trials that start again: trials of ``retry``, and trials of other code that have shown
    nothing.

    Raises: InvalidInput, before anything is deleted, for others that began with other code than the request's.
    """
    files, named = request.files, named_trials(request.files, retry)
    for word, found in named.items():
        if not found:
            display.warn(f"--retry {word}: no trial of {files.root} has {'failed' if word == 'failed' else 'begun'}")
    anew = tuple(dict.fromkeys(chain.from_iterable(named.values())))
    if request.code.modules or any(names_weights(planned.spec) for planned in plan.trials):
        points = (*(planned.point for planned in plan.trials), *plan.former)
        others = begun_with_other_code(files, points, request.code, anew)
        refuse(others, files, ANEW)
        for other in others:
            display.warn(
                f"trial {other.point.key}: {has_changed(other.files)} since it began, and it has shown nothing"
            )
        anew = (*anew, *(other.point.key for other in others))
    start_anew(files, anew)
    for key in anew:
        display.warn(f"trial {key} starts anew; what it has released stays counted")
    return anew


def _take_over(request: RunRequest, plan: Plan, manifest: Manifest, display: Display) -> None:
    """Copy finished trials from the request's sources, and tell of them."""
    for source in request.sources:
        taken = take_finished(request.files, plan.trials, request.sweep, manifest, source, request.code)
        display.warn(f"{count_of(len(taken), 'finished trial is', 'finished trials are')} taken from {source}")


def _require_selected(sweep: SweepSpec, plan: Plan, files: SweepFiles) -> None:
    """Raise `DataCorruption` if a selected trial has no result: training it again would not be the selection."""
    if sweep.tune is None or not sweep.tune.is_selection or sweep.adapted is None or sweep.adapted.drawn:
        return
    missing = [planned.key for planned in plan.trials if not exists(files.trial(planned.key).result)]
    if missing:
        raise DataCorruption(
            f"{files.root}: the selected trials {', '.join(missing)} have no result; restore them from a backup, or "
            "run the sweep in another folder, which costs privacy again"
        )


def _continuation_warning(status: SweepStatus, files: SweepFiles, no_longer_asked: int) -> str:
    kept = sum(trial.result is not None for trial in status.trials)
    unasked = count_of(
        no_longer_asked, "trial that its file no longer asks for is", "trials that its file no longer asks for are"
    )
    former = f"; {unasked} kept too" if no_longer_asked else ""
    return (
        f"{files.root} holds this sweep, which is continued; {kept} of {len(status.trials)} trials have results and "
        f"keep them; to train these anew, choose another folder with --output{former}. Of their files, only "
        f"results are read; `dpsweep verify {shlex.quote(files.root)}` checks all"
    )


def _versions_warning(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    others = [f"{name} {versions}" for name, versions in now.items() if versions != before.get(name)]
    return (
        f"other versions have run this sweep before ({listed(others)}): what differs between earlier and further "
        "trials may be due to that"
    )


def recording_in(
    uri: str, tracker: Tracker, files: SweepFiles, sweep_id: str, experiment: str | None = None
) -> RecordingStatus | None:
    """Return the recording of a sweep at its start; None without MLflow. experiment: by default `experiment_name`."""
    if uri == NO_TRACKING:
        return None
    known = masked(uri)
    server = known.rstrip("/") if is_server(uri) else LOCAL_SERVER
    page = f"{server}/{tracker.address(sweep_id)}"
    elsewhere = "" if uri == embedded_tracking_uri(files.local_folder) else f" --tracking-uri {shlex.quote(known)}"
    command = f"dpsweep record {shlex.quote(files.root)}{elsewhere}"
    begun = RecordingStatus(store=known, page=page, experiment=experiment or experiment_name(), command=command)
    note_given(begun, sweep_id, files)
    return begun
