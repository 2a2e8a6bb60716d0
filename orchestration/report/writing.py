"""Write the report files of a sweep."""

from __future__ import annotations

import json

from dpsweep.orchestration.comparison.findings import Findings, as_dict, findings, of_trials
from dpsweep.orchestration.comparison.record import SweepRecord, exact, rows
from dpsweep.orchestration.comparison.stored import stored_evidence
from dpsweep.orchestration.records.layout import SweepFiles
from dpsweep.orchestration.records.release_modes import release_mode
from dpsweep.orchestration.records.report_digests import write_private_report, write_public_reports
from dpsweep.orchestration.report.page import render


def write_reports(files: SweepFiles, record: SweepRecord) -> tuple[str, Findings]:
    """Write the report under the sweep's release mode, the exact one in ``private/``, results.json and comparison.json.

    Files with exact statistics are private, wherever they lie.

    Returns: the HTML of the report under the release mode, and its findings on settings.

    Raises: DataCorruption for damaged statistics or outcomes, StorageError.
    """
    data = record.data()
    evidence = stored_evidence(files, data)
    found = findings(data, evidence)
    page = render(data, evidence)
    sensitive = release_mode(record.disclosure).is_sensitive
    compared = as_dict(found)
    table = rows(record, of_trials(compared))
    write_private_report(files, render(record.data(exact(files)), evidence).encode())
    contents = {
        files.report: page.encode(),
        files.comparison: json.dumps(compared, indent=2, allow_nan=False).encode(),
        files.results: json.dumps(table, indent=2, allow_nan=False).encode(),
    }
    write_public_reports(files, contents, sensitive)
    return page, found
