"""Tuning: the candidates of every setting are trained first, as their own sweep in the folder ``tuning``.

A private selection trains them in the private folder, and the best of each trial is the trial itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records import (
    KEY_VARIABLE,
    closed_to_strangers,
    delete_folder,
    exists,
    is_encrypting,
    make_private_folder,
)
from dpsweep.orchestration.comparison.stored import stored_record
from dpsweep.orchestration.comparison.winners import best_candidates, scores_of, selected_runs
from dpsweep.orchestration.execution.backends import plan_at, solver
from dpsweep.orchestration.execution.environment import IN_PROCESS, open_cluster
from dpsweep.orchestration.execution.same_code import begun_with_other_code, refuse
from dpsweep.orchestration.execution.shared_connection import kept_open
from dpsweep.orchestration.pipeline.request import NO_DISPLAY, Display, Outcome, RunRequest
from dpsweep.orchestration.pipeline.stage import run_stage
from dpsweep.orchestration.records.layout import SweepFiles
from dpsweep.orchestration.records.limits import NO_LIMITS
from dpsweep.orchestration.records.manifest import read_manifest
from dpsweep.orchestration.sweeps.grid import NO_PAST, settings_of
from dpsweep.orchestration.sweeps.growth import begun, grown
from dpsweep.orchestration.sweeps.planned import accept
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.search import next_candidates
from dpsweep.orchestration.sweeps.tune import Adapted, Winner, candidates_of
from dpsweep.orchestration.sweeps.tuning_stages import draw_runs, selection_stage, tuned_stage, tuning_stage
from dpsweep.orchestration.tracking.no_tracking import NO_TRACKING


def run_tuning(request: RunRequest, display: Display) -> Outcome:
    """Train the candidates of every setting, then the best of each with the sweep's seeds.

    Where an earlier run of the same file has chosen, its choice is kept. The outcome is that of the tuning if a limit
    stopped it. Raises: as `run_sweep`.
    """
    if (winners := stored_winners(request)) is not None:
        _require_tuned_code(request)
        return _run_tuned(request, display, winners)
    with closed_to_strangers(), kept_open():
        tuning = _run_candidates(request, display)
        return tuning if tuning.stopped else _run_tuned(request, display, best_candidates(tuning.record))


def _run_tuned(request: RunRequest, display: Display, winners: Mapping[str, Winner]) -> Outcome:
    """Train the best candidate of each setting with each of the sweep's seeds."""
    text = tuned_stage(request.text, winners)
    return run_stage(replace(request, sweep=parse_sweep(text), text=text), display)


def _require_tuned_code(request: RunRequest) -> None:
    """Raise `InvalidInput` if the candidates that an earlier run chose among were trained with other code."""
    files = SweepFiles(request.files.tuning)
    if exists(files.manifest):
        refuse(begun_with_other_code(files, stored_record(files).points, request.code), files)


def stored_winners(request: RunRequest) -> Mapping[str, Winner] | None:
    """Return the best candidates that an earlier run of the same sweep file chose; None if there was none."""
    files = request.files
    stored = read_manifest(files)
    if stored is None:
        return None
    grown(stored, request.sweep, request.text, files.root)  # refuse a folder of another sweep before training
    before = parse_sweep(stored.text, files.manifest)
    if before.adapted is None or before.plain() | {"adapted": None} != request.sweep.plain():
        return None
    return before.adapted.winners


def _run_candidates(request: RunRequest, display: Display) -> Outcome:
    """Train the candidates of every setting, round by round if later candidates depend on scores."""
    files, tune = request.files, request.sweep.tune
    assert tune is not None, "only a sweep with tune has candidates"
    display.warn(f"tuning first, in {files.tuning}; then the best of each setting is trained in {files.root}")
    retry = tuple(word for word in request.retry if word in ("failed", "all"))  # keys name trials of the tuned stage
    stage = begun(read_manifest(SweepFiles(files.tuning)), tuning_stage(request.sweep, request.text))
    name = f"{request.name or request.sweep.name} (tuning)"  # in MLflow, beside the sweep itself
    while True:
        sweep = parse_sweep(stage)
        asked = replace(request, sweep=sweep, text=stage, output=files.tuning, retry=retry, name=name)
        outcome = run_stage(asked, display)
        further = next_candidates(tune, sweep.adapted or Adapted(), scores_of(outcome.record))
        if outcome.stopped or further is None:
            return outcome
        stage, retry = tuning_stage(request.sweep, request.text, further), ()


def run_private_selection(request: RunRequest, display: Display) -> Outcome:
    """Train the candidates of every trial, whose number is secret where it is random, and keep the best as the trial.

    The candidates' folder is deleted at the end, because their number and all but the best are private.

    Raises: as `run_sweep`, and InvalidInput for options of a run that no private selection has.
    """
    files = request.files
    _require_selection_options(request)
    winners = stored_winners(request)
    if winners is None:
        winners = _select(request, display)
    text = tuned_stage(request.text, winners)
    sources = (files.selection,) if exists(SweepFiles(files.selection).manifest) else ()
    selected = replace(request, sweep=parse_sweep(text), text=text, address=IN_PROCESS, sources=sources)
    outcome = run_stage(selected, display)
    delete_folder(files.selection)
    return outcome


def _select(request: RunRequest, display: Display) -> Mapping[str, Winner]:
    """Train the candidates, which an earlier run may have begun, and choose the best of each trial.

    Raises: InvalidInput if the folder holds another version of the sweep, whose trials have been chosen.
    """
    files = request.files
    if exists(files.manifest):
        raise InvalidInput(
            f"{files.root} holds another version of this sweep, whose private selections cannot be added to; "
            "restore its file, or choose another folder with --output"
        )
    stage = _drawn_stage(request)
    if warning := open_cluster(request.address):
        display.warn(warning)
    display.warn("private selection first; how far it has come is private, because it tells how many were drawn")
    candidates = replace(
        request, sweep=parse_sweep(stage), text=stage, output=files.selection, tracking_uri=NO_TRACKING
    )
    return selected_runs(run_stage(candidates, NO_DISPLAY).record, SweepFiles(files.selection))


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
    """Return the sweep file of the candidates; the stored one if they were drawn before, so that none is drawn again.

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
    accept(plan_at(request.address, sweep, request.code, NO_PAST, solver(request.address, files)), files)
    make_private_folder(files.private)
    return selection_stage(
        sweep, request.text, draw_runs(settings_of(sweep, tune), tune.selection, len(candidates_of(tune)))
    )
