"""Runs a sweep: in one stage, with ``tune`` in two, or with ``--until`` with ever more seeds.

At look k, the intervals of all verdicts together have the level 1 - a_k with a_k = 0.05 * 6 / (pi^2 k^2). The a_k add
up to 0.05 over all looks there could be. So the probability of any wrong verdict at any look stays below 0.05, however
the number of looks was decided (alpha spending; a union bound). Every seed is trained and accounted as any other, and
the composed epsilon counts all of them. The decision to go on depends on results on test data alone.

Tuning: the candidates of every setting are trained first, as their own sweep in the folder ``tuning``. A private
selection trains them in the private folder, and the best of each trial is the trial itself. The winners are selected
by the scores of stored results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.encryption import KEY_VARIABLE, is_encrypting
from dpsweep.accounting.records.files import closed_to_strangers, delete_folder, exists
from dpsweep.accounting.records.local_files import make_private_folder
from dpsweep.orchestration.comparison.findings import Findings
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.comparison.stored import stored_findings, stored_record
from dpsweep.orchestration.execution.backends import plan_at
from dpsweep.orchestration.execution.environment import IN_PROCESS, open_cluster
from dpsweep.orchestration.execution.same_code import begun_with_other_code, refuse
from dpsweep.orchestration.execution.shared_connection import shared
from dpsweep.orchestration.execution.storage_checks import require_space
from dpsweep.orchestration.pipeline.stage import NO_DISPLAY, Display, Outcome, RunRequest, adds_nothing, run_stage
from dpsweep.orchestration.pipeline.winners import best_candidates, scores_of, selected_runs
from dpsweep.orchestration.store.layout import require_safe
from dpsweep.orchestration.store.limits import NO_LIMITS
from dpsweep.orchestration.store.ownership import exclusive
from dpsweep.orchestration.sweeps.grid import NO_PAST, settings_of
from dpsweep.orchestration.sweeps.manifest import Manifest, begun, grown, new_manifest, read_manifest, write_manifest
from dpsweep.orchestration.sweeps.planned import accept
from dpsweep.orchestration.sweeps.schema import SweepSpec, parse_sweep
from dpsweep.orchestration.sweeps.text import parse_text, with_section
from dpsweep.orchestration.sweeps.tune import Adapted, Winner, candidates_of
from dpsweep.orchestration.sweeps.tuning_stages import (
    draw_runs,
    next_candidates,
    selection_stage,
    tuned_stage,
    tuning_stage,
)
from dpsweep.orchestration.tracking.tracker import NO_TRACKING


def run_sweep(request: RunRequest, display: Display = NO_DISPLAY) -> Outcome:
    """Run a sweep until all its trials have ended; a folder that holds it, or an earlier version of it, is continued.

    With ``tune``, candidates are trained first, as their own sweep in the subfolder ``tuning``. A private selection
    trains them in the private folder, which only the best of each trial leaves. Trials with results keep them, and
    their files are not written again; ``display`` gets their number. A trial that fails does not end the run; the
    record lists it. Raises: InvalidInput, before any trial starts, for a trial that cannot run, and for a cluster,
    storage or MLflow that cannot be used. Also for a folder that holds a sweep of another name or that others can
    change.
    """
    require_safe(request.files)
    if request.most_seeds is not None:
        return run_until_told_apart(request, request.most_seeds, display)
    if request.sweep.tune is None or request.sweep.adapted is not None:
        return run_stage(request, display)
    if request.sweep.tune.is_selection:
        return run_private_selection(request, display)
    return run_tuning(request, display)


_GROWTH: Final = 1.5
"""Factor by which the number of seeds grows from look to look, since every look costs level."""
_FIRST: Final = 2
"""Least number of seeds of a look: one seed decides nothing."""


def run_until_told_apart(request: RunRequest, most: int, display: Display) -> Outcome:
    """Run the sweep with ever more seeds until every method can be told from the best in the main score.

    most: largest number of seeds. A folder that an earlier run of the same file left is continued at its look. Raises:
    InvalidInput as `run_sweep` and `require_room_for_seeds`.
    """
    require_room_for_seeds(request.sweep, most)
    with closed_to_strangers(), shared(request.connect) as connect:
        return _look_by_look(replace(request, connect=connect), most, display)


def require_room_for_seeds(sweep: SweepSpec, most: int) -> None:
    """Raise InvalidInput unless ``--until`` can add seeds to a sweep, up to ``most``.

    It cannot for fewer than two or than the sweep has, and for a private selection, whose seeds are drawn.
    """
    if sweep.tune is not None and sweep.tune.is_selection:
        raise InvalidInput("--until adds seeds, and a private selection draws its own; leave out one of them")
    if most < _FIRST or most < len(sweep.seeds):
        raise InvalidInput(
            f"--max-seeds is {most}, and the sweep starts with {max(_FIRST, len(sweep.seeds))} seeds; raise it"
        )


def _look_by_look(request: RunRequest, most: int, display: Display) -> Outcome:
    text, files = _begun(request) or _looking(request.text, _seeds(request.sweep.seeds, _FIRST), 1), request.files
    told: list[bool] = []

    def adds_trials(record: SweepRecord) -> bool:
        told.append(told_apart(stored_findings(files, record.data())))
        return not told[-1] and len(record.sweep.seeds) < most

    while True:
        asked = replace(request.of(text), most_seeds=None, adds_trials_after=adds_trials)
        outcome, spec = run_sweep(asked, display), asked.sweep
        seeds = len(spec.seeds)
        if outcome.adds_trials:
            more = more_seeds(seeds, most)
            display.warn(f"not told apart with {seeds} seeds: the sweep goes on to {more}, which costs privacy")
            request = replace(_after(outcome, request), retry=(), sources=())
            text = _looking(outcome.record.manifest.text, _seeds(spec.seeds, more), spec.compare.looks + 1)
            continue
        if told and told[-1]:
            display.warn(f"told apart with {seeds} seeds, at look {spec.compare.looks}")
        elif not outcome.stopped and not outcome.record.failed:
            display.warn(f"not told apart with {seeds} seeds, as many as --max-seeds allows")
        return outcome


def more_seeds(seeds: int, most: int) -> int:
    """Return the number of seeds of the look that follows one with ``seeds`` of them, at most ``most``."""
    return min(most, math.ceil(_GROWTH * seeds))


def told_apart(found: Findings) -> bool:
    """Return whether every other method differs from the best one in the main score."""
    best = found.best(found.main.name, found.methods)
    return best is not None and not found.undecided(best, found.main.name, found.methods)


def _begun(request: RunRequest) -> str | None:
    """Return the stored file that an earlier run of the same request has grown to; None if there is none."""
    stored = read_manifest(request.files)
    if stored is None:
        return None
    before = parse_sweep(stored.text)
    return stored.text if before.compare.looks and _asked(before) == _asked(request.sweep) else None


def _asked(sweep: SweepSpec) -> dict[str, object]:
    """Return the sweep without what looks add to it."""
    compare = sweep.compare.model_copy(update={"looks": 0})
    return sweep.model_copy(update={"seeds": (), "adapted": None, "compare": compare}).plain()


def _seeds(given: tuple[int, ...], count: int) -> list[int]:
    """Return the given seeds, and the smallest others, ``count`` together unless more are given."""
    others = (seed for seed in range(len(given) + count) if seed not in given)
    return [*given, *(next(others) for _ in range(count - len(given)))]


def _looking(text: str, seeds: list[int], look: int) -> str:
    """Return the sweep file with these seeds at this look."""
    grown = with_section(text, "seeds", seeds, "Seeds that --until told-apart added: written by dpsweep.")
    compare = parse_text(grown).get("compare") or {}
    return with_section(grown, "compare", {**compare, "looks": look}, "The look at which verdicts are reached.")


def run_tuning(request: RunRequest, display: Display) -> Outcome:
    """Train the candidates of every setting, then the best of each with the sweep's seeds.

    Where an earlier run of the same file has chosen, its choice is kept. The outcome is that of the tuning if a limit
    stopped it. Raises: as `run_sweep`.
    """
    if (winners := stored_winners(request)) is not None:
        _require_tuned_code(request)
        return _run_tuned(request, display, winners)
    with closed_to_strangers(), shared(request.connect) as connect:
        request = replace(request, connect=connect)
        tuning = _run_candidates(request, display)
        if tuning.stopped:
            return tuning
        return _run_tuned(_after(tuning, request), display, best_candidates(tuning.record))


def _after(stage: Outcome, request: RunRequest) -> RunRequest:
    """Return the request for the next stage: its limits are spent in part, and MLflow is left out if it did not answer
    `stage`.
    """
    lacking = stage.recording if stage.recording is not None and stage.recording.missing() else None
    if lacking is not None:  # of the candidates, and of what follows
        lacking = replace(lacking, command=lacking.command.replace(request.files.tuning, request.files.root))
    return replace(request, spent=stage.spent, unrecorded=lacking)


def _run_tuned(request: RunRequest, display: Display, winners: Mapping[str, Winner]) -> Outcome:
    """Train the best candidate of each setting with each of the sweep's seeds."""
    return run_stage(request.of(tuned_stage(request.text, winners)), display)


def _require_tuned_code(request: RunRequest) -> None:
    """Raise `InvalidInput` if the candidates that an earlier run chose among were trained with other code."""
    files = request.files.of_tuning
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
    stage = begun(read_manifest(files.of_tuning), tuning_stage(request.sweep, request.text))
    name = f"{request.name or request.sweep.name} (tuning)"  # in MLflow, beside the sweep itself
    while True:
        asked = replace(request.of(stage), output=files.tuning, retry=retry, name=name, adds_trials_after=adds_nothing)
        outcome = run_stage(asked, display)
        further = next_candidates(tune, asked.sweep.adapted or Adapted(), scores_of(outcome.record))
        if outcome.stopped or further is None:
            return outcome
        stage, retry = tuning_stage(request.sweep, request.text, further), ()
        request = _after(outcome, request)


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
    selected = request.of(tuned_stage(request.text, winners))
    sources = (files.selection,) if exists(files.of_selection.manifest) else ()
    outcome = run_stage(replace(selected, address=IN_PROCESS, sources=sources), display)
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
    candidates = replace(request.of(stage), output=files.selection, tracking_uri=NO_TRACKING)
    return selected_runs(run_stage(candidates, NO_DISPLAY).record, files.of_selection)


def _require_selection_options(request: RunRequest) -> None:
    """Raise `InvalidInput` for options that would end or repeat a private selection, or expose or encrypt its files."""
    refused = {
        "--max-hours, --max-gpu-hours, --max-trials and --stop-after-failures, which end a run early": request.limits
        != NO_LIMITS,
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

    A draw is stored before anything can depend on it: a run that refused large numbers, and then drew again, would have
    another law than the one that is accounted for.

    Raises: InvalidInput if the stored candidates belong to another version of the sweep, and for a lack of disk space.
    """
    files, sweep, tune = request.files, request.sweep, request.sweep.tune
    candidates = files.of_selection
    assert tune is not None, "only a sweep with tune has candidates"
    assert tune.selection is not None, "only a private selection draws candidates"
    if (before := read_manifest(candidates)) is not None:
        return _of_this_version(before, request)
    plan = accept(plan_at(request.address, sweep, request.code, NO_PAST, files), files)
    require_space(files, plan)
    make_private_folder(files.private)
    make_private_folder(candidates.root)
    with closed_to_strangers(), exclusive(candidates):
        if (of_another := read_manifest(candidates)) is not None:
            return _of_this_version(of_another, request)
        drawn = draw_runs(settings_of(sweep, tune), tune.selection, len(candidates_of(tune)))
        stage = selection_stage(sweep, request.text, drawn)
        write_manifest(candidates, new_manifest(parse_sweep(stage), stage))
    return stage


def _of_this_version(stored: Manifest, request: RunRequest) -> str:
    """Return the text of stored candidates. Raises: InvalidInput if they belong to another version of the sweep."""
    candidates = parse_sweep(stored.text)
    drawn = candidates.adapted.drawn if candidates.adapted else {}
    if parse_sweep(selection_stage(request.sweep, request.text, drawn)).plain() != candidates.plain():
        raise InvalidInput(
            f"{request.files.root} holds an unfinished private selection of another version of the sweep; restore its "
            "file, or choose another folder with --output"
        )
    return stored.text
