"""Take finished trials from another sweep instead of training them: the same trial costs privacy once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from accounting.errors import DataCorruption, InvalidInput
from accounting.records import TrialFiles, exists, list_files, read_bytes, write_bytes_atomically
from orchestration.comparison.claims import unfounded
from orchestration.comparison.record import SweepRecord
from orchestration.comparison.stored import owned_record
from orchestration.records.attempts import adopt_attempts
from orchestration.records.integrity import damages, met_other_data
from orchestration.records.layout import SweepFiles, absolute
from orchestration.records.manifest import Manifest
from orchestration.records.release_modes import release_mode
from orchestration.records.results import TrialResult
from orchestration.sweeps.plan import PlannedTrial
from orchestration.sweeps.schema import SweepSpec


def take_finished(
    files: SweepFiles, planned: Iterable[PlannedTrial], sweep: SweepSpec, manifest: Manifest, folder: str
) -> tuple[str, ...]:
    """Copy the finished trials in ``folder`` that ``sweep`` asks for and has not begun; returns their keys.

    What they have released is part of what the sweep has released from then on. Trials of versions that kept no
    fingerprint of their data, or called them after labels, are trained. Raises: InvalidInput for a sweep of another
    release mode or encryption, and for one whose data were others; DataCorruption, before anything is copied, for
    damaged files and for claims below what their traces cost.
    """
    other = SweepFiles(absolute(folder))
    record = owned_record(other)
    if record.sweep.release != sweep.release or (record.manifest.key_check is None) != (manifest.key_check is None):
        raise InvalidInput(
            f"--from {folder}: its release or encryption is not that of this sweep; run both alike, or train anew"
        )
    theirs = {point.content: point for point in record.points}
    found: list[tuple[TrialFiles, TrialFiles, TrialResult]] = []
    for each in planned:
        ours, point = files.trial(each.key), theirs.get(each.point.content)
        result = record.finished(point.key) if point is not None and point.key == each.key else None
        if point is None or result is None or exists(ours.spec) or exists(ours.result):
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
        found.append((source, ours, result))
    for source, ours, result in found:
        _take(files, source, ours, result, record)
    return tuple(result.key for _, _, result in found)


def _take(files: SweepFiles, source: TrialFiles, ours: TrialFiles, result: TrialResult, record: SweepRecord) -> None:
    """Copy a trial. What it has released is recorded first, its result last: after an interruption, it is taken again,
    and then counted twice rather than not at all."""
    adopt_attempts(files, result.key, record.attempts.get(result.key, ()))
    exact = not result.spec.is_private or release_mode(record.disclosure).is_sensitive
    last = (source.spec.removeprefix(f"{source.root}/"), source.result.removeprefix(f"{source.root}/"))
    names = [name for name in list_files(source.root) if name not in last]
    for name in (*names, *last):
        private = exact or name.startswith("private/")
        write_bytes_atomically(f"{ours.root}/{name}", read_bytes(f"{source.root}/{name}"), private)
