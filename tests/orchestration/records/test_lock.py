"""Two runs never share a folder."""

from pathlib import Path

import pytest

from accounting.errors import InvalidInput
from orchestration.records.lock import exclusive


def test_a_second_run_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "sweep"
    with exclusive(folder), pytest.raises(InvalidInput, match="another dpsweep is running in"), exclusive(folder):
        pass
    with exclusive(folder):
        (folder / "sweep.json").touch()
    assert folder.is_dir()


def test_a_run_that_could_not_start_leaves_nothing(tmp_path: Path) -> None:
    with exclusive(tmp_path / "sweep"):
        assert (tmp_path / "sweep").is_dir()
    assert not (tmp_path / "sweep").exists()


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match=r"cannot write to .*choose another folder"), exclusive(tmp_path / "file"):
        pass
