"""Tuning: the candidates of every setting are trained first, as their own sweep in the folder ``tuning``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dpsweep.accounting.records import closed_to_strangers, exists
from dpsweep.orchestration.comparison.stored import stored_record
from dpsweep.orchestration.comparison.winners import best_candidates, scores_of
from dpsweep.orchestration.execution.same_code import begun_with_other_code, refuse
from dpsweep.orchestration.execution.shared_connection import kept_open
from dpsweep.orchestration.pipeline.request import Display, Outcome, RunRequest
from dpsweep.orchestration.pipeline.stage import run_stage
from dpsweep.orchestration.records.layout import SweepFiles
from dpsweep.orchestration.records.manifest import read_manifest
from dpsweep.orchestration.sweeps.growth import begun, grown
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.search import next_candidates
from dpsweep.orchestration.sweeps.tune import Adapted, Winner
from dpsweep.orchestration.sweeps.tuning_stages import tuned_stage, tuning_stage


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


def _title(request: RunRequest) -> str:
    """Return the name of the tuning in MLflow, which tells it from the sweep itself."""
    return f"{request.name or request.sweep.name} (tuning)"


def _run_candidates(request: RunRequest, display: Display) -> Outcome:
    """Train the candidates of every setting, round by round if later candidates depend on scores."""
    files, tune = request.files, request.sweep.tune
    assert tune is not None, "only a sweep with tune has candidates"
    display.warn(f"tuning first, in {files.tuning}; then the best of each setting is trained in {files.root}")
    retry = tuple(word for word in request.retry if word in ("failed", "all"))  # keys name trials of the tuned stage
    stage = begun(read_manifest(SweepFiles(files.tuning)), tuning_stage(request.sweep, request.text))
    while True:
        sweep = parse_sweep(stage)
        outcome = run_stage(
            replace(request, sweep=sweep, text=stage, output=files.tuning, retry=retry, name=_title(request)), display
        )
        further = next_candidates(tune, sweep.adapted or Adapted(), scores_of(outcome.record))
        if outcome.stopped or further is None:
            return outcome
        stage, retry = tuning_stage(request.sweep, request.text, further), ()
