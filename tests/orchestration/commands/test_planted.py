"""Commands on inputs that others have planted: refused in one line, without waiting for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.local_files import UnsafeFile
from tests.orchestration.invoking import refused
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
