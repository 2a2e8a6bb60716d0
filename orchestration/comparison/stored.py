"""The record of a sweep, read from disk."""

from __future__ import annotations

import json

from accounting.errors import DataCorruption, InvalidInput
from accounting.records import exists, read_bytes, read_trace
from orchestration.comparison.record import SweepRecord, parse_failures
from orchestration.records.accounts import read_accounts
from orchestration.records.attempts import Attempt, read_attempts
from orchestration.records.integrity import stored_result
from orchestration.records.layout import SweepFiles
from orchestration.records.manifest import read_manifest
from orchestration.records.results import StoppedTrial, TrialResult
from orchestration.records.status import TrialStatus, status_of
from orchestration.sweeps.grid import GridPoint, grid
from orchestration.sweeps.old_names import names_of
from orchestration.sweeps.schema import parse_sweep
from workers.noise import noise_source_kind


def stored_record(files: SweepFiles) -> SweepRecord:
    """The sweep in a folder, with the result of every trial that is over.

    Raises: InvalidInput for a folder without a sweep, DataCorruption for a damaged manifest or result.
    """
    manifest = read_manifest(files)
    if manifest is None:
        raise InvalidInput(f"{files.root} holds no sweep; name the folder that `dpsweep run` wrote")
    sweep = parse_sweep(manifest.text, files.manifest)
    points = grid(sweep, names_of(manifest))
    found = (stored_result(files.trial(point.key)) for point in points)
    results = {result.key: status_of(result) for result in found if result is not None}
    attempts = {point.key: _attempts(files, point, results.get(point.key)) for point in points if point.is_private}
    accounts = {key: read_accounts(files.trial(key)) for key in results}
    return SweepRecord(manifest, sweep, points, {**_earlier_failures(files), **results}, attempts, accounts)


def _attempts(files: SweepFiles, point: GridPoint, status: TrialStatus | None) -> tuple[Attempt, ...]:
    """What the trial has released; of a version that kept no record of it, what its result says."""
    known, result = read_attempts(files, point.key), status.result if status else None
    if known or result is None:
        return known
    trace = result.trace if isinstance(result, StoppedTrial) else read_trace(files.trial(point.key).trace)
    seed = None if noise_source_kind(result.spec.noise_source).is_secret else result.spec.seed
    return (Attempt(point.key, 1, result.spec.delta, trace, seed, isinstance(result, TrialResult)),)


def _earlier_failures(files: SweepFiles) -> dict[str, TrialStatus]:
    """Trials that failed, according to results.json."""
    if not exists(files.results):
        return {}
    try:
        return parse_failures(json.loads(read_bytes(files.results)))
    except (ValueError, TypeError, KeyError) as error:
        raise DataCorruption(f"{files.results} is damaged; delete it; it will be written again") from error
