"""Names of a sweep's files."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.commands.options import write_file
from dpsweep.orchestration.store.layout import SweepFiles, absolute, output_files
from dpsweep.workers.data import require_path


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
    files = SweepFiles("s3://bucket/runs/a")
    assert files.local_folder.parent == tmp_path / "runs"
    assert pickle.loads(pickle.dumps(files)).__dict__ == {"root": files.root}, "a worker has a folder of its own"
    assert SweepFiles(str(tmp_path / "a")).tune == str(tmp_path / "a" / "tune")


def test_outputs_whose_last_parts_are_equal_share_no_local_folder() -> None:
    """Two teams name their sweeps alike; a slash at the end is no other address, and a long name fits a file system."""
    addresses = ("s3://bucket/teamA/exp1", "s3://bucket/teamB/exp1", "gs://bucket/teamA/exp1")
    assert len({SweepFiles(address).local_folder for address in addresses}) == 3
    assert SweepFiles(addresses[0] + "/").local_folder == SweepFiles(addresses[0]).local_folder
    assert len(SweepFiles("s3://bucket/" + "n" * 300).local_folder.name) < 255


def test_the_home_of_nobody_is_a_name_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the shell leaves it: there is no such user."""
    monkeypatch.chdir(tmp_path)
    assert absolute("~no-such-user/runs") == str(tmp_path / "~no-such-user" / "runs")
    with pytest.raises(InvalidInput, match=r"there is no .*/~no-such-user/people.csv; give the path of the data"):
        require_path("~no-such-user/people.csv")
    with pytest.raises(InvalidInput, match=r"--to ~no-such-user/a.csv cannot be written: No such file"):
        write_file("--to", Path("~no-such-user/a.csv"), b"", private=False)
