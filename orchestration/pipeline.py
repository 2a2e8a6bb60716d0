"""The composition root: runs a sweep from its file to its report.

sweep file -> plan -> trials under Ray Tune -> accounting as each trial ends -> results -> MLflow -> report
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from accounting.errors import DataCorruption, InvalidInput
from accounting.records import (
    KEY_VARIABLE,
    closed_to_strangers,
    delete_folder,
    exists,
    is_encrypting,
    make_private_file,
    make_private_folder,
)
from orchestration.comparison.record import SweepRecord
from orchestration.comparison.selected import selected_runs
from orchestration.comparison.stored import owned_record, stored_record
from orchestration.comparison.winners import best_candidates, scores_of
from orchestration.execution.backend import Opening, backend, opening, solver
from orchestration.execution.coordinator import Coordinator, initial_status
from orchestration.execution.disk_space import require_space
from orchestration.execution.environment import EMBEDDED, IN_PROCESS, open_cluster
from orchestration.execution.object_stores import require_answer, require_client
from orchestration.execution.removal import start_anew
from orchestration.execution.reuse import take_finished
from orchestration.execution.shared_connection import kept_open
from orchestration.execution.status_file import StatusFile, earlier_driver
from orchestration.execution.upkeep import damaged_files
from orchestration.records.layout import SweepFiles, absolute, output_files
from orchestration.records.limits import NO_LIMITS, NOTHING_SPENT, Limits
from orchestration.records.manifest import open_manifest, read_manifest, write_manifest
from orchestration.records.ownership import claimed, exclusive
from orchestration.records.release_modes import release_mode
from orchestration.records.status import SweepStatus, TrialStatus
from orchestration.report.catalogue import figures_for_mlflow
from orchestration.report.prose import headline
from orchestration.report.writing import write_reports
from orchestration.sweeps.grid import settings_of
from orchestration.sweeps.growth import begun, grown, past_of
from orchestration.sweeps.plan import Plan, accept, plan_sweep
from orchestration.sweeps.schema import SweepSpec, parse_sweep
from orchestration.sweeps.search import next_candidates
from orchestration.sweeps.selection import draw_runs, selection_stage
from orchestration.sweeps.tune import Adapted, Winner, candidates_of, tuned_stage, tuning_stage
from orchestration.tracking.addresses import is_server
from orchestration.tracking.embedded import embedded_tracking_uri, stored_tracking_uri
from orchestration.tracking.mlflow import MlflowTracker
from orchestration.tracking.no_tracking import NO_TRACKING, NoTracker
from orchestration.tracking.protocol import Tracker, TrackingUnavailable, tracked
from workers.imports import NO_CODE, UserCode


@dataclass(frozen=True)
class Outcome:
    """The record of a run, its files and its MLflow store, which may be `NO_TRACKING`.

    seconds: duration of the run. stopped: the limit that ended the run early, else None. address: of the comparison of
    trials, relative to MLflow's own; "" if none was written.
    """

    record: SweepRecord
    files: SweepFiles
    tracking_uri: str
    seconds: float
    stopped: str | None = None
    address: str = ""


@dataclass(frozen=True)
class RunRequest:
    """A sweep to run, and where.

    text: content of the sweep file. output: folder or URI; None for runs/NAME. address: ``--address``. tracking_uri:
    None for the SQLite store in the sweep's folder, `NO_TRACKING` for none. code: the user's own modules that may be
    imported. limits: when the run stops early. retry: trials to start anew: ``failed``, ``all``, keys or unique
    prefixes of keys; ignored by a driver that its job has restarted, which continues within the same limits. sources:
    folders of sweeps whose finished trials are copied instead of training them.
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

    @property
    def files(self) -> SweepFiles:
        """Paths of the files of the sweep."""
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


def run_sweep(request: RunRequest, display: Display = NO_DISPLAY) -> Outcome:
    """Run a sweep until all its trials have ended; a folder that holds it, or an earlier version of it, is continued.

    With ``tune``, candidates are trained first, as a sweep of their own in the subfolder ``tuning``; those of a private
    selection in the private folder, which only the best of each trial leaves. Trials with results keep them, and their
    files are not written again; ``display`` is told their number. A trial that fails does not end the run; the record
    lists it. Raises: InvalidInput, before any trial starts, for a trial that cannot run, a folder that holds a sweep of
    another name, and a cluster, storage or MLflow that cannot be used.
    """
    if request.sweep.tune is None or request.sweep.adapted is not None:
        return _run(request, display)
    if request.sweep.tune.is_selection:
        return _run_selected(request, display)
    if (winners := _stored_winners(request)) is not None:
        return _run_tuned(request, display, winners)
    with closed_to_strangers(), kept_open():
        tuning = _tuning(request, display)
        return tuning if tuning.stopped else _run_tuned(request, display, best_candidates(tuning.record))


def _run_tuned(request: RunRequest, display: Display, winners: Mapping[str, Winner]) -> Outcome:
    """Train the best candidate of each setting with each of the sweep's seeds."""
    text = tuned_stage(request.text, winners)
    return _run(replace(request, sweep=parse_sweep(text), text=text), display)


def _stored_winners(request: RunRequest) -> Mapping[str, Winner] | None:
    """The best candidates that an earlier run of the same sweep file chose; None if there was none."""
    files = request.files
    stored = read_manifest(files)
    if stored is None:
        return None
    grown(stored, request.sweep, request.text, files.root)  # refuse a folder of another sweep before training
    before = parse_sweep(stored.text, files.manifest)
    if before.adapted is None or before.plain() | {"adapted": None} != request.sweep.plain():
        return None
    return before.adapted.winners


def _tuning(request: RunRequest, display: Display) -> Outcome:
    """Train the candidates of every setting, round by round if later candidates depend on scores."""
    files, tune = request.files, request.sweep.tune
    assert tune is not None, "only a sweep with tune has candidates"
    display.warn(f"tuning first, in {files.tuning}; then the best of each setting is trained in {files.root}")
    retry = tuple(word for word in request.retry if word in ("failed", "all"))  # keys name trials of the tuned stage
    stage = begun(read_manifest(SweepFiles(files.tuning)), tuning_stage(request.sweep, request.text))
    while True:
        sweep = parse_sweep(stage)
        outcome = _run(replace(request, sweep=sweep, text=stage, output=files.tuning, retry=retry), display)
        further = next_candidates(tune, sweep.adapted or Adapted(), scores_of(outcome.record))
        if outcome.stopped or further is None:
            return outcome
        stage, retry = tuning_stage(request.sweep, request.text, further), ()


def _run_selected(request: RunRequest, display: Display) -> Outcome:
    """Train a secret random number of candidates for every trial, and keep the best of each as the trial itself.

    Their folder is deleted at the end, because the number of candidates and all but the best are private.
    """
    files = request.files
    _require_selection_options(request)
    winners = _stored_winners(request)
    if winners is None:
        if exists(files.manifest):
            raise InvalidInput(
                f"{files.root} holds another version of this sweep, whose private selections cannot be added to; "
                "restore its file, or choose another folder with --output"
            )
        stage = _drawn_stage(request)
        if warning := open_cluster(request.address):
            display.warn(warning)
        display.warn("private selection first; how far it has come is private, because it tells how many were drawn")
        stage_request = replace(
            request, sweep=parse_sweep(stage), text=stage, output=files.selection, tracking_uri=NO_TRACKING
        )
        winners = selected_runs(_run(stage_request, NO_DISPLAY).record, SweepFiles(files.selection))
    text = tuned_stage(request.text, winners)
    sources = (files.selection,) if exists(SweepFiles(files.selection).manifest) else ()
    selected = replace(request, sweep=parse_sweep(text), text=text, address=IN_PROCESS, sources=sources)
    outcome = _run(selected, display)
    delete_folder(files.selection)
    return outcome


def _require_selection_options(request: RunRequest) -> None:
    """Raise `InvalidInput` for options that would end or repeat a private selection, or expose or encrypt its files."""
    refused = {
        "--max-hours, --max-trials and --max-failures, which end a run early": request.limits != NO_LIMITS,
        "--retry, which would train a selected trial again": bool(request.retry),
        "--from": bool(request.sources),
        "an object store, whose folders have no modes; give a local --output": "://" in request.files.root,
        f"{KEY_VARIABLE}, as candidates are stored like the trials of a sweep": is_encrypting(),
    }
    for what, given in refused.items():
        if given:
            raise InvalidInput(f"a private selection goes without {what}; leave it out")


def _drawn_stage(request: RunRequest) -> str:
    """The sweep file of the candidates; the stored one if they were drawn before, so that none is drawn again.

    Raises: InvalidInput if the stored candidates belong to another version of the sweep.
    """
    files, sweep, tune = request.files, request.sweep, request.sweep.tune
    assert tune is not None, "only a sweep with tune has candidates"
    assert tune.selection is not None, "only a private selection draws candidates"
    before = read_manifest(SweepFiles(files.selection))
    if before is not None:
        stored = parse_sweep(before.text)
        drawn = stored.adapted.drawn if stored.adapted else {}
        if parse_sweep(selection_stage(sweep, request.text, drawn)).plain() != stored.plain():
            raise InvalidInput(
                f"{files.root} holds an unfinished private selection of another version of the sweep; restore its "
                "file, or choose another folder with --output"
            )
        return before.text
    accept(plan_sweep(sweep, request.code, solver=solver(request.address, files)), files)
    make_private_folder(Path(files.private))
    return selection_stage(
        sweep, request.text, draw_runs(settings_of(sweep, tune), tune.selection, len(candidates_of(tune)))
    )


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


def _run(request: RunRequest, display: Display) -> Outcome:
    sweep, files = request.sweep, request.files
    request.limits.require_use(max(each.gpus for each in sweep.resources))
    require_answer(files.root)
    tracking_uri = request.tracking_uri or embedded_tracking_uri(files.local_folder)
    if tracking_uri != NO_TRACKING and not is_server(tracking_uri):
        require_client(files.artifacts)
    is_continued = exists(files.manifest)
    manifest = grown(open_manifest(files, sweep.plain(), request.text), sweep, request.text, files.root)
    plan = accept(plan_sweep(sweep, request.code, past_of(manifest), solver(request.address, files)), files)
    manifest = replace(manifest, calibrations={**manifest.calibrations, **plan.calibrations})
    require_space(files, plan)
    for warning in filter(None, (*plan.warnings, open_cluster(request.address))):
        display.warn(warning)
    earlier = earlier_driver(files.status)
    spent = earlier.spent if earlier else NOTHING_SPENT
    gpus = {planned.key: sweep.reserved(planned.spec).gpus for planned in plan.trials}
    status = SweepStatus(initial_status(plan), display.ended, request.limits, gpus, spent)
    with (
        closed_to_strangers(),
        exclusive(files.local_folder),
        claimed(files.claim),
        _backend(request, plan, files)(request.address, sweep, files, request.code, display.warn) as execution,
    ):
        if release_mode(sweep.disclosure).is_sensitive:
            make_private_folder(files.local_folder)
            if request.tracking_uri is None:
                make_private_file(Path(tracking_uri.removeprefix("sqlite:///")))  # SQLite's journals take its mode
        tracker = _tracker(tracking_uri, files)
        write_manifest(files, manifest)
        anew = start_anew(files, request.retry) if request.retry and earlier is None else ()
        for key in anew:
            display.warn(f"trial {key} starts anew; what it has released stays counted")
        for source in request.sources:
            taken = take_finished(files, plan.trials, sweep, manifest, source)
            display.warn(f"{len(taken)} finished trials are taken from {source}")
        _require_selected(sweep, plan, files)
        current = StatusFile(
            files.status,
            sweep.name,
            manifest.sweep_id,
            sweep.disclosure,
            status,
            execution.cluster,
            display.warn,
            execution.show,
        ).kept_current()
        with (
            current,
            Coordinator(
                sweep,
                plan,
                manifest,
                files,
                tracker,
                status,
                execution.scatter,
                execution.close,
                execution.trials_at_once,
                anew,
                display.warn,
            ) as coordinator,
            display.watching(status),
        ):
            if is_continued:
                display.warn(_continuation_warning(status, files, coordinator.no_longer_asked))
            execution.train(coordinator.pending(), coordinator, manifest.sweep_id)
            record = coordinator.finish()
        if status.stopped_by:
            display.warn(f"stopped early: {status.stopped_by}")
        if coordinator.tracking_failure:
            display.warn(f"{coordinator.tracking_failure}; the same command records what is missing")
    return Outcome(record, files, tracking_uri, status.elapsed, status.stopped_by, tracker.address)


def _backend(request: RunRequest, plan: Plan, files: SweepFiles) -> Opening:
    return opening(request.address) if request.retry else backend(request.address, plan, files)


def _continuation_warning(status: SweepStatus, files: SweepFiles, no_longer_asked: int) -> str:
    kept = sum(trial.result is not None for trial in status.trials)
    former = f"; {no_longer_asked} trials that its file no longer asks for are kept too" if no_longer_asked else ""
    return (
        f"{files.root} holds this sweep, which is continued; {kept} of {len(status.trials)} trials have results and "
        f"keep them; to train these anew, choose another folder with --output{former}"
    )


def _tracker(uri: str, files: SweepFiles) -> Tracker:
    try:
        return NoTracker() if uri == NO_TRACKING else MlflowTracker(uri, artifact_root=files.artifacts)
    except TrackingUnavailable as error:
        raise InvalidInput(f"{error}; nothing was started") from error


def show_accounts(folder: str, tracking_uri: str | None = None) -> None:
    """Write the reports of a sweep again, with the results of `dpsweep account`; under ``release: raw``, MLflow too.

    tracking_uri: None for the SQLite store in the sweep's folder. Raises: StorageError, TrackingUnavailable, and
    InvalidInput if MLflow cannot be opened.
    """
    files = SweepFiles(absolute(folder))
    record = stored_record(files)
    page, found = write_reports(files, record)
    if not release_mode(record.disclosure).is_sensitive:
        return
    tracker, data = _tracker(tracking_uri or embedded_tracking_uri(files.local_folder), files), record.data()
    tracker.open_sweep(tracked(record, files))
    for trial in data.trials:
        tracker.log_trial(trial)
    tracker.log_report(page, data, figures_for_mlflow(data))
    tracker.log_comparison(found, headline(data, found))
    tracker.close("FAILED" if record.failed else "FINISHED")


def render_again(folder: str) -> Outcome:
    """Verify every file of the trained trials of a sweep, and write its reports again.

    Every epsilon is recomputed from the stored trace, because checksums detect damage but not tampering.

    Raises: InvalidInput if the folder holds no sweep, or one with another encryption key; DataCorruption with one line
    per damaged file and per claim smaller than what its trace costs; no report is written then.
    """
    files = SweepFiles(absolute(folder))
    record = owned_record(files)
    wrong = damaged_files(files, record)
    if wrong:
        raise DataCorruption("\n".join(wrong))
    write_reports(files, record)
    return Outcome(record, files, stored_tracking_uri(files.local_folder), 0.0)
