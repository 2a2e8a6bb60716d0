"""Names of a sweep's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from accounting.errors import InvalidInput
from orchestration.records.layout import SweepFiles, absolute, output_files


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(InvalidInput, match="holds a null character"):
        absolute("runs/\0")
    with pytest.raises(InvalidInput, match="more than 255 bytes"):
        absolute(f"runs/{'ü' * 128}/a")
    assert absolute("s3://bucket/" + "n" * 300).endswith("n")
    with pytest.raises(InvalidInput, match=r"--output .*: File name too long; name another folder with --output"):
        output_files("/" + "n/" * 4000, "name")


def test_what_only_the_driver_writes_is_local_whatever_holds_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert SweepFiles("s3://bucket/runs/a").tune == str(tmp_path / "runs" / "a" / "tune")
    assert SweepFiles(str(tmp_path / "a")).tune == SweepFiles(str(tmp_path / "a")).earlier_tune
