"""Names of a sweep's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from accounting.errors import InvalidInput
from orchestration.records.layout import SweepFiles, absolute


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(InvalidInput, match="holds a null character"):
        absolute("runs/\0")


def test_what_only_the_driver_writes_is_local_whatever_holds_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert SweepFiles("s3://bucket/runs/a").tune == str(tmp_path / "runs" / "a" / "tune")
    assert SweepFiles(str(tmp_path / "a")).tune == SweepFiles(str(tmp_path / "a")).earlier_tune
