"""Write the report files of a sweep."""

from __future__ import annotations

import json

from accounting.records.files import write_bytes_atomically
from orchestration.comparison.record import SweepRecord, exact, rows
from orchestration.records.layout import SweepFiles
from orchestration.report.page import render


def write_reports(files: SweepFiles, record: SweepRecord) -> str:
    """Write the report under the sweep's release mode, the exact report in ``private/``, and results.json.

    Returns: the HTML of the first. Raises: DataCorruption for damaged statistics, StorageError.
    """
    page = render(record.data())
    write_bytes_atomically(files.report, page.encode())
    write_bytes_atomically(files.private_report, render(record.data(exact(files))).encode(), private=True)
    write_bytes_atomically(files.results, json.dumps(rows(record), indent=2, allow_nan=False).encode())
    return page
