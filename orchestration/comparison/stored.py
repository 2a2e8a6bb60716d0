"""The record of a sweep, read from disk."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from dpsweep.accounting.errors import START_ANEW, DataCorruption
from dpsweep.accounting.records.encryption import is_encrypting, require_key
from dpsweep.accounting.records.files import exists, is_closed, read_bytes
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.records.traces import read_trace
from dpsweep.orchestration.comparison.evidence import Evidence, gather
from dpsweep.orchestration.comparison.findings import Findings, findings, of_trials
from dpsweep.orchestration.comparison.record import SweepRecord, parse_failures
from dpsweep.orchestration.store.attempts import Attempt, read_attempts
from dpsweep.orchestration.store.later_results import read_accounts, read_audits
from dpsweep.orchestration.store.layout import SweepFiles, no_sweep
from dpsweep.orchestration.store.published import PublishedQuality, PublishedSweep, TrialState
from dpsweep.orchestration.store.results import StoppedTrial, TrialResult, read_result_of
from dpsweep.orchestration.store.status import TrialStatus, status_of
from dpsweep.orchestration.sweeps.grid import GridPoint, grid
from dpsweep.orchestration.sweeps.manifest import Manifest, past_of, read_manifest
from dpsweep.orchestration.sweeps.schema import SweepSpec, parse_sweep
from dpsweep.workers.evaluation.outcomes import AnyOutcomes, ScoredOutcomes, read_outcomes


def stored_record(files: SweepFiles) -> SweepRecord:
    """Return the sweep in a folder, with the result of every trial that is over.

    Raises: InvalidInput for a folder without a sweep, DataCorruption for a damaged manifest or result.
    """
    manifest = read_manifest(files)
    if manifest is None:
        raise no_sweep(files)
    sweep = parse_sweep(manifest.text, files.manifest)
    points = [each for each in grid(sweep, past_of(manifest)) if each.is_asked or _is_there(files, each.key)]
    found = _read(files, points, manifest, sweep)
    statuses = {**_earlier_failures(files), **found.statuses}
    return replace(found, statuses=statuses, candidates=candidate_attempts(files, sweep))


def stored_trials(files: SweepFiles, points: Iterable[GridPoint], manifest: Manifest, sweep: SweepSpec) -> SweepRecord:
    """Return the record of those trials that are stored. Raises: DataCorruption for a damaged result."""
    return _read(files, [point for point in points if _is_there(files, point.key)], manifest, sweep)


def _is_there(files: SweepFiles, key: str) -> bool:
    return exists(files.trial(key).spec) or exists(files.trial(key).result) or bool(read_attempts(files, key))


def _read(files: SweepFiles, points: Sequence[GridPoint], manifest: Manifest, sweep: SweepSpec) -> SweepRecord:
    """Return the results of trials that are over, and the releases of private ones.

    Without results of `dpsweep account` and `dpsweep audit` if they are encrypted and this process has no key, or if
    they are another user's.
    """
    found = (read_result_of(point.key, files.trial(point.key).result) for point in points)
    results = {result.key: status_of(result) for result in found if result is not None}
    attempts = {point.key: _attempts(files, point, results.get(point.key)) for point in points if point.is_private}
    has_key = manifest.key_check is None or is_encrypting()  # else private files cannot be read
    open_keys = [key for key in results if has_key and not is_closed(files.trial(key).private)]
    accounts = {key: read_accounts(files.trial(key)) for key in open_keys}
    audits = {key: read_audits(files, key) for key in open_keys} if not is_closed(files.private) else {}
    return SweepRecord(manifest, sweep, tuple(points), results, attempts, accounts, audits=audits)


def owned_record(files: SweepFiles) -> SweepRecord:
    """Return `stored_record` for callers that read or write the sweep's private files.

    Raises: as `stored_record`; InvalidInput if this process does not have the sweep's key.
    """
    record = stored_record(files)
    require_key(record.manifest.key_check, f"the sweep in {files.root}")
    return record


def stored_evidence(files: SweepFiles, data: PublishedSweep) -> Evidence:
    """Return the resampled outcomes of finished trials on their test examples; empty where none are stored.

    Raises: DataCorruption for a damaged file.
    """
    finished = [trial for trial in data.trials if trial.state is TrialState.FINISHED]
    found: dict[str, AnyOutcomes] = {}
    for trial in finished:
        if (outcomes := read_outcomes(uri := files.trial(trial.key).outcomes)) is None:
            continue
        if trial.quality is None or not _fit(outcomes, trial.quality):
            raise DataCorruption(f"{uri} is of another trial; restore it from a backup, or {START_ANEW}")
        found[trial.key] = outcomes
    return gather(finished, found)


def _fit(outcomes: AnyOutcomes, quality: PublishedQuality) -> bool:
    """Return whether outcomes are of the task, the classes and groups that a result shows."""
    counts = quality.counts
    is_of_task = (
        outcomes.task == quality.task
        if isinstance(outcomes, ScoredOutcomes)
        else counts is None or len(counts.matrix) == outcomes.num_classes
    )
    return is_of_task and {group.name for group in quality.groups} <= {*outcomes.group_names}


def stored_findings(files: SweepFiles, data: PublishedSweep) -> Findings:
    """Return the finished settings of a stored sweep, compared by `stored_evidence`. Raises: as it."""
    return findings(data, stored_evidence(files, data))


def candidate_attempts(files: SweepFiles, sweep: SweepSpec) -> dict[str, tuple[Attempt, ...]]:
    """Return releases of the candidates of an unaccounted tuning, which trained on the sweep's own records, by setting.

    Empty for other sweeps, and if the folder of the tuning was deleted. Raises: DataCorruption for a damaged result.
    """
    tuned = files.of_tuning
    chosen = sweep.adapted is not None and not sweep.adapted.candidates
    if sweep.tune is None or sweep.tune.privacy != "unaccounted" or not chosen or not exists(tuned.manifest):
        return {}
    record = stored_record(tuned)
    found: dict[str, tuple[Attempt, ...]] = {}
    for point in record.points:
        found[point.setting] = (*found.get(point.setting, ()), *record.attempts.get(point.key, ()))
    return found


def stored_settings(files: SweepFiles) -> dict[str, dict[str, Any]]:
    """Return, by the key of each finished trial, its setting with the intervals computed when the sweep ended.

    Public, like the report, so no key is needed. Empty before a sweep has ended. Raises: DataCorruption for a damaged
    file.
    """
    if not exists(files.comparison):
        return {}
    try:
        return of_trials(parsed_json(read_bytes(files.comparison)))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataCorruption(
            f"{files.comparison} is damaged; delete it, and `dpsweep report {shlex.quote(files.root)}` writes it again"
        ) from error


def _attempts(files: SweepFiles, point: GridPoint, status: TrialStatus | None) -> tuple[Attempt, ...]:
    """Return the attempts at a trial; for a trial of a version without attempt records, one attempt made from its
    result.
    """
    known, result = read_attempts(files, point.key), status.result if status else None
    if known or result is None:
        return known
    trace = result.trace if isinstance(result, StoppedTrial) else read_trace(files.trial(point.key).trace)
    found = Attempt(point.key, 1, result.spec.delta, trace, result.spec.known_seed, isinstance(result, TrialResult))
    return (replace(found, reasons=result.reasons, folder=files.root),)


def _earlier_failures(files: SweepFiles) -> dict[str, TrialStatus]:
    """Return the trials that failed, according to results.json."""
    if not exists(files.results):
        return {}
    try:
        return parse_failures(parsed_json(read_bytes(files.results)))
    except (ValueError, TypeError, KeyError) as error:
        raise DataCorruption(f"{files.results} is damaged; delete it; it will be written again") from error
