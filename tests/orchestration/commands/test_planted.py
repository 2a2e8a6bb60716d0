"""Commands on inputs that others have planted or named: one line, without waiting, or commands for the terminal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.local_files import UnsafeFile
from tests.orchestration.invoking import invoked, refused
from tests.orchestration.sample_results import stored_sample


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_pipe_for_a_sweep_file_is_refused(tmp_path: Path, command: str) -> None:
    os.mkfifo(tmp_path / "sweep.yaml")
    assert "is no file, but a folder, a pipe or a device" in refused(InvalidInput, command, tmp_path / "sweep.yaml")


def test_a_pipe_for_a_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "people.csv")
    assert "is a pipe, a socket or a device" in refused(InvalidInput, "init", tmp_path / "people.csv", "--label", "y")
    assert os.listdir(tmp_path) == ["people.csv"]


def test_whether_a_file_can_be_read_is_said_by_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line; typer asks first, and draws a box."""
    (tmp_path / "people.csv").write_text("x,y\n1,2\n")
    monkeypatch.setattr(os, "access", lambda *place, **named: False)
    path = tmp_path / "people.csv"
    assert "people.csv" in refused(InvalidInput, "init", path, "--label", "z", "--to", tmp_path / "new.yaml")
    assert "people.csv" in refused(InvalidInput, "plan", path)


@pytest.mark.parametrize("command", ["status", "report", "verify", "best", "forget", "delete"])
def test_a_pipe_for_a_record_is_refused_by_name(tmp_path: Path, command: str) -> None:
    folder = Path(stored_sample(tmp_path / "sweep").root)
    for name in ("sweep.json", "status.json"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    assert "json is a named pipe" in refused(UnsafeFile, command, folder, *(["--yes"] if command == "delete" else []))


ODD = os.fsdecode(b"\xff\x1b]0;title\x07\nerror: nothing")
SPELT = r"\udcff\x1b]0;title\x07\nerror: nothing"


def test_names_are_spelt_out_where_they_are_listed(tmp_path: Path) -> None:
    files = stored_sample(tmp_path / "sweep")
    (Path(files.root) / ODD).write_text("")
    checkpoint = Path(files.trial(ODD).checkpoint)
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"key")
    for command, line in (
        (["forget", files.root], f"forgotten: {SPELT}\n"),
        (["delete", files.root, "--yes"], f"left, because not of the sweep: {SPELT}\n"),
    ):
        said = invoked(*command)
        assert said.exit_code == 0, said.output
        assert line in said.output
        assert "\x1b" not in said.output
