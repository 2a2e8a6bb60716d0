"""Write the report of a sweep repeatedly while the sweep runs."""

from __future__ import annotations

import time
from collections.abc import Iterator

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.comparison.claims import require_founded
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.comparison.stored import owned_record, stored_evidence
from dpsweep.orchestration.records.layout import SweepFiles
from dpsweep.orchestration.records.release_modes import release_mode
from dpsweep.orchestration.records.report_digests import write_public_reports
from dpsweep.orchestration.records.status_snapshot import PERIOD, read_snapshot
from dpsweep.orchestration.report.page import render, renewed


def growing_report(files: SweepFiles, period: float = PERIOD) -> Iterator[int]:
    """Write the report of a sweep again whenever a trial has ended, until the sweep has ended or its driver is gone.

    Only report.html and digests are written; the other files are left to the driver. A browser reloads the page every
    ``period`` seconds. Yields: the number of trials that the report shows.

    Raises: InvalidInput if no sweep runs or has run there, StorageError, DataCorruption for damaged files and
    for claims that their traces do not bear out.
    """
    if read_snapshot(files.status) is None:
        raise InvalidInput(f"there is no {files.status}: no sweep has started there; name the folder of one that runs")
    shown = -1
    while (now := read_snapshot(files.status)) is not None and now.state == "running" and not now.is_stale():
        record = owned_record(files)
        over = sum(record.status(point.key).result is not None for point in record.points)
        if over > shown:
            require_founded(files, record)
            _write(files, record, period)
            yield over
        shown = over
        time.sleep(period)


def _write(files: SweepFiles, record: SweepRecord, period: float) -> None:
    data = record.data()
    page = renewed(render(data, stored_evidence(files, data)), period)
    sensitive = release_mode(record.disclosure).is_sensitive
    write_public_reports(files, {files.report: page.encode()}, sensitive)
