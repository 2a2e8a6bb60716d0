"""Norm shards: what is read back is what was committed, or an error naming the file."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.mechanism.samplings import (
    Adjacency,
    FixedBatchSampling,
    PoissonSampling,
    Sampling,
    ShuffledSampling,
)
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, SideQuery, Trace
from dpsweep.accounting.records import files as storage
from dpsweep.accounting.records.arrow_parts import commit_parts
from dpsweep.accounting.records.epsilon_files import (
    Epsilons,
    forget_notes,
    noted_epsilons,
    read_epsilons,
    write_epsilons,
)
from dpsweep.accounting.records.files import list_files, open_filesystem, read_bytes, write_bytes_atomically
from dpsweep.accounting.records.local_files import UnsafeFile
from dpsweep.accounting.records.sealed import write_private_sealed
from dpsweep.accounting.records.shards import NormShards, NormSnapshot, read_contributions
from dpsweep.accounting.records.snapshot_objects import ObjectRecord
from dpsweep.accounting.records.snapshots import committed_snapshot
from dpsweep.accounting.records.traces import read_trace, write_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from tests.accounting.stored_trial import snapshot, write_norms, write_trial
from tests.known import known

STEPS = (0, 40, 80)


@pytest.fixture(params=["local", "object store"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "trial") if request.param == "local" else f"mock://{uuid.uuid4()}/trial"


def test_what_is_written_is_read_back(root: str) -> None:
    write_trial(root, examples=20)
    shards = NormShards(TrialFiles(root).norms)
    assert (shards.parts, shards.steps, shards.examples, shards.uncommitted) == ((0, 1, 2), STEPS, 20, ())
    parts = [shards.read(part) for part in shards.parts]
    np.testing.assert_array_equal(np.concatenate([part.example_ids for part in parts]), np.arange(20) * 3 + 1)
    for column, step in enumerate(STEPS):
        written = snapshot(step, 20)
        for name, expected in (("norms", written.norms), ("losses", written.losses)):
            found = np.concatenate([getattr(part, name)[:, column] for part in parts])
            np.testing.assert_array_equal(found, expected.astype(np.float32))
    assert parts[2].contributions.shape == (4, 3)


def test_contributions_are_never_stored_smaller(tmp_path: Path) -> None:
    exact = np.random.default_rng(0).uniform(0.0, 1.0, 20)
    write_norms(str(tmp_path), 65_536, replace(snapshot(0, 20), contributions=exact))
    stored = NormShards(str(tmp_path)).read(0).contributions[:, 0]
    assert (stored >= exact).all()
    np.testing.assert_allclose(stored, exact, rtol=2e-7)


def test_an_empty_data_set_has_one_empty_part(root: str) -> None:
    write_norms(root, 8, snapshot(0, 0))
    shards = NormShards(root)
    assert (shards.parts, shards.examples, shards.read(0).norms.shape) == ((0,), 0, (0, 1))


def test_norms_may_be_infinite_but_contributions_may_not(tmp_path: Path) -> None:
    good = snapshot(0, 3)
    strange = replace(good, norms=np.array([np.inf, np.nan, 1.0]), contributions=np.array([0.0, 0.0, 1.0 + 1e-7]))
    write_norms(str(tmp_path), 8, strange)
    part = NormShards(str(tmp_path)).read(0)
    np.testing.assert_array_equal(part.norms[:, 0], np.array([np.inf, np.nan, 1.0], np.float32))
    np.testing.assert_array_equal(part.contributions[:, 0], [0.0, 0.0, 1.0])
    for wrong in (np.nan, np.inf, -1e-9, 1.001):
        with pytest.raises(InvalidInput, match=r"lie outside \[0, 1\]") as refusal:
            replace(good, contributions=np.array([0.0, wrong, 1.0]))
        assert str(wrong) not in str(refusal.value), "a private value"


@pytest.mark.parametrize(
    ("rows", "sizes", "message"),
    [
        (2**39, None, "other rows than the manifest says"),
        (3, (2**39,), "549,755,813,888 bytes, but an object of its kind has at most"),
        (9, (2**62 - 1,) * 5, "is not the manifest of a snapshot"),
    ],
)
def test_numbers_of_a_manifest_fill_no_memory(
    rows: int, sizes: tuple[int, ...] | None, message: str, tmp_path: Path
) -> None:
    write_norms(str(tmp_path), 8, snapshot(0, 3))
    good = committed_snapshot(str(tmp_path), 0)
    record = good.objects[0]
    if sizes is not None:
        os.truncate(next(tmp_path.rglob("*.arrow")), min(sum(sizes), 2**40))
        record = ObjectRecord(sizes, record.digests * len(sizes))
    forged = replace(good, rows=rows, rows_per_part=-(-rows // record.parts), objects=(record,))
    write_private_sealed(f"{tmp_path}/step=00000000/manifest.json", forged.to_json())
    write_private_sealed(f"{tmp_path}/complete.json", json.dumps({"snapshots": 1, "last": forged.digest}).encode())
    with pytest.raises(DataCorruption, match=message):
        read_contributions(NormShards(str(tmp_path)).files(0))
    with pytest.raises(DataCorruption, match=message):
        NormShards(str(tmp_path)).verify()


def test_impossible_snapshots_are_refused() -> None:
    good = snapshot(0, 3)
    with pytest.raises(InvalidInput, match="share one length"):
        replace(good, losses=np.zeros(4))
    with pytest.raises(InvalidInput, match="ids repeat"):
        replace(good, example_ids=np.array([1, 2, 1]))
    with pytest.raises(InvalidInput, match="ids repeat"):
        replace(good, example_ids=np.array([1, 2, 2]))
    assert replace(good, example_ids=np.array([5, 1, 3])).example_ids.tolist() == [5, 1, 3]
    with pytest.raises(InvalidInput, match="step"):
        NormSnapshot(-1, good.example_ids, good.groups, good.norms, good.contributions, good.losses)


def test_snapshots_must_begin_at_step_0_and_cover_every_part(tmp_path: Path) -> None:
    with pytest.raises(DataCorruption, match="no committed norm shards"):
        NormShards(str(tmp_path / "nothing"))
    write_norms(str(tmp_path / "late"), 8, snapshot(40, 20))
    with pytest.raises(DataCorruption, match="first snapshot is at step 40"):
        NormShards(str(tmp_path / "late"))
    write_norms(str(tmp_path / "short"), 8, snapshot(0, 20), snapshot(40, 10))
    with pytest.raises(DataCorruption, match="step 40 has other parts than the first"):
        NormShards(str(tmp_path / "short"))
    others = replace(snapshot(40, 4), example_ids=np.arange(4) + 100)
    write_norms(str(tmp_path / "others"), 8, snapshot(0, 4), others)
    with pytest.raises(DataCorruption, match="other examples"):
        NormShards(str(tmp_path / "others")).read(0)
    with pytest.raises(DataCorruption, match="other examples"):
        read_contributions(NormShards(str(tmp_path / "others")).files(0))
    with pytest.raises(DataCorruption, match="no part 9; it has parts 0 to 0"):
        NormShards(str(tmp_path / "others")).files(9)


def store(directory: str, *parts: Epsilons) -> None:
    commit_parts(directory, [write_epsilons(directory, number, part, "inputs") for number, part in enumerate(parts)])


def test_a_part_is_taken_up_only_from_the_same_inputs_and_undamaged(root: str) -> None:
    ids, values = np.arange(3), np.ones(3)
    own = Epsilons(ids, ids.astype(np.int32), values, values, values.astype(np.float32), 1e-5, "rdp", "estimate")
    record = write_epsilons(root, 4, own, "these")
    found = known(noted_epsilons(root, 4, "these"))
    assert found[0] == record
    np.testing.assert_array_equal(found[1].upper, own.upper)
    assert noted_epsilons(root, 4, "others") is None
    assert noted_epsilons(root, 3, "these") is None
    part = f"{root}/{record.path}"
    write_bytes_atomically(part, read_bytes(part)[:-1] + b"?")
    assert noted_epsilons(root, 4, "these") is None
    commit_parts(root, [record])
    forget_notes(root)
    assert list_files(root) == ("manifest.jsonl", "part-00004.arrow")


def test_epsilons_round_trip_and_missing_parts_are_noticed(root: str) -> None:
    def part(start: int, rows: int) -> Epsilons:
        values = np.arange(start, start + rows, dtype=np.float64)
        ids, groups = values.astype(np.int64), np.zeros(rows, np.int32)
        return Epsilons(ids, groups, values, values / 2, values.astype(np.float32), 1e-5, "rdp", "estimate")

    store(root, part(0, 3), part(3, 0), part(3, 2))
    stored = read_epsilons(root)
    np.testing.assert_array_equal(stored.upper, np.arange(5))
    assert (stored.delta, stored.method, stored.kind) == (1e-5, "rdp", "estimate")
    manifest = read_bytes(f"{root}/manifest.jsonl").splitlines(keepends=True)
    write_bytes_atomically(f"{root}/manifest.jsonl", manifest[0] + manifest[2])
    with pytest.raises(DataCorruption, match="part of the epsilons is missing"):
        read_epsilons(root)


def test_a_forged_line_of_a_manifest_is_refused(root: str) -> None:
    ids, values = np.arange(3), np.ones(3)
    store(root, Epsilons(ids, ids.astype(np.int32), values, values, values.astype(np.float32), 1e-5, "rdp", "estimate"))
    (line,) = read_bytes(f"{root}/manifest.jsonl").splitlines()
    record = json.loads(line)
    for entry, value in (("part", 0.0), ("part", None), ("rows", "3"), ("sha256", "0" * 64), ("more", 1)):
        forged = json.dumps(record | {entry: value}, separators=(",", ":")).encode() + b"\n"
        write_bytes_atomically(f"{root}/manifest.jsonl", forged)
        with pytest.raises(DataCorruption, match=r"line 1 is damaged|its sha256 differs"):
            read_epsilons(root)


def test_a_manifest_that_is_cut_hides_no_part(root: str) -> None:
    ids, values = np.arange(3), np.ones(3)
    part = Epsilons(ids, ids.astype(np.int32), values, values, values.astype(np.float32), 1e-5, "rdp", "estimate")
    store(root, part, part)
    write_bytes_atomically(f"{root}/manifest.jsonl", read_bytes(f"{root}/manifest.jsonl")[:-9])
    with pytest.raises(DataCorruption, match="line 2 is damaged"):
        read_epsilons(root)


@pytest.mark.parametrize(
    ("sampling", "adjacency"), [(FixedBatchSampling(100, 10), "add_remove"), (ShuffledSampling(4), "zero_out")]
)
def test_traces_round_trip_and_damage_is_noticed(root: str, sampling: Sampling, adjacency: Adjacency) -> None:
    sampled = PoissonSampling(np.float32(0.1))  # type: ignore[arg-type]  # numbers of numpy on purpose
    released = GaussianRelease("pca", np.float32(16.0))  # type: ignore[arg-type]  # likewise
    trace = Trace(
        np.int64(100),  # type: ignore[arg-type]  # numbers of numpy on purpose
        (
            Segment(0, 5, sampled, 1.25, (SideQuery("counts", 5.0), SideQuery("median", 2.0))),
            Segment(5, 3, sampling, 0.0),
            Segment(8, 4, sampling, 0.1 + 0.2),
        ),
        (released, PureRelease("selection", 0.5)),
        adjacency,
        "guarantee",
    )
    path = TrialFiles(root).trace
    write_trace(path, trace)
    assert read_trace(path) == trace
    intact = read_bytes(path)
    noticed = 0
    for position in range(0, len(intact), 23):
        write_bytes_atomically(path, intact[:position] + bytes([intact[position] ^ 0x04]) + intact[position + 1 :])
        try:
            assert read_trace(path) == trace
        except DataCorruption:
            noticed += 1
    assert noticed > 20
    with pytest.raises(FileNotFoundError):
        read_trace(f"{root}/absent.arrow")


def test_atomic_writes_replace_whole_files(root: str) -> None:
    uri = f"{root}/folder/file"
    write_bytes_atomically(uri, b"one")
    write_bytes_atomically(uri, b"two", private=True)
    assert read_bytes(uri) == b"two"
    assert storage.list_files(root) == ("folder/file",)
    assert storage.exists(uri)
    assert not storage.exists(f"{root}/other")


def test_unknown_stores_and_forbidden_places_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot open 'ftp://host/'"):
        open_filesystem("ftp://host/path")
    with pytest.raises(InvalidInput, match="'s3://\\[bucket/key' is not an address"):
        open_filesystem("s3://[bucket/key")
    with pytest.raises(InvalidInput, match="an address s3:// holds a password") as refusal:
        open_filesystem("s3://me:hunter2@bucket/key")
    assert "hunter2" not in str(refusal.value)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UnsafeFile, match=f"{tmp_path}/file is a file"):
        write_bytes_atomically(str(tmp_path / "file" / "below"), b"data")
    write_bytes_atomically(f"file://{tmp_path}/a%20b", b"data")
    assert (tmp_path / "a b").read_bytes() == b"data"
