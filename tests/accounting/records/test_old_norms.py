"""Norms of earlier versions, a file for each part of each snapshot, are read, accounted and continued as before."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from accounting.errors import DataCorruption, StorageError
from accounting.jobs import Counting, account_all, account_in_process
from accounting.jobs.users import account_users
from accounting.records.encryption import KEY_VARIABLE
from accounting.records.epsilons import read_epsilons
from accounting.records.files import list_files, read_bytes
from accounting.records.layout import TrialFiles
from accounting.records.shards import NormShards, NormShardWriter, NormSnapshot, delete_norms, has_norms
from accounting.records.users import write_users
from tests.accounting.old_layout import write_old_norms
from tests.accounting.stored_trial import account_trial, job_of, snapshot, write_norms, write_trial

STEPS = (0, 40, 80)


def snapshots(*steps: int, examples: int = 20) -> tuple[NormSnapshot, ...]:
    return tuple(snapshot(step, examples) for step in steps)


@pytest.fixture
def norms(tmp_path: Path) -> Path:
    write_old_norms(str(tmp_path / "norms"), 8, *snapshots(*STEPS))
    return tmp_path / "norms"


def write_more(directory: Path, *added: NormSnapshot) -> None:
    with NormShardWriter(str(directory), 8) as writer:
        for each in added:
            writer.write(each)
        writer.complete()


@pytest.mark.parametrize("key", ["", "ab" * 32], ids=["plain", "encrypted"])
def test_rows_and_epsilons_are_those_of_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    users = np.random.default_rng(3).integers(0, 20, 50)
    for root in (old, new):
        write_trial(root)
        write_users(TrialFiles(root).users, np.asarray(snapshot(0, 50).example_ids), users, 8)
    list(delete_norms(TrialFiles(old).norms))
    write_old_norms(TrialFiles(old).norms, 8, *snapshots(*STEPS, examples=50))
    before, after = NormShards(TrialFiles(old).norms), NormShards(TrialFiles(new).norms)
    assert (before.steps, before.parts, before.examples) == (after.steps, after.parts, after.examples)
    for part in before.parts:
        for name, column in vars(before.read(part)).items():
            np.testing.assert_array_equal(column, getattr(after.read(part), name))
    before.verify()
    of_users = replace(job_of(old, 1e-5, "pld"), counting=Counting(500.0), folder=f"{old}/private/of-users")
    for account, job in ((account_all, job_of(old, 1e-5)), (account_users, of_users)):
        other = replace(job, root=new, folder=job.folder.replace(old, new))
        account(job, account_in_process)
        account(other, account_in_process)
        found, expected = read_epsilons(job.folder), read_epsilons(other.folder)
        np.testing.assert_array_equal(found.upper, expected.upper)
        np.testing.assert_array_equal(found.lower, expected.lower)


def test_every_flipped_byte_of_a_part_is_noticed(norms: Path) -> None:
    part = norms / "step=00000040" / "part-00001.arrow"
    intact = part.read_bytes()
    for position in [*range(0, len(intact), 97), len(intact) - 1]:
        part.write_bytes(intact[:position] + bytes([intact[position] ^ 0x10]) + intact[position + 1 :])
        with pytest.raises(
            DataCorruption,
            match=r"step=00000040/part-00001\.arrow.*sha256.*which costs privacy again",
        ):
            NormShards(str(norms)).read(1)
    part.write_bytes(intact)
    NormShards(str(norms)).verify()


def test_every_flipped_byte_of_the_manifest_is_noticed_or_leaves_parts_uncommitted(norms: Path) -> None:
    manifest = norms / "manifest.jsonl"
    intact = manifest.read_bytes()
    private = [str(json.loads(line)[name])[:5] for line in intact.splitlines() for name in ("num_bytes", "sha256")]
    newlines = [position for position, byte in enumerate(intact) if byte == ord("\n")]
    for position in [*range(0, len(intact), 4), *newlines]:
        manifest.write_bytes(intact[:position] + bytes([intact[position] ^ 0x01]) + intact[position + 1 :])
        with pytest.raises(DataCorruption, match=r"manifest\.jsonl|norms") as refusal:
            NormShards(str(norms)).verify()
        assert not any(value in str(refusal.value).replace(str(norms), "") for value in private)


@pytest.mark.parametrize("cut", [1, 100, 1000])
def test_a_truncated_part_is_noticed(norms: Path, cut: int) -> None:
    part = norms / "step=00000000" / "part-00000.arrow"
    part.write_bytes(part.read_bytes()[:-cut])
    with pytest.raises(DataCorruption, match="its length differs from the manifest"):
        NormShards(str(norms)).read(0)


def test_a_part_that_the_manifest_lists_twice_or_not_is_noticed(norms: Path) -> None:
    manifest = norms / "manifest.jsonl"
    intact = manifest.read_bytes()
    manifest.write_bytes(intact + intact.splitlines(keepends=True)[0])
    with pytest.raises(DataCorruption, match=r"manifest\.jsonl: it lists a part twice"):
        NormShards(str(norms))
    manifest.write_bytes(b"".join(line for line in intact.splitlines(keepends=True) if b'"part":2' not in line))
    with pytest.raises(DataCorruption, match="never committed"):
        NormShards(str(norms)).require_complete(20)
    manifest.write_bytes(intact)
    (norms / "step=00000080" / "part-00002.arrow").unlink()
    with pytest.raises(DataCorruption, match="missing"):
        NormShards(str(norms)).read(2)


@pytest.mark.parametrize("kept", [1, 30, 80, -1])
def test_a_torn_last_line_leaves_the_part_uncommitted_until_it_is_replayed(tmp_path: Path, kept: int) -> None:
    directory, manifest = str(tmp_path), tmp_path / "manifest.jsonl"
    write_old_norms(directory, 100, *snapshots(0, 40))
    whole = manifest.read_bytes()
    first, line = whole.splitlines(keepends=True)
    manifest.write_bytes(first + line[:kept])
    shards = NormShards(directory)
    assert shards.steps == (0,)
    assert shards.uncommitted == ("step=00000040/part-00000.arrow",)
    with NormShardWriter(directory, 100) as resumed:
        resumed.write(snapshot(40, 20))
        resumed.write(snapshot(80, 20))
        resumed.complete()
    assert manifest.read_bytes().startswith(first + line)
    assert NormShards(directory).steps == STEPS


def test_a_run_that_began_so_goes_on_so(tmp_path: Path) -> None:
    """Byte for byte as the earlier version would have gone on; a replay with other rows is refused."""
    begun, whole = tmp_path / "begun", tmp_path / "whole"
    write_old_norms(str(begun), 8, *snapshots(0, 40))
    write_old_norms(str(whole), 8, *snapshots(*STEPS))
    write_more(begun, *snapshots(40, 80))
    assert {name: read_bytes(f"{begun}/{name}") for name in list_files(str(begun))} == {
        name: read_bytes(f"{whole}/{name}") for name in list_files(str(whole))
    }
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in begun.rglob("*.*"))
    with pytest.raises(DataCorruption, match=r"step=00000040/part-00000\.arrow") as refusal:
        write_more(begun, snapshot(40, 20, seed=1))
    assert re.search("[0-9a-f]{9}", str(refusal.value).removeprefix(str(begun))) is None, "a digest of private rows"


def test_a_full_disk_while_appending_leaves_the_manifest_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_old_norms(str(tmp_path), 8, snapshot(0, 20))
    before, write = (tmp_path / "manifest.jsonl").read_bytes(), os.write

    def nearly_full(handle: int, data: memoryview) -> int:
        if bytes(data[:7]) == b'{"step"':
            write(handle, data[:9])
            raise OSError(errno.ENOSPC, "no space")
        return write(handle, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", nearly_full)
        with pytest.raises(StorageError, match="No space left"):
            write_more(tmp_path, snapshot(40, 20))
    assert (tmp_path / "manifest.jsonl").read_bytes() == before
    write_more(tmp_path, snapshot(40, 20))
    assert NormShards(str(tmp_path)).steps == (0, 40)


def test_norms_are_there_until_their_manifest_is_deleted(tmp_path: Path, norms: Path) -> None:
    objects = tmp_path / "objects"
    write_norms(str(objects), 8, *snapshots(*STEPS))
    for directory, commit in ((norms, "manifest.jsonl"), (objects, "complete.json")):
        assert has_norms(str(directory))
        deleted = delete_norms(str(directory))
        assert next(deleted) == commit
        assert not has_norms(str(directory))
        list(deleted)
        assert list_files(str(directory)) == ()


def test_trials_of_old_norms_are_accounted_as_before(tmp_path: Path) -> None:
    root = str(tmp_path)
    write_trial(root)
    expected = account_trial(job_of(root, 1e-5))
    list(delete_norms(TrialFiles(root).norms))
    write_old_norms(TrialFiles(root).norms, 8, *snapshots(*STEPS, examples=50))
    np.testing.assert_array_equal(account_trial(job_of(root, 1e-5)).upper, expected.upper)
