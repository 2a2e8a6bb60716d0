"""Check the stored files of a sweep, and delete the norms of its accounted trials."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records.arrow_parts import MANIFEST
from dpsweep.accounting.records.epsilon_files import verify_epsilons
from dpsweep.accounting.records.files import delete_folder, exists
from dpsweep.accounting.records.shards import delete_norms
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.comparison.claims import unfounded
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.comparison.stored import owned_record
from dpsweep.orchestration.records import report_digests
from dpsweep.orchestration.records.integrity import damages
from dpsweep.orchestration.records.layout import SweepFiles, require_no_links
from dpsweep.orchestration.records.ownership import claimed, exclusive
from dpsweep.orchestration.records.results import StoredResult, TrialResult
from dpsweep.orchestration.records.status_snapshot import read_snapshot

_READERS = 8
"""Trials read at the same time, in threads: hashing and reading release Python's global lock."""


def damaged_files(files: SweepFiles, record: SweepRecord) -> list[str]:
    """Return one line per damaged file of the trained trials, in the order of the grid, and of the trials of its
    tuning.

    Reads every file. If no file is damaged: one line per claim that is smaller than what its trace costs.
    """
    with ThreadPoolExecutor(_READERS) as readers:
        found = readers.map(lambda result: list(damages(files.trial(result.key), result)), trained(record))
        damaged = [line for lines in found for line in lines]
    own = damaged or list(unfounded(files, record))
    return [*own, *(line for tuning, candidates in tuning_of(files) for line in damaged_files(tuning, candidates))]


def damaged_reports(files: SweepFiles) -> list[str]:
    """Return one line for each damaged file of the report, and one for a damaged status, of a sweep that does not
    run.
    """
    found = list(report_digests.changed_report_files(files))
    try:
        read_snapshot(files.status)
    except DataCorruption as error:
        found.append(str(error))
    return [*found, *(line for tuning, _ in tuning_of(files) for line in damaged_reports(tuning))]


def tuning_of(files: SweepFiles) -> list[tuple[SweepFiles, SweepRecord]]:
    """Return the sweep of the tuning that is stored below a sweep, if there is one.

    Raises: as `owned_record`.
    """
    tuning = SweepFiles(files.tuning)
    return [(tuning, owned_record(tuning))] if exists(tuning.manifest) else []


def trained(record: SweepRecord) -> list[StoredResult]:
    """Return the results of the trials that were trained and accounted, to their end or up to where a scheduler stopped
    them.

    In the order of the grid.
    """
    results = (record.status(point.key).result for point in record.points)
    return [each for each in results if isinstance(each, TrialResult) or (each is not None and each.is_accounted)]


def prune_norms(files: SweepFiles, older_than: float) -> list[str]:
    """Delete the norm shards of every accounted trial that ended at least ``older_than`` seconds ago.

    Norms are deleted only if the stored epsilons are complete and undamaged, or if the trial is the best of a private
    selection, for which no individual epsilons are known. Returns: the keys of the trials whose norms were deleted.
    Raises: InvalidInput while the sweep runs; DataCorruption for damaged epsilons, and their norms are kept.
    """
    require_no_links(files)
    with exclusive(files.local_folder, files.root), claimed(files.claim):
        results = [each for each in trained(owned_record(files)) if each.ended <= time.time() - older_than]
        return [result.key for result in results if any(list(_deleted(files.trial(result.key))))]


def _deleted(trial: TrialFiles) -> Iterator[str]:
    """Delete the norms of one trial if its epsilons are stored; yield the deleted files."""
    if read_trace(trial.trace).selection is None:
        if not exists(f"{trial.epsilons}/{MANIFEST}"):
            return
        verify_epsilons(trial.epsilons)
    for folder in (trial.norms, trial.exact_norms):
        yield from delete_norms(folder)
    delete_folder(trial.rows_by_user)  # what an interrupted accounting of users left
