"""Delete the files of a sweep (trials, reports, MLflow store) or of some trials, but no other files in its folder."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.files import (
    delete,
    delete_folder,
    delete_if_empty,
    exists,
    list_files,
    list_folders,
    with_partials,
)
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.comparison.stored import stored_record
from dpsweep.orchestration.execution.storage_checks import abort_uploads
from dpsweep.orchestration.records.attempts import AttemptLog
from dpsweep.orchestration.records.layout import SweepFiles, absolute, require_no_links
from dpsweep.orchestration.records.ownership import claimed, exclusive
from dpsweep.orchestration.records.states import TrialState
from dpsweep.workers.machine.checkpoint import forget_checkpoint


def delete_sweep(files: SweepFiles) -> tuple[str, ...]:
    """Delete everything that the sweep and its tuning wrote, except the record of their releases in ``attempts/``.

    A later sweep in this folder counts these releases. ``sweep.json`` is deleted last, so that an interrupted deletion
    can be repeated. Returns: the keys of the trials whose releases stay recorded. Raises: InvalidInput for a folder
    without a sweep and while another process runs it, DataCorruption if the record of releases cannot be read,
    StorageError.
    """
    if not exists(files.manifest):
        raise InvalidInput(f"{files.root} holds no sweep; name the folder that `dpsweep run` wrote")
    require_no_links(files)
    with exclusive(files.local_folder, files.root), claimed(files.claim):
        record = stored_record(files)
        counted = _record_releases(files, record)
        if exists(SweepFiles(files.tuning).manifest):
            counted += delete_sweep(SweepFiles(files.tuning))
        delete_folder(files.selection)
        for uri in files.top_files:
            for each in with_partials(uri):
                delete(each)
        trials = [files.trial(point.key).root for point in record.points]
        for uri in (*trials, files.tune, files.artifacts):
            delete_folder(uri)
        for uri in (files.trials, files.private, str(files.local_folder / "private")):
            delete_if_empty(uri)
        for uri in with_partials(files.manifest):
            delete(uri)
    if "://" in files.root:
        delete(files.claim)
        delete_if_empty(files.root)
        abort_uploads(files.root)
    return counted


def forget_keys(folder: str) -> tuple[str, ...]:
    """Delete the checkpoints, and with them the noise keys, of all trials of a sweep, its tuning and its selection.

    Also what processes left that were killed while writing one, and parts of uploads that were cut off. Returns: the
    keys of these trials. A resumed sweep starts them again with other noise; what they have shown stays
    counted. Deleting is not erasing: backups, snapshots and the disk itself may keep the content of a file.

    Raises: InvalidInput for a folder without a sweep, and while another process runs it, and as `abort_uploads`;
    UnsafeFile for a link in it, with nothing deleted.
    """
    files = SweepFiles(absolute(folder))
    every = (files, SweepFiles(files.tuning), SweepFiles(files.selection))
    sweeps = [each for each in every if exists(each.manifest)]
    if not sweeps:
        raise InvalidInput(f"{files.root} holds no sweep; name the folder that `dpsweep run` wrote")
    require_no_links(files)
    forgotten: dict[str, None] = {}
    with contextlib.ExitStack() as held:
        for sweep in sweeps:
            held.enter_context(exclusive(sweep.local_folder, sweep.root))
            held.enter_context(claimed(sweep.claim))
        for sweep in sweeps:
            for key in list_folders(sweep.trials):
                if forget_checkpoint(sweep.trial(key).checkpoint):
                    forgotten[key] = None
    abort_uploads(files.root)
    return tuple(forgotten)


def named_trials(files: SweepFiles, which: Sequence[str]) -> tuple[str, ...]:
    """Return the keys of the trials that --retry names.

    which: ``failed``, ``all`` (trials that the sweep file asks for), or keys or unique prefixes of keys. Raises:
    InvalidInput for a name that fits no trial or several, DataCorruption.
    """
    record = stored_record(files)
    asked = [point.key for point in record.points if point.is_asked]
    return tuple(dict.fromkeys(key for name in which for key in _keys_named(name, asked, record, files)))


def start_anew(files: SweepFiles, keys: Sequence[str]) -> None:
    """Delete the stored files of trials, so that they are trained from nothing; their releases stay counted.

    Raises: DataCorruption, StorageError.
    """
    if keys:
        _record_releases(files, stored_record(files))
    for key in keys:
        delete_folder(files.trial(key).root)


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
