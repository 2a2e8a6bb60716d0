"""Take finished trials from another sweep instead of training them, so that an equal trial costs privacy once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.records.files import (
    exists,
    list_files,
    read_bytes,
    write_bytes_atomically,
    write_in_private_folder,
)
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.comparison.claims import unfounded
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.comparison.stored import owned_record
from dpsweep.orchestration.store.attempts import adopt_attempts
from dpsweep.orchestration.store.integrity import damages, met_other_data
from dpsweep.orchestration.store.layout import SweepFiles, sweep_at
from dpsweep.orchestration.store.release_modes import release_mode
from dpsweep.orchestration.store.results import TrialResult
from dpsweep.orchestration.sweeps.manifest import Manifest
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.own_code.imports import NO_CODE, UserCode
from dpsweep.workers.own_code.own_record import require_same_code


def take_finished(
    files: SweepFiles,
    planned: Iterable[PlannedTrial],
    sweep: SweepSpec,
    manifest: Manifest,
    folder: str,
    code: UserCode = NO_CODE,
) -> tuple[str, ...]:
    """Copy the finished trials in ``folder`` that ``sweep`` asks for and has not begun; return their keys.

    Their releases count as releases of this sweep. Trials of old versions that stored no fingerprint of the data, or
    have other keys, are not copied. `code`: the user's own, as further trials run it. Raises, before anything is
    copied: InvalidInput for a sweep with another release mode or encryption, and for trials of other data or code.
    DataCorruption for damaged files, and for claims below the cost of their traces.
    """
    other = sweep_at(folder)
    record = owned_record(other)
    if record.sweep.release != sweep.release or (record.manifest.key_check is None) != (manifest.key_check is None):
        raise InvalidInput(
            f"--from {folder}: its release or encryption is not that of this sweep; run both alike, or train anew"
        )
    other_points = {point.content: point for point in record.points}
    found: list[tuple[TrialFiles, TrialFiles, TrialResult]] = []
    for each in planned:
        target, point = files.trial(each.key), other_points.get(each.point.content)
        result = record.finished(point.key) if point is not None and point.key == each.key else None
        if point is None or result is None or exists(target.spec) or exists(target.result):
            continue
        source = other.trial(each.key)
        if not exists(source.data_fingerprint):
            continue
        wrong = [*damages(source, result), *unfounded(other, replace(record, points=(point,)))]
        if wrong:
            raise DataCorruption("\n".join(wrong))
        if met_other_data(source, each.data_digest):
            raise InvalidInput(
                f"--from {folder}: trial {each.key} was trained on other data than those that are there now; restore "
                "the data, or train anew"
            )
        require_same_code(source, each.spec, code, "train anew, without --from")
        found.append((source, target, result))
    for source, target, result in found:
        _take(files, source, target, result, record)
    return tuple(result.key for _, _, result in found)


def _take(files: SweepFiles, source: TrialFiles, target: TrialFiles, result: TrialResult, record: SweepRecord) -> None:
    """Copy a trial: its releases first, its result last.

    After an interruption it is copied again; its releases keep their names, and count once.
    """
    adopt_attempts(files, result.key, record.attempts.get(result.key, ()))
    exact = release_mode(record.disclosure).is_sensitive
    unprotected = () if result.spec.is_private else (source.model, source.inputs)
    last = (source.spec.removeprefix(f"{source.root}/"), source.result.removeprefix(f"{source.root}/"))
    names = [name for name in list_files(source.root) if name not in last]
    for name in (*names, *last):
        stored, copy = f"{source.root}/{name}", f"{target.root}/{name}"
        if name.startswith("private/"):
            write_in_private_folder(copy, read_bytes(stored))
        else:
            write_bytes_atomically(copy, read_bytes(stored), private=exact or stored in unprotected)
