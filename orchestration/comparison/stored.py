"""The record of a sweep, read from disk."""

from __future__ import annotations

import json

from accounting.errors import DataCorruption, InvalidInput
from accounting.records.files import exists, read_bytes
from orchestration.comparison.record import SweepRecord, parse_failures
from orchestration.records.integrity import stored_result
from orchestration.records.layout import SweepFiles
from orchestration.records.manifest import read_manifest
from orchestration.records.status import TrialStatus, status_of
from orchestration.sweeps.grid import grid
from orchestration.sweeps.schema import parse_sweep


def stored_record(files: SweepFiles) -> SweepRecord:
    """The sweep in a folder, with the result of every trial that is over.

    Raises: InvalidInput for a folder without a sweep, DataCorruption for a damaged manifest or result.
    """
    manifest = read_manifest(files)
    if manifest is None:
        raise InvalidInput(f"{files.root} holds no sweep; name the folder that `dpsweep run` wrote")
    sweep = parse_sweep(manifest.text, files.manifest)
    points = grid(sweep)
    found = (stored_result(files.trial(point.key)) for point in points)
    results = {result.key: status_of(result) for result in found if result is not None}
    return SweepRecord(manifest, sweep, points, {**_earlier_failures(files), **results})


def _earlier_failures(files: SweepFiles) -> dict[str, TrialStatus]:
    """Trials that failed, according to results.json."""
    if not exists(files.results):
        return {}
    try:
        return parse_failures(json.loads(read_bytes(files.results)))
    except (ValueError, TypeError, KeyError) as error:
        raise DataCorruption(f"{files.results} is damaged; delete it; it will be written again") from error
