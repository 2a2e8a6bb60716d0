"""A folder from somebody else says where its sweep was recorded: nobody is asked there, and nothing is changed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.store import remembered
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.status import RecordingStatus
from dpsweep.orchestration.store.status_snapshot import STALE_AFTER, TrialSnapshot, write_snapshot
from dpsweep.orchestration.sweeps.manifest import read_manifest
from dpsweep.orchestration.tracking.given_stores import given_store, is_given_store, note_given
from tests.orchestration.invoking import invoked, refused
from tests.orchestration.sample_results import stored_sample

from mlflow import MlflowClient  # isort: skip
from tests.known import known
from tests.orchestration.sample_snapshots import snapshot_of


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepFiles:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(remembered, "user_cache", lambda: tmp_path / "cache")
    return stored_sample(tmp_path / "sweep")


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """A server of somebody else's, which accepts and notes who comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        yield server


def recording_of(store: str, experiment: str = "dpsweep") -> RecordingStatus:
    return RecordingStatus(1, 3, 0.5, store, f"{store}/#/", experiment, command="dpsweep record")


def left(files: SweepFiles, store: str, experiment: str = "dpsweep", sweep_id: str = "a") -> None:
    """The status of a driver that is gone, and that recorded in ``store``."""
    trial, recording = TrialSnapshot("a", TrialState.FINISHED, 20, 20), recording_of(store, experiment)
    snapshot = snapshot_of(trial, age=2.0 * STALE_AFTER, sweep_id=sweep_id, recording=recording)
    write_snapshot(files.status, snapshot, private=False)


ASKING = [["status"], ["list"], ["record"], ["best", "--register", "people"]]
"""Commands that open the store in which a sweep was recorded."""


@pytest.mark.parametrize("command", ASKING, ids=lambda command: command[0])
def test_the_address_of_a_record_gets_no_request_and_no_login(
    files: SweepFiles, listening: socket.socket, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    store = f"http://127.0.0.1:{listening.getsockname()[1]}"
    left(files, store)
    done = invoked(*command, files.root)
    said = done.stderr + str(done.exception or "")
    assert store in said
    assert "MLFLOW_TRACKING_URI to its address" in said or "give it as --tracking-uri" in said
    with pytest.raises(BlockingIOError):
        listening.accept()


@pytest.mark.parametrize("command", ASKING, ids=lambda command: command[0])
def test_the_database_of_a_record_is_not_opened(files: SweepFiles, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "mine.db").write_bytes(b"")
    left(files, f"sqlite:///{tmp_path}/mine.db")
    invoked(*command, files.root)
    assert (tmp_path / "mine.db").read_bytes() == b""


def test_the_own_database_is_not_opened_through_a_link(files: SweepFiles, tmp_path: Path) -> None:
    (tmp_path / "mine.db").write_bytes(b"")
    files.database.unlink(missing_ok=True)
    files.database.symlink_to(tmp_path / "mine.db")
    left(files, f"sqlite:///{files.database}")
    assert "mlflow.db is a symbolic link" in invoked("status", files.root).stderr
    assert (tmp_path / "mine.db").read_bytes() == b""


def test_a_store_is_given_for_one_sweep_in_one_folder(files: SweepFiles) -> None:
    here = RecordingStatus(store="http://host", experiment="of ann")
    note_given(here, "a", files)
    assert is_given_store(here, "a", files)
    assert not is_given_store(here, "b", files)
    assert not is_given_store(replace(here, store="http://other"), "a", files)
    assert not is_given_store(replace(here, experiment="of ben"), "a", files)
    assert not is_given_store(here, "a", SweepFiles(f"{files.root}-copy"))


def test_it_is_by_default_where_the_same_user_recorded(files: SweepFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    left(files, "http://host", sweep_id="a")
    with pytest.raises(InvalidInput, match="says that the sweep was recorded in http://host, where you have not"):
        given_store(files, None)
    note_given(recording_of("http://host"), "a", files)
    with monkeypatch.context() as upgraded:
        upgraded.setattr(remembered, "_code", lambda: "another version")
        assert given_store(files, None) == "http://host"
    assert given_store(files, "http://other") == "http://other"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://third")
    assert given_store(files, None) == "http://third"


def test_an_experiment_that_only_a_record_names_is_not_written_to(
    files: SweepFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"sqlite:///{tmp_path}/mine.db"
    manifest = known(read_manifest(files))
    left(files, store, "of somebody", manifest.sweep_id)
    assert "in MLflow's experiment 'of somebody', where you have not recorded it" in refused(
        InvalidInput, "record", files.root, "--tracking-uri", store
    )
    assert not (tmp_path / "mine.db").exists()
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of ann")
    assert invoked("record", files.root, "--tracking-uri", store).exit_code == 0
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    assert invoked("record", files.root, "--tracking-uri", store).exit_code == 0
    names = {each.name for each in MlflowClient(store).search_experiments()}
    assert names - {"Default"} == {"of ann"}, (
        "the second command, from another shell, goes on where the first one recorded"
    )


def test_a_given_store_is_asked_again(files: SweepFiles, listening: socket.socket) -> None:
    store = f"http://127.0.0.1:{listening.getsockname()[1]}"
    listening.close()
    left(files, store)
    note_given(recording_of(store), "a", files)
    assert f"cannot close the sweep in MLflow at {store}" in invoked("status", files.root).stderr
    assert f"cannot use MLflow at {store}" in refused(InvalidInput, "record", files.root)
