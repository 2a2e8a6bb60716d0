"""`dpsweep report --watch`: the report of a sweep that runs in another process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.report.writing import growing_report
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.status_snapshot import read_snapshot
from tests.orchestration.processes import PATIENCE, dpsweep, start, wait_until
from tests.orchestration.sample_grids import small


def test_the_report_grows_with_the_sweep_and_its_page_renews_itself_until_the_end(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(small(clipping="flat", noise="constant", seeds=[0, 1, 2], epochs=60))
    files = SweepFiles(str(tmp_path / "out"))
    driver = start(
        "run", tmp_path / "sweep.yaml", "--output", files.root, "--address", "in-process", log=tmp_path / "log"
    )
    wait_until(lambda: read_snapshot(files.status) is not None or driver.poll() is not None, "the sweep to begin")
    read = {shown: Path(files.report).read_text() for shown in growing_report(files, 0.2)}
    assert driver.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    # The driver writes the report of the whole sweep itself, at any moment after the last trial.
    pages = {shown: page for shown, page in read.items() if "3 of 3 trials finished" not in page}
    assert {1, 2} & set(pages), "the driver itself writes no report before its end"
    for shown, page in pages.items():
        assert f"{shown} of 3 trials finished" in page
        assert '<meta http-equiv="refresh" content="1">' in page
        assert "The sweep is running." in page
    done = dpsweep("report", files.root, "--watch")
    assert done.returncode == 0, done.stderr
    last = Path(files.report).read_text()
    assert "3 of 3 trials finished" in last
    assert not re.search(r'http-equiv="refresh"|The sweep is running', last)


def test_a_folder_where_nothing_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no sweep has started there"):
        next(growing_report(SweepFiles(str(tmp_path))))
