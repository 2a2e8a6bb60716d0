"""Print the first screen of a report as one PDF page, with the Chromium or Chrome of the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dpsweep.accounting.errors import InvalidInput

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
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return f"it took more than {_PATIENCE:.0f} s"
    return next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
