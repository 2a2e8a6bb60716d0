"""Norms in objects: every byte is checked, and whatever interrupts the writer, the run ends with equal bytes."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import re
import shutil
import stat
import threading
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsweep.accounting.errors import DataCorruption, InvalidInput, StorageError
from dpsweep.accounting.records import snapshots
from dpsweep.accounting.records.encryption import KEY_VARIABLE
from dpsweep.accounting.records.files import (
    delete,
    list_files,
    read_bytes,
    read_range,
    write_bytes_atomically,
    write_in_private_folder,
)
from dpsweep.accounting.records.sealed import write_private_sealed
from dpsweep.accounting.records.shards import NormShards, NormShardWriter, read_contributions
from tests.accounting.stored_trial import snapshot, write_norms
from tests.known import known

STEPS = (0, 40, 80)
KEYS = {"plain": "", "encrypted": "cd" * 32}


@pytest.fixture(params=["local", "object store"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "norms") if request.param == "local" else f"mock://{uuid.uuid4()}/norms"


@pytest.fixture(params=KEYS)
def key(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(KEY_VARIABLE, KEYS[request.param])
    return KEYS[request.param]


@pytest.fixture(autouse=True)
def two_parts_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "ROWS_PER_OBJECT", 16)


def write_all(directory: str, steps: Sequence[int] = STEPS, examples: int = 20) -> None:
    write_norms(directory, 8, *(snapshot(step, examples) for step in steps))


def contents(directory: str) -> dict[str, bytes]:
    return {name: read_bytes(f"{directory}/{name}") for name in list_files(directory)}


def test_a_snapshot_is_a_few_objects_and_a_manifest(tmp_path: Path) -> None:
    write_all(str(tmp_path / "private" / "norms"))
    names = list_files(str(tmp_path / "private" / "norms"))
    beside = [f"step=000000{step}/{name}" for step in ("00", "40", "80")
              for name in ("manifest.json", "object-00000.arrow", "object-00001.arrow")]  # fmt: skip
    assert names == ("complete.json", *beside)
    for path in (tmp_path / "private", *(tmp_path / "private").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_without_a_key_objects_are_arrow_files_with_a_batch_for_each_part(tmp_path: Path) -> None:
    write_all(str(tmp_path))
    with pa.ipc.open_file(tmp_path / "step=00000040" / "object-00000.arrow") as file:
        batches = [file.get_batch(number) for number in range(file.num_record_batches)]
    assert [batch.num_rows for batch in batches] == [8, 8]
    ids = np.concatenate([batch.column("example_id").to_numpy() for batch in batches])
    np.testing.assert_array_equal(ids, np.asarray(snapshot(40, 20).example_ids)[:16])


def test_a_part_reads_its_own_batches_and_the_manifests_are_read_once(
    root: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(root)
    sizes = {name: len(content) for name, content in contents(root).items() if name.endswith("00000.arrow")}
    read: list[tuple[str, int]] = []

    def noted(uri: str, start: int, size: int) -> tuple[bytes, int]:
        read.append((uri.removeprefix(f"{root}/"), size))
        return read_range(uri, start, size)

    monkeypatch.setattr("dpsweep.accounting.records.snapshot_objects.read_range", noted)
    shards = NormShards(root)
    assert read == []
    part = read_contributions(shards.files(1))
    np.testing.assert_array_equal(part.example_ids, np.asarray(snapshot(0, 20).example_ids)[8:16])
    assert sorted(name for name, _ in read) == sorted(sizes)
    assert all(size < 0.75 * sizes[name] for name, size in read)


def test_a_replay_writes_nothing_and_other_rows_are_refused(root: str, key: str) -> None:
    write_all(root)
    before = contents(root)
    write_all(root, STEPS[1:])
    assert contents(root) == before
    with pytest.raises(DataCorruption, match="does not repeat itself") as refusal:
        write_norms(root, 8, snapshot(40, 20, seed=1))
    assert re.search("[0-9a-f]{9}", str(refusal.value).removeprefix(root)) is None, "a digest of private rows"
    with pytest.raises(DataCorruption, match="does not repeat itself"):
        write_all(root, (40,))
    assert contents(root) == before


def test_other_rows_are_refused_as_soon_as_they_are_written(root: str) -> None:
    """Long before the end of the run, whose snapshots would follow no others."""
    write_all(root)
    with NormShardWriter(root, 8) as writer:
        writer.write(snapshot(0, 20, seed=1))
        with pytest.raises(DataCorruption, match="does not repeat itself"):
            writer.wait()


def test_nothing_is_read_until_the_run_is_complete(root: str) -> None:
    with NormShardWriter(root, 8) as writer:
        writer.write(snapshot(0, 20))
        writer.wait()
        with pytest.raises(DataCorruption, match="training was interrupted; resume the trial"):
            NormShards(root)
        writer.complete()
    NormShards(root).verify()


def test_a_run_that_was_interrupted_at_its_end_is_complete_with_what_it_has(root: str) -> None:
    write_all(root)
    whole = contents(root)
    delete(f"{root}/complete.json")
    write_norms(root, 8)
    assert contents(root) == whole


@pytest.mark.parametrize("lost", ["step=00000000", "step=00000040", "step=00000080"])
def test_a_lost_snapshot_is_noticed(tmp_path: Path, lost: str) -> None:
    """Else the steps after it would be accounted with the contributions of the snapshot before."""
    write_all(str(tmp_path))
    shutil.rmtree(tmp_path / lost)
    with pytest.raises(DataCorruption, match=r"does not follow the snapshot before it|end before or after"):
        NormShards(str(tmp_path))


def test_a_snapshot_of_another_run_is_noticed(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("other", 1)):
        write_norms(str(tmp_path / name), 8, *(snapshot(step, 20, seed) for step in STEPS))
    for step in STEPS:
        taken, kept = tmp_path / "one" / f"step={step:08d}", tmp_path / "kept"
        taken.rename(kept)
        shutil.copytree(tmp_path / "other" / taken.name, taken)
        with pytest.raises(DataCorruption, match=r"does not follow the snapshot before it|end before or after"):
            NormShards(str(tmp_path / "one"))
        shutil.rmtree(taken)
        kept.rename(taken)
    NormShards(str(tmp_path / "one")).verify()


def test_every_byte_of_an_object_belongs_to_a_part(tmp_path: Path, key: str) -> None:
    write_all(str(tmp_path), (0,))
    path = tmp_path / "step=00000000" / "object-00000.arrow"
    intact, named = path.read_bytes(), list[str]()
    for position in range(0, len(intact), 11):
        path.write_bytes(intact[:position] + bytes([intact[position] ^ 0x10]) + intact[position + 1 :])
        with pytest.raises(DataCorruption, match=r"sha256 differs") as damage:
            NormShards(str(tmp_path)).verify()
        found = known(re.search(r"object-00000\.arrow: (.*): its sha256 differs", str(damage.value)))
        named.append(found[1])
    assert [name for name, _ in itertools.groupby(named)] == ["part 0", "part 1"]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_damage_to_any_byte_of_any_file_is_found_and_named(data: st.DataObject) -> None:
    """Flipped, cut, lengthened, exchanged or deleted, with and without a key; no message quotes a digest."""
    directory = f"mock://{uuid.uuid4()}/norms"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, data.draw(st.sampled_from(list(KEYS.values()))))
        patch.setattr(snapshots, "ROWS_PER_OBJECT", 16)
        write_all(directory, STEPS[: data.draw(st.integers(1, 3))], data.draw(st.sampled_from((0, 5, 20))))
        stored = contents(directory)
        name = data.draw(st.sampled_from(sorted(stored)))
        content = stored[name]
        place, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
        changed = data.draw(
            st.sampled_from(
                (
                    content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :],
                    content[:place],
                    content + content[-1:],
                    *(each for each in stored.values() if each != content),
                )
            )
        )
        write_bytes_atomically(f"{directory}/{name}", changed)
        with pytest.raises((DataCorruption, InvalidInput)) as damage:  # without its first bytes it is not encrypted
            NormShards(directory).verify()
        told = str(damage.value)
        assert name in told
        assert re.search("[0-9a-f]{9}", told.replace(directory, "").replace(name, "")) is None
        write_bytes_atomically(f"{directory}/{name}", content)
        NormShards(directory).verify()


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.mark.parametrize("seed", range(12))
def test_whatever_interrupts_it_the_run_ends_with_equal_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Killed in some file operation, again and again, it goes on from a step that was certain to be stored."""
    steps, chance = tuple(range(0, 60, 10)), random.Random(seed)
    monkeypatch.setenv(KEY_VARIABLE, chance.choice(list(KEYS.values())))
    folder, certain, deaths = str(tmp_path / "norms"), 0, 0
    write_all(folder, steps)
    whole = contents(folder)
    shutil.rmtree(folder)
    while True:
        with monkeypatch.context() as patched:
            die_after(patched, chance.randrange(40))
            try:
                with NormShardWriter(folder, 8) as writer:
                    for number in range(chance.randint(0, certain), len(steps)):
                        writer.write(snapshot(steps[number], 20))
                        if chance.random() < 0.5:
                            writer.wait()
                            certain = max(certain, number)
                    writer.complete()
                break
            except Killed:
                deaths += 1
        if "complete.json" not in contents(folder):
            with pytest.raises(DataCorruption, match=r"training was interrupted|no committed norm shards"):
                NormShards(folder)
    for path in Path(folder).rglob(".*.partial"):
        path.unlink()
    assert contents(folder) == whole
    NormShards(folder).verify()
    assert deaths > 0


def die_after(patch: pytest.MonkeyPatch, operations: int) -> None:
    left = itertools.count(operations, -1)

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(left) <= 0:
                raise Killed
            return function(*arguments, **options)

        return call

    for name in ("write", "fsync", "replace"):
        patch.setattr(os, name, dying(getattr(os, name)))


def test_a_full_disk_commits_nothing_and_is_told_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    with NormShardWriter(str(tmp_path), 8) as writer:
        writer.write(snapshot(0, 20))
        writer.wait()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            writer.write(snapshot(40, 20))
            with pytest.raises(StorageError, match=r"step=00000040.*No space left on device; nothing was committed"):
                writer.wait()
        for told in (partial(writer.write, snapshot(80, 20)), writer.wait, writer.complete):
            with pytest.raises(StorageError, match="No space left on device"):
                told()
    assert [name for name in list_files(str(tmp_path)) if "step=00000000" not in name] == []
    assert not list(tmp_path.rglob("*.partial"))
    write_all(str(tmp_path), STEPS[1:])
    assert NormShards(str(tmp_path)).steps == STEPS


def test_training_does_not_wait_for_its_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def slow(uri: str, *pieces: bytes) -> None:
        assert go_on.wait(10)
        write_in_private_folder(uri, *pieces)

    monkeypatch.setattr("dpsweep.accounting.records.snapshots.write_in_private_folder", slow)
    with NormShardWriter(str(tmp_path), 8) as writer:
        writer.write(snapshot(0, 20))
        writer.write(snapshot(40, 20))
        assert list_files(str(tmp_path)) == (), "the storage has done nothing, and training goes on"
        go_on.set()
        writer.complete()
    assert NormShards(str(tmp_path)).steps == (0, 40)


NONSENSE: tuple[tuple[str, Any], ...] = (
    *(("step", 41), ("number", 7), ("previous", 3), ("rows", -1), ("rows", 2**70), ("rows", True), ("rows", 1e9)),
    *(("rows_per_part", 0), ("rows_per_part", 4), ("objects", []), ("objects", None), ("objects", [{}]), ("more", 1)),
    ("objects", [{"sizes": [1, 2], "digests": "zz"}]),
)


@pytest.mark.parametrize(("field", "value"), NONSENSE)
def test_a_forged_manifest_with_a_right_checksum_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    write_all(str(tmp_path))
    path = tmp_path / "step=00000040" / "manifest.json"
    values = json.loads(path.read_bytes())
    del values["sha256"]
    write_private_sealed(str(path), json.dumps({**values, field: value}).encode())
    with pytest.raises(DataCorruption, match=r"step=000000\d0/manifest\.json") as refusal:
        NormShards(str(tmp_path)).verify()
    assert "\n" not in str(refusal.value)
