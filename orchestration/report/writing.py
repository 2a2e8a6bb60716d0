"""Write the report files of a sweep, once or repeatedly while it runs, and its first screen as one PDF page."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.comparison.claims import require_founded
from dpsweep.orchestration.comparison.findings import Findings, as_dict, findings, of_trials
from dpsweep.orchestration.comparison.record import SweepRecord, rows
from dpsweep.orchestration.comparison.stored import owned_record, stored_evidence
from dpsweep.orchestration.report.page import render, renewed
from dpsweep.orchestration.store.integrity import write_private_report, write_public_reports
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.release_modes import release_mode
from dpsweep.orchestration.store.status_snapshot import PERIOD, read_snapshot


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
    write_private_report(files, render(record.data(files), evidence).encode())
    contents = {
        files.report: page.encode(),
        files.comparison: json.dumps(compared, indent=2, allow_nan=False).encode(),
        files.results: json.dumps(table, indent=2, allow_nan=False).encode(),
    }
    write_public_reports(files, contents, sensitive)
    return page, found


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


_BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
_FLAGS: Final = (
    *("--headless", "--disable-gpu", "--no-first-run", "--disable-sync", "--disable-background-networking"),
    *("--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=10000"),
    *("--no-pdf-header-footer", "--run-all-compositor-stages-before-draw"),
)
_PATIENCE: Final = 120.0
"""Seconds that the browser may take."""
_ONE_PAGE: Final = """<style>
@page { size: A4 landscape; margin: 10mm; }
:root { --page-width: 277mm; }
main > section { display: none; } .cautions li { font-size: .8rem; }
</style></head>"""


def summary_pdf(page: str) -> bytes:
    """Return the first screen of ``page``, the HTML of a report, as a PDF of one landscape page in A4.

    Raises: InvalidInput if the machine has no browser that prints, or if it fails.
    """
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        raise InvalidInput(
            f"--summary prints with Chromium or Chrome, but none of {', '.join(_BROWSERS)} is on the PATH; "
            "install one, or print the first page of report.html from any browser"
        )
    with tempfile.TemporaryDirectory(prefix="dpsweep-summary-") as folder:
        source, printed = Path(folder) / "report.html", Path(folder) / "summary.pdf"
        source.write_text(one_page(page), encoding="utf-8")
        asked = [*_FLAGS, f"--user-data-dir={folder}/profile", f"--print-to-pdf={printed}", source.as_uri()]
        unboxed = ["--no-sandbox"] if os.geteuid() == 0 else []  # the browser refuses its sandbox to root
        said = _run([browser, *unboxed, *asked])
        if not printed.is_file():
            raise InvalidInput(f"{browser} printed nothing: {said or 'it gave no reason'}; print report.html by hand")
        return printed.read_bytes()


def one_page(page: str) -> str:
    """Return ``page`` with its first screen alone, laid out and drawn for the paper."""
    return page.replace("</head>", _ONE_PAGE, 1).replace("<body>", '<body class="printed">', 1)


def _run(command: Sequence[str]) -> str:
    """Run the browser; return the last line that it said."""
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {_PATIENCE:.0f} s"
    return next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
