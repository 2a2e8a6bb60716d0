"""Check the stored files of a sweep; delete norms of accounted trials, or all files of the sweep or of some trials.

Other files in its folder are left alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.records.arrow_parts import MANIFEST
from dpsweep.accounting.records.epsilon_files import verify_epsilons
from dpsweep.accounting.records.files import (
    delete,
    delete_folder,
    delete_if_empty,
    exists,
    list_files,
    list_folders,
    with_partials,
)
from dpsweep.accounting.records.shards import delete_norms
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.comparison.claims import unfounded
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.comparison.stored import owned_record, stored_record
from dpsweep.orchestration.execution.storage_checks import abort_uploads
from dpsweep.orchestration.store import integrity
from dpsweep.orchestration.store.attempts import AttemptLog
from dpsweep.orchestration.store.integrity import damages
from dpsweep.orchestration.store.layout import SweepFiles, no_sweep, require_no_links, sweep_at, with_candidates
from dpsweep.orchestration.store.ownership import exclusive
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.results import StoredResult, TrialResult
from dpsweep.orchestration.store.status_snapshot import read_snapshot
from dpsweep.workers.machine.checkpoint import forget_checkpoint

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
    found = list(integrity.changed_report_files(files))
    try:
        read_snapshot(files.status)
    except DataCorruption as error:
        found.append(str(error))
    return [*found, *(line for tuning, _ in tuning_of(files) for line in damaged_reports(tuning))]


def tuning_of(files: SweepFiles) -> list[tuple[SweepFiles, SweepRecord]]:
    """Return the sweep of the tuning that is stored below a sweep, if there is one.

    Raises: as `owned_record`.
    """
    tuning = files.of_tuning
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
    with exclusive(files):
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


def delete_sweep(files: SweepFiles) -> tuple[str, ...]:
    """Delete everything that the sweep and its tuning wrote, except the record of their releases in ``attempts/``.

    Also what was `left_before_it_began`. A later sweep in this folder counts these releases. ``sweep.json`` is deleted
    last, so that an interrupted deletion can be repeated. Returns: the keys of the trials whose releases stay recorded.
    Raises: InvalidInput for a folder without a sweep and while another process runs it, DataCorruption if the record of
    releases cannot be read, StorageError.
    """
    if exists(files.manifest):
        return _delete_whole(files)
    if not left_before_it_began(files):
        raise no_sweep(files)
    require_no_links(files)
    counted = _delete_whole(files.of_tuning) if exists(files.of_tuning.manifest) else ()
    if exists(files.of_selection.manifest):
        _delete_selection(files)
    for stage in (files.of_tuning, files):
        if exists(stage.error):
            with exclusive(stage):
                _delete_error(stage)
    if "://" not in files.root:
        delete_if_empty(files.root)
    return counted


def left_before_it_began(files: SweepFiles) -> str:
    """Return what lies in a folder whose sweep has not begun, in words; "" if there is nothing of one."""
    if exists(files.of_tuning.manifest):
        return f"the unfinished tuning in {files.root}"
    if exists(files.of_selection.manifest):
        return f"the unfinished private selection in {files.root}"
    is_refused = exists(files.error) or exists(files.of_tuning.error)
    return f"the errors of a refused plan in {files.root}" if is_refused else ""


def _delete_error(files: SweepFiles) -> None:
    for each in with_partials(files.error):
        delete(each)
    delete_if_empty(str(files.local_folder / "private"))


def _delete_whole(files: SweepFiles) -> tuple[str, ...]:
    require_no_links(files)
    with exclusive(files):
        record = stored_record(files)
        counted = _record_releases(files, record)
        if exists(files.of_tuning.manifest):
            counted += _delete_whole(files.of_tuning)
        delete_folder(files.selection)
        for uri in files.top_files:
            for each in with_partials(uri):
                delete(each)
        keys = [point.key for point in record.points]
        left_by_kills = (files.audited_copy, files.all_given, files.pages)
        for uri in (*files.folders_of(keys), files.tune, files.artifacts, *left_by_kills):
            delete_folder(uri)
        for uri in (files.trials, files.every_audit, files.private, str(files.local_folder / "private")):
            delete_if_empty(uri)
        for uri in with_partials(files.manifest):
            delete(uri)
    if "://" in files.root:
        delete(files.claim)
        delete_if_empty(files.root)
        abort_uploads(files.root)
    return counted


def _delete_selection(files: SweepFiles) -> None:
    """Delete a private selection that no sweep has followed: it has shown nothing, so that no release stays."""
    with exclusive(files.of_selection):
        pass  # no run holds it; the lock lies in the folder that goes
    delete_folder(files.selection)
    delete_if_empty(files.private)


def forget_keys(folder: str) -> tuple[str, ...]:
    """Delete the checkpoints, and with them the noise keys, of all trials of a sweep, its tuning and its selection.

    Also what processes left that were killed while writing one, and parts of uploads that were cut off. Returns: the
    keys of these trials. A resumed sweep starts them again with other noise; what they have shown stays
    counted. Deleting is not erasing: backups, snapshots and the disk itself may keep the content of a file.

    Raises: InvalidInput for a folder without a sweep, and while another process runs it, and as `abort_uploads`;
    UnsafeFile for a link in it, with nothing deleted.
    """
    files = sweep_at(folder)
    sweeps = [each for each in with_candidates(files) if exists(each.manifest)]
    if not sweeps:
        raise no_sweep(files)
    require_no_links(files)
    forgotten: dict[str, None] = {}
    with contextlib.ExitStack() as held:
        for sweep in sweeps:
            held.enter_context(exclusive(sweep))
        for sweep in sweeps:
            delete_folder(sweep.audited_copy)  # a killed audit leaves it, with a key of its own
            for key in list_folders(sweep.trials):
                if forget_checkpoint(sweep.trial(key).checkpoint):
                    forgotten[key] = None
    abort_uploads(files.root)
    return tuple(forgotten)


def named_trials(files: SweepFiles, which: Sequence[str]) -> dict[str, list[str]]:
    """Return the keys of the trials that --retry names, by each of its words; of failed and all there may be none.

    which: ``failed``, ``all`` (trials that the sweep file asks for), or keys or unique prefixes of keys. Raises:
    InvalidInput for a name that fits no trial or several, DataCorruption.
    """
    if not which:
        return {}
    record = stored_record(files)
    asked = [point.key for point in record.points if point.is_asked]
    return {name: _keys_named(name, asked, record, files) for name in which}


def start_anew(files: SweepFiles, keys: Sequence[str]) -> None:
    """Delete the stored files of trials and their audits, so that they are trained from nothing; releases stay counted.

    Raises: DataCorruption, StorageError.
    """
    if keys:
        _record_releases(files, stored_record(files))
    for uri in files.folders_of(keys):
        delete_folder(uri)


def _keys_named(name: str, asked: Sequence[str], record: SweepRecord, files: SweepFiles) -> list[str]:
    if name == "all":
        return [key for key in asked if list_files(files.trial(key).root)]
    if name == "failed":
        return [key for key in asked if _has_failed(key, record, files)]
    found = [key for key in asked if key == name] or [key for key in asked if key.startswith(name)]
    if len(found) != 1:
        some = ", ".join(found or asked[:5])
        fits = f"fits {len(found)} trials" if found else "is no trial of the sweep"
        raise InvalidInput(f"--retry {name!r} {fits}; give failed, all, or one of: {some}")
    return found


def _has_failed(key: str, record: SweepRecord, files: SweepFiles) -> bool:
    """Return whether the trial failed, by results.json or, if the run was interrupted before writing it, by its
    error file.
    """
    status = record.status(key)
    return status.result is None and (status.state is TrialState.FAILED or exists(files.trial(key).error))


def remains(files: SweepFiles) -> tuple[str, ...]:
    """Return the files that are left in the folder of a deleted sweep and not its own, relative to the folder."""
    own = ("attempts/", ".lock", "tuning/attempts/", "tuning/.lock")
    return tuple(name for name in list_files(files.root) if not name.startswith(own))


def _record_releases(files: SweepFiles, record: SweepRecord) -> tuple[str, ...]:
    """Return the trials that have released something, after recording releases that have no record yet."""
    log = AttemptLog(files, record.attempts)
    for key, attempts in record.attempts.items():
        if not log.all[key]:
            for attempt in attempts:
                log.note(attempt)
    return tuple(key for key, attempts in log.all.items() if attempts)
