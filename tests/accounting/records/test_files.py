"""Ranges in an object store are read together; what is read, in which order and with which errors stays as it was."""

from __future__ import annotations

import threading
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import fs

from dpsweep.accounting.errors import DataCorruption, StorageError
from dpsweep.accounting.records import files
from dpsweep.accounting.records.files import AHEAD, READERS, digest_of, list_files, read_bytes, read_in_turn
from dpsweep.accounting.records.shards import NormShards, read_contributions
from tests.accounting.stored_trial import snapshot, write_norms
from tests.orchestration.servers import has_s3, put_object, s3
from tests.orchestration.slow_proxy import Traffic, slow_proxy

STEPS = tuple(range(0, 240, 10))
ELSEWHERE = "mock://nowhere/folder"
OURS = {"tests", "dpsweep", "contextlib"}


def passed_through(error: BaseException) -> set[str]:
    """The packages in the traceback: messages that have passed through others may quote data, and are withheld."""
    frames = traceback.walk_tb(error.__traceback__)
    return {str(frame.f_globals["__name__"]).partition(".")[0] for frame, _ in frames}


@dataclass(frozen=True)
class Store:
    """A bucket, read by way of a proxy that takes a twentieth of a second for each request, and written directly."""

    bucket: str
    environment: Mapping[str, str]
    traffic: Traffic

    def put(self, name: str, content: bytes | None) -> None:
        put_object(self.bucket, self.environment, name, content)

    def copy(self, folder: Path) -> str:
        """Store a folder under its name; returns the URI."""
        for name in list_files(str(folder)):
            self.put(f"{folder.name}/{name}", read_bytes(f"{folder}/{name}"))
        return f"s3://{self.bucket}/{folder.name}"


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    if not has_s3():
        pytest.skip("no moto for an S3 server")
    bucket = f"bucket-{uuid.uuid4().hex}"  # pyarrow connects once for each bucket
    with (
        s3(bucket) as environment,
        slow_proxy(environment["AWS_ENDPOINT_URL"], 0.05) as (address, traffic),
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in {**environment, "AWS_ENDPOINT_URL": address}.items():
            patch.setenv(name, value)
        yield Store(bucket, environment, traffic)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    folder = tmp_path / uuid.uuid4().hex
    write_norms(str(folder), 8, *(snapshot(step, 20) for step in STEPS))
    return folder


def test_the_ranges_of_a_part_are_asked_for_together_and_once(store: Store, local: Path) -> None:
    traffic, directory = store.traffic, store.copy(local)
    traffic.forget()
    part = NormShards(directory).files(1)
    assert 1 < traffic.most_at_once <= READERS, "manifests"
    traffic.forget()
    found = read_contributions(part)
    assert 1 < traffic.most_at_once <= READERS
    asked = Counter(path.partition("/step=")[2][:8] for _, path in traffic.asked)
    assert asked == {f"{step:08d}": 2 for step in STEPS}
    assert Counter(method for method, _ in traffic.asked) == {"HEAD": len(STEPS), "GET": len(STEPS)}
    for name, column in vars(read_contributions(NormShards(str(local)).files(1))).items():
        np.testing.assert_array_equal(vars(found)[name], column)


@pytest.mark.parametrize("place", [1, len(STEPS) - 1])
def test_damage_is_named_as_when_ranges_are_read_one_by_one(store: Store, local: Path, place: int) -> None:
    directory = store.copy(local)
    part, name = NormShards(directory).files(0), f"step={STEPS[place]:08d}/object-00000.arrow"
    intact = (local / name).read_bytes()
    for content, reason in (
        (bytes([intact[0] ^ 1]) + intact[1:], "part 0: its sha256 differs"),
        (intact[:-1], "its length differs"),
        (intact + b"?", "its length differs"),
        (None, "the manifest lists it, but it is missing"),
    ):
        store.put(f"{local.name}/{name}", content)
        with pytest.raises(DataCorruption, match=reason) as damage:
            read_contributions(part)
        assert f"{directory}/{name}" in str(damage.value)
        assert passed_through(damage.value) <= OURS


def test_a_store_that_refuses_is_named(store: Store, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = NormShards(store.copy(local)).files(0)
    monkeypatch.setattr(store.traffic, "refused", (f"step={STEPS[-1]:08d}",))
    with pytest.raises(StorageError, match=rf"cannot read .*step={STEPS[-1]:08d}") as refusal:
        read_contributions(part)
    assert passed_through(refusal.value) <= OURS


def test_an_answer_that_was_cut_off_is_no_empty_object(monkeypatch: pytest.MonkeyPatch) -> None:
    class CutOff:
        """As pyarrow's, where the headers with the size are lost once."""

        def open_input_file(self, path: str) -> pa.NativeFile:
            return pa.BufferReader(b"")

        def get_file_info(self, path: str) -> fs.FileInfo:
            return fs.FileInfo(path, fs.FileType.File, size=2)

    monkeypatch.setattr(files, "open_filesystem", lambda uri: (CutOff(), "a.json"))
    readers: tuple[Callable[[str], object], ...] = (read_bytes, digest_of, lambda uri: files.read_range(uri, 0, 2))
    for read in readers:
        with pytest.raises(StorageError, match=r"a\.json: the answer of the store was cut off"):
            read("s3://bucket/a.json")


def test_an_answer_that_lacks_its_end_is_not_believed(
    store: Store, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyarrow would return other bytes of the memory in place of what is missing."""
    part = NormShards(directory := store.copy(local)).files(0)
    for last in b"}", b"\0", b"\xa5", b"\x5a":
        store.put(f"{local.name}/a.json", content := bytes(9999) + last)
        uri = f"{directory}/a.json"
        assert read_bytes(uri) == content
        assert files.read_range(uri, 9990, 10) == (content[9990:], 10_000)
        for missing in 1, 9:
            with monkeypatch.context() as changed:
                changed.setattr(store.traffic, "missing", missing)
                for read in read_bytes, digest_of, partial(files.read_range, start=9990, size=10):
                    with pytest.raises(StorageError, match=r"a\.json: the answer of the store was cut off"):
                        read(uri)
    monkeypatch.setattr(store.traffic, "missing", 1)
    with pytest.raises(StorageError, match="the answer of the store was cut off"):
        read_contributions(part)


def test_little_is_read_before_its_turn() -> None:
    begun: list[int] = []

    def read(name: int) -> int:
        begun.append(name)
        return name

    for taken, found in enumerate(read_in_turn(ELSEWHERE, read, range(100))):
        assert found == taken
        assert len(begun) <= taken + AHEAD
    assert sorted(begun) == list(range(100))


def test_the_first_error_in_order_ends_the_reading() -> None:
    later, begun = threading.Event(), list[int]()

    def read(name: int) -> int:
        begun.append(name)
        if name == 3:
            assert later.wait(10), "a later name fails before"
        if name in (3, 5):
            later.set()
            raise FileNotFoundError(str(name))
        return name

    results = read_in_turn(ELSEWHERE, read, range(100))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(FileNotFoundError, match="3"):
        next(results)
    assert len(begun) <= AHEAD + 3


def test_a_local_folder_takes_no_thread(tmp_path: Path) -> None:
    threads = set(read_in_turn(str(tmp_path), lambda _: threading.current_thread(), range(5)))
    assert threads == {threading.current_thread()}
