"""Two drivers never share a sweep: a folder by its lock, an object store by a claim."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from dpsweep.accounting.errors import InvalidInput, StorageError
from dpsweep.accounting.records.files import read_bytes, write_bytes_atomically
from dpsweep.accounting.records.local_files import UnsafeFile
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.ownership import claimed, exclusive
from tests.orchestration.processes import wait_until

PERIOD = 0.2


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return SweepFiles(f"file://{tmp_path}/sweep").claim


def stored(tmp_path: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((tmp_path / "sweep" / "driver.json").read_bytes())
    return content


def test_a_second_driver_is_refused_until_the_first_ends(uri: str) -> None:
    with claimed(uri, PERIOD), pytest.raises(InvalidInput, match="another dpsweep drives file"), claimed(uri, PERIOD):
        pass
    with claimed(uri, PERIOD):
        pass


def test_a_claim_is_renewed(uri: str, tmp_path: Path) -> None:
    with claimed(uri, PERIOD):
        first = stored(tmp_path)
        deadline = time.monotonic() + 60.0
        while stored(tmp_path)["renewed"] == first["renewed"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize("silent", [0.0, 60.0])
def test_the_claim_of_a_lost_driver_is_taken_over(
    silent: float, uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once where it was silent for long enough, else after waiting for a sign of it, which is said."""
    lost = {"token": "a", "host": "elsewhere", "pid": 1, "renewed": time.time() - silent}
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "driver.json").write_text(json.dumps(lost))
    with claimed(uri, PERIOD):
        assert stored(tmp_path)["token"] != "a"
    said = capsys.readouterr().err
    assert ("was heard of 0 s ago; waiting up to 1 s for another sign of it" in said) == (silent == 0.0)


def test_of_two_that_start_at_once_one_is_refused(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find the sweep free; the other's claim, written a moment later, is seen when this one reads again."""
    file, renewals = tmp_path / "sweep" / "driver.json", iter(range(3))

    def other_writes(seconds: float) -> None:
        if next(renewals, None) is not None:
            file.write_text(json.dumps({"token": "b", "host": "elsewhere", "pid": 2, "renewed": time.time()}))

    monkeypatch.setattr("dpsweep.orchestration.store.ownership.time.sleep", other_writes)
    with pytest.raises(InvalidInput, match="process 2 on elsewhere"), claimed(uri, PERIOD):
        pass
    assert stored(tmp_path)["token"] == "b", "the claim of the other stays"


@pytest.mark.usefixtures("sigterm_interrupts")
def test_whoever_is_taken_over_ends(uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {"token": "b", "host": "elsewhere", "pid": 2, "renewed": time.time()}

    def driven() -> None:
        with claimed(uri, PERIOD):
            (tmp_path / "sweep" / "driver.json").write_text(json.dumps(other))
            time.sleep(60.0)

    with pytest.raises(KeyboardInterrupt):
        driven()
    assert "has taken over" in capsys.readouterr().err
    assert stored(tmp_path) == other, "the claim of the other stays"


def test_a_folder_is_left_to_its_lock(tmp_path: Path) -> None:
    with exclusive(SweepFiles(str(tmp_path))):
        assert [each.name for each in tmp_path.iterdir()] == [".lock"]


def test_a_damaged_claim_is_no_claim_to_guess_about(uri: str, tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "driver.json").write_text("{}")
    with pytest.raises(InvalidInput, match="damaged; delete it"), claimed(uri, PERIOD):
        pass


def test_a_claim_that_is_damaged_meanwhile_ends_no_driver(uri: str, tmp_path: Path) -> None:
    with claimed(uri, PERIOD):
        (tmp_path / "sweep" / "driver.json").write_text("{}")
        time.sleep(3.0 * PERIOD)
        (tmp_path / "sweep" / "driver.json").unlink()
        wait_until((tmp_path / "sweep" / "driver.json").exists, "a renewal")
        (tmp_path / "sweep" / "driver.json").write_text("{}")


def test_a_second_run_is_refused_until_the_first_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = SweepFiles(f"file://{tmp_path}/stored/sweep")
    refused = pytest.raises(InvalidInput, match=f"another dpsweep writes to {files.root}; wait for it")
    with exclusive(files), refused, exclusive(files):
        pass
    with exclusive(files):
        assert (tmp_path / "stored" / "sweep" / "driver.json").is_file(), "and claimed"
        (files.local_folder / "dpsweep.log").touch()
    assert files.local_folder.is_dir()


def test_a_run_that_could_not_start_leaves_nothing(tmp_path: Path) -> None:
    with exclusive(SweepFiles(str(tmp_path / "sweep"))):
        assert (tmp_path / "sweep").is_dir()
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("is_there_again", [False, True])
def test_a_folder_that_is_gone_meanwhile_is_named(tmp_path: Path, is_there_again: bool) -> None:
    """In place of the file that is missed then. Errors that have another cause stay."""
    files = SweepFiles(str(tmp_path / "out"))
    folder = files.local_folder

    def move() -> None:
        shutil.rmtree(tmp_path / "moved", ignore_errors=True)
        folder.rename(tmp_path / "moved")
        if is_there_again:
            folder.mkdir()

    def miss() -> None:
        move()
        read_bytes(files.report)

    def fail() -> None:
        move()
        raise StorageError("another cause")

    said = r"out was removed or moved while dpsweep wrote to it; put it back"
    with pytest.raises(StorageError, match=said), exclusive(files):
        miss()
    with pytest.raises(StorageError, match="another cause"), exclusive(files):
        fail()
    with exclusive(files):
        move()
    with pytest.raises(FileNotFoundError), exclusive(files):
        read_bytes(files.report)


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = pytest.raises(UnsafeFile, match=r"file is a file, which dpsweep does not write")
    with refused, exclusive(SweepFiles(str(tmp_path / "file"))):
        pass


def test_a_claim_from_the_future_holds_only_while_it_is_renewed(uri: str, tmp_path: Path) -> None:
    """The clock of its driver was wrong, or somebody has forged it."""
    claim = {"token": "a", "host": "elsewhere", "pid": 1, "renewed": time.time() + 1e9}
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "driver.json").write_text(json.dumps(claim))
    with claimed(uri, PERIOD):
        assert stored(tmp_path)["token"] != "a"
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(PERIOD / 4.0):
            claim["renewed"] = time.time() + 1e9
            write_bytes_atomically(uri, json.dumps(claim).encode())

    renewal = threading.Thread(target=renew)
    write_bytes_atomically(uri, json.dumps(claim).encode())
    renewal.start()
    try:
        with pytest.raises(InvalidInput, match="another dpsweep drives"), claimed(uri, PERIOD):
            pass
    finally:
        ended.set()
        renewal.join()
