"""Local files that others have planted: refused by name, and nothing that they lead to is read, changed or deleted."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dpsweep.accounting.errors import StorageError
from dpsweep.accounting.records import files as storage
from dpsweep.accounting.records import local_files
from dpsweep.accounting.records.files import largest
from dpsweep.accounting.records.local_files import UnsafeFile

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
STRANGER = 65534
OPERATIONS: dict[str, Callable[[str], object]] = {
    "read": storage.read_bytes,
    "read a range": lambda path: storage.read_range(path, 0, 1),
    "digest": storage.digest_of,
    "write": lambda path: storage.write_bytes_atomically(path, b"new"),
    "write a private one": lambda path: storage.write_in_private_folder(path, b"new"),
    "make private": local_files.make_private_file,
    "lock": lambda path: local_files.locked(path).__enter__(),
    "for a library": lambda path: local_files.require_library_files((path,)),
}
"""What is done to files."""


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with a file, to which links lead; its state must not change."""
    (tmp_path / "outside").mkdir(mode=0o755)
    (tmp_path / "outside" / "file.json").write_text("theirs")
    return tmp_path / "outside"


def unchanged(outside: Path) -> bool:
    mode = stat.S_IMODE(outside.stat().st_mode)
    return [path.read_text() for path in outside.iterdir()] == ["theirs"] and mode == 0o755


@pytest.mark.parametrize("kind", ["link", "dangling link", "link to .", "pipe", "folder"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_no_regular_file_is_refused_by_name(tmp_path: Path, outside: Path, operation: str, kind: str) -> None:
    path = tmp_path / "sweep" / "private" / "file.json"
    path.parent.mkdir(parents=True, mode=0o700)
    match kind:
        case "link":
            path.symlink_to(outside / "file.json")
        case "dangling link":
            path.symlink_to(outside / "nothing")
        case "link to .":
            path.symlink_to(".")
        case "pipe":
            os.mkfifo(path)
        case _:
            path.mkdir()
    said = {"pipe": "a named pipe", "folder": "a folder"}.get(kind, "a symbolic link")
    with pytest.raises(UnsafeFile, match=f"{path} is {said}, which dpsweep does not write there"):
        OPERATIONS[operation](str(path))
    assert unchanged(outside)
    assert os.listdir(path.parent) == ["file.json"]


@pytest.mark.parametrize("operation", [*OPERATIONS, "list", "list folders", "delete", "delete a folder", "exists"])
@pytest.mark.parametrize("level", ["sweep/trials", "sweep/trials/key", "sweep/trials/key/private"])
def test_no_folder_is_reached_through_a_link(tmp_path: Path, outside: Path, operation: str, level: str) -> None:
    further: dict[str, Callable[[str], object]] = {
        "list": lambda path: storage.list_files(os.path.dirname(path)),
        "list folders": lambda path: storage.list_folders(os.path.dirname(path)),
        "delete": storage.delete,
        "delete a folder": storage.delete_folder,
        "exists": storage.exists,
    }
    link = tmp_path / level
    link.parent.mkdir(parents=True)
    path = tmp_path / "sweep" / "trials" / "key" / "private" / "file.json"
    there = outside / path.parent.relative_to(link)
    there.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside)
    with pytest.raises(UnsafeFile, match=f"{link} is a symbolic link"):
        (OPERATIONS | further)[operation](str(path))
    assert (outside / "file.json").read_text() == "theirs"
    assert there == outside or os.listdir(there) == []


def test_deleting_follows_no_link(tmp_path: Path, outside: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "one").symlink_to(".")
    (folder / "inner" / "two").symlink_to(outside)
    (folder / "file").symlink_to(outside / "file.json")
    assert storage.list_files(str(folder)) == ("file", "inner/one", "inner/two")
    storage.delete(str(folder / "file"))
    storage.delete_folder(str(folder))
    assert not folder.exists()
    assert unchanged(outside)


def test_the_links_above_are_the_users_own_once_they_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "mine").symlink_to("real")
    with pytest.raises(UnsafeFile, match="mine is a symbolic link"):
        storage.write_bytes_atomically(str(tmp_path / "mine" / "file"), b"")
    storage.write_bytes_atomically(f"{os.path.realpath(tmp_path / 'mine')}/file", b"here")
    assert (tmp_path / "real" / "file").read_bytes() == b"here"


def test_a_file_that_is_far_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.touch()
    os.truncate(path, 3 * 2**30)
    for operation in (storage.read_bytes, storage.digest_of):
        with pytest.raises(UnsafeFile, match=r"3,221,225,472 bytes, but a file of its kind has at most 268,435,456"):
            operation(str(path))
    assert largest("a/status.json") < largest("a/results.json") < largest("a/model.pt")


def test_a_digest_reads_no_more_than_the_size_that_a_file_had() -> None:
    """A file may grow as it is read, and one of the kernel's says that it is empty and may never end."""
    assert storage.digest_of(f"/proc/{os.getpid()}/status") == hashlib.sha256().hexdigest()


def test_a_place_where_nothing_can_be_made_is_named() -> None:
    for write in (storage.write_bytes_atomically, storage.write_in_private_folder):
        with pytest.raises(StorageError, match=r"cannot write /proc/none/file: No such file or directory"):
            write("/proc/none/file", b"new")


@ROOT
@pytest.mark.parametrize("flag", ["a", "i"])
def test_a_folder_in_which_nothing_can_be_replaced_keeps_no_temporary_file(tmp_path: Path, flag: str) -> None:
    folder = tmp_path / "folder" / "private"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "file").write_text("old")
    if subprocess.run(["chattr", f"+{flag}", folder], check=False, capture_output=True).returncode:
        pytest.skip("no such flags here")
    try:
        for write in (storage.write_bytes_atomically, storage.write_in_private_folder):
            with pytest.raises(StorageError, match=r"cannot write .*file: Operation not permitted; `lsattr -d` shows"):
                write(f"{folder}/file", b"new")
        assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("file", "old")]
    finally:
        subprocess.run(["chattr", f"-{flag}", folder], check=True)


@ROOT
def test_what_another_user_owns_is_neither_taken_nor_filled(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    (folder / "manifest.jsonl").write_text("theirs")
    os.chown(folder / "manifest.jsonl", STRANGER, STRANGER)
    with pytest.raises(UnsafeFile, match="belongs to another user"):
        local_files.make_private_file(str(folder / "manifest.jsonl"))
    os.chown(folder, STRANGER, STRANGER)
    with pytest.raises(UnsafeFile, match=r"belongs to another user \(uid 65534\).*copy it to a folder of your own"):
        storage.write_in_private_folder(str(folder / "file"), b"mine")
    assert (folder / "manifest.jsonl").read_text() == "theirs"


def test_a_file_with_two_names_is_not_changed_in_place(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "mlflow.db").hardlink_to(outside / "file.json")
    with pytest.raises(UnsafeFile, match="has 2 names"):
        local_files.require_library_files((str(tmp_path / "mlflow.db"),))


@pytest.mark.parametrize(("mode", "others"), [(0o755, False), (0o777, True), (0o1777, True), (0o757, True)])
def test_a_folder_that_others_can_change(tmp_path: Path, mode: int, others: bool) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "inner").chmod(mode)
    assert local_files.others_can_write(str(tmp_path / "folder" / "inner")) == others
    if others:
        with pytest.raises(UnsafeFile, match=rf"inner can be changed by other users \(mode {mode:04o}\).*chmod go-w"):
            local_files.require_own_folders(str(tmp_path / "folder"))
    else:
        local_files.require_own_folders(str(tmp_path / "folder"))


@ROOT
def test_a_group_of_ones_own_is_nobody_else(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder").chmod(0o775)
    assert not local_files.others_can_write(str(tmp_path / "folder")), "root's own group"
    os.chown(tmp_path / "folder", 0, STRANGER)
    assert local_files.others_can_write(str(tmp_path / "folder"))


def test_a_folder_put_in_anothers_place_meanwhile_is_not_written(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder stays open: a link that takes its name later leads nobody astray."""
    folder, write = tmp_path / "folder", os.write
    folder.mkdir()

    def swapped(handle: int, data: bytes) -> int:
        if not folder.is_symlink():
            folder.rename(tmp_path / "moved")
            folder.symlink_to(outside)
        return write(handle, data)

    monkeypatch.setattr(os, "write", swapped)
    storage.write_bytes_atomically(str(folder / "file"), b"mine")
    assert unchanged(outside)
    assert (tmp_path / "moved" / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
@pytest.mark.parametrize("private", [False, True])
def test_what_another_user_puts_in_place_of_a_temporary_file_is_not_written(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, kind: str, private: bool
) -> None:
    """In a folder that all may change, another user replaces the temporary file while it is written."""
    folder, write = tmp_path / "folder", os.write
    folder.mkdir()
    (folder / "kept").write_text("old")

    def replaced(handle: int, data: bytes) -> int:
        (temporary,) = folder.glob("*.partial")
        temporary.unlink()
        match kind:
            case "link":
                temporary.symlink_to(outside / "file.json")
            case "pipe":
                os.mkfifo(temporary)
            case _:
                temporary.mkdir()
        return write(handle, data)

    monkeypatch.setattr(os, "write", replaced)
    with contextlib.suppress(StorageError):
        storage.write_bytes_atomically(str(folder / "file"), b"mine", private)
    assert unchanged(outside)
    assert (folder / "kept").read_text() == "old"
    if (folder / "file").is_symlink() or (folder / "file").exists():
        with pytest.raises(UnsafeFile, match="which dpsweep does not write there"):
            storage.read_bytes(str(folder / "file"))


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "file"])
def test_a_temporary_file_that_is_there_before_is_not_written(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its name is random; whoever guesses it gains nothing."""
    monkeypatch.setattr(secrets, "token_hex", lambda size: "guessed")
    planted = tmp_path / "folder" / ".file.guessed.partial"
    planted.parent.mkdir()
    match kind:
        case "pipe":
            os.mkfifo(planted)
        case "file":
            planted.write_text("theirs")
        case _:
            planted.symlink_to(outside / ("file.json" if kind == "link" else "nothing"))
    with pytest.raises(StorageError, match=r"cannot write .*file: File exists"):
        storage.write_bytes_atomically(str(planted.parent / "file"), b"mine")
    assert unchanged(outside)
    assert os.listdir(planted.parent) == [planted.name]


BY_NAME: dict[str, Callable[[str], object]] = {
    "read": storage.read_bytes,
    "read a range": lambda path: storage.read_range(path, 0, 1),
    "digest": storage.digest_of,
    "write": lambda path: storage.write_bytes_atomically(path, b"new"),
    "write a private one": lambda path: storage.write_in_private_folder(path, b"new"),
    "exists": storage.exists,
    "modified": storage.modified,
    "list": storage.list_files,
    "list folders": storage.list_folders,
    "partials": storage.with_partials,
    "parts": storage.with_parts,
    "delete": storage.delete,
    "delete a folder": storage.delete_folder,
    "delete an empty folder": storage.delete_if_empty,
    "closed": storage.is_closed,
}
"""What is done to a path that was made of a folder and of a name from a record."""


@pytest.mark.parametrize("name", ["../outside/file.json", "a/../../outside", "a\0b", "\ud800", "a/.."])
@pytest.mark.parametrize("operation", BY_NAME)
def test_a_name_of_a_record_that_leads_out_is_refused(tmp_path: Path, outside: Path, operation: str, name: str) -> None:
    (tmp_path / "sweep" / "a").mkdir(parents=True)
    with pytest.raises(UnsafeFile, match="leads out of its folder, or is no path of a file"):
        BY_NAME[operation](f"{tmp_path}/sweep/{name}")
    assert unchanged(outside)
    assert (tmp_path / "sweep" / "a").is_dir()


@pytest.mark.parametrize("uri", ["file:///runs/%2e%2e/etc/passwd", "s3://bucket/runs/../other", "gs://bucket/../x"])
def test_so_is_one_in_an_address(uri: str) -> None:
    with pytest.raises(UnsafeFile, match="leads out of its folder"):
        storage.read_bytes(uri)


SET_BITS = stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX


@pytest.mark.parametrize(
    ("operation", "mode"),
    [
        ("write", 0o644),
        ("write a private one", 0o600),
        ("make private", 0o600),
    ],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_nothing_written_passes_on_rights_that_a_folder_or_file_was_given(
    tmp_path: Path, operation: str, mode: int, is_there: bool
) -> None:
    """Bits by which a file runs as its owner, or a folder gives what is made in it to a group."""
    path = tmp_path / "folder" / "inner" / "file"
    for folder in (path.parent.parent, path.parent):
        folder.mkdir()
        folder.chmod(SET_BITS | 0o755)
    if is_there:
        path.write_text("old")
        path.chmod(SET_BITS | 0o777)
    OPERATIONS[operation](str(path))
    assert stat.S_IMODE(path.stat().st_mode) == mode
    if "private" in operation and operation != "make private":
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_whether_a_lock_is_held_is_seen_without_taking_it(tmp_path: Path) -> None:
    path = str(tmp_path / ".lock")
    assert local_files.is_locked(path) is None, "no file"
    with local_files.locked(path):
        assert local_files.is_locked(path) is True
    assert local_files.is_locked(path) is False
    (tmp_path / "link").symlink_to(path)
    assert local_files.is_locked(str(tmp_path / "link")) is None


def test_a_lock_that_is_only_looked_at_keeps_nobody_out(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    path.touch()
    with path.open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.03, looking.close).start()
        with local_files.locked(str(path)):
            assert local_files.is_locked(str(path)) is True
