"""A sweep that does not fit on the disk is refused before it starts."""

from __future__ import annotations

import errno
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import fs

from dpsweep.accounting.errors import InvalidInput, StorageError, UnfitNode
from dpsweep.accounting.jobs.examples import account_part
from dpsweep.accounting.records import files as storage
from dpsweep.accounting.records import local_files
from dpsweep.accounting.records.epsilon_files import read_epsilons
from dpsweep.accounting.records.files import read_bytes
from dpsweep.orchestration.comparison.stored import stored_record
from dpsweep.orchestration.execution import storage_checks
from dpsweep.orchestration.execution.backend import TrialContext
from dpsweep.orchestration.execution.ray_tune import _attempt
from dpsweep.orchestration.execution.storage_checks import (
    OnSharedStorage,
    Probe,
    _is_installed,
    abort_uploads,
    require_answer,
    require_client,
    require_space,
    train_patiently,
)
from dpsweep.orchestration.execution.versions import versions_here
from dpsweep.orchestration.pipeline import RunRequest, run_sweep
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.sections import ResourceSettings
from dpsweep.workers.own_code.imports import NO_CODE
from dpsweep.workers.training.history import Progress, TrainingResult
from dpsweep.workers.trials.trial import run_trial
from tests.accounting.stored_trial import account_trial, job_of
from tests.orchestration.reference import run_undisturbed
from tests.orchestration.sample_grids import small
from tests.orchestration.servers import closed_port, has_s3, mute


def test_a_sweep_larger_than_the_disk_is_refused(tmp_path: Path) -> None:
    files, plan = SweepFiles(str(tmp_path / "deep" / "out")), plan_sweep(parse_sweep(small(seeds=0, noise="constant")))
    require_space(files, plan)
    free = shutil.disk_usage(tmp_path).free
    large = replace(plan, trials=tuple(replace(trial, shard_bytes=free) for trial in plan.trials))
    with pytest.raises(InvalidInput, match=r"MiB free, but the sweep may write \d+ MiB; free some space"):
        require_space(files, large)
    assert not (tmp_path / "deep").exists()


def test_what_is_finished_needs_no_room(tmp_path: Path) -> None:
    files, plan = SweepFiles(str(tmp_path)), plan_sweep(parse_sweep(small(seeds=0, noise="constant")))
    done = [replace(trial, shard_bytes=shutil.disk_usage(tmp_path).free) for trial in plan.trials]
    for trial in done:
        result = Path(files.trial(trial.spec.key).result)
        result.parent.mkdir(parents=True)
        result.touch()
    require_space(files, replace(plan, trials=tuple(done)))


NOBODY = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nobody", "AWS_DEFAULT_REGION": "us-east-1"}
TEXT = small(clipping="flat", noise="constant", seeds=0)


@pytest.mark.skipif(_is_installed("google.cloud.storage"), reason="google-cloud-storage is installed here")
def test_a_missing_package_is_named_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    request = RunRequest(parse_sweep(TEXT), TEXT, "gs://nobody-owns-this-bucket/out", "in-process")
    with pytest.raises(InvalidInput, match=r"gs:// with the package google.cloud.storage.*pip install 'dpsweep\[gs\]'"):
        run_sweep(request)
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_cannot_be_reached_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    address = f"http://127.0.0.1:{closed_port()}"
    for name, value in {**NOBODY, "AWS_ENDPOINT_URL": address}.items():
        monkeypatch.setenv(name, value)
    started = time.monotonic()
    request = RunRequest(parse_sweep(TEXT), TEXT, "s3://bucket/out", "in-process", tracking_uri="none")
    with pytest.raises(InvalidInput, match=rf"^s3://bucket/: no object store answers at {address} \(Failed to conn"):
        run_sweep(request)
    assert time.monotonic() - started < 10.0
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_never_answers_is_one_error_of_any_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpsweep.accounting.records.files._ANSWER_WITHIN", 1.0)
    with mute() as place:
        for name, value in {**NOBODY, "AWS_ENDPOINT_URL": f"http://{place}"}.items():
            monkeypatch.setenv(name, value)
        started = time.monotonic()
        with pytest.raises(StorageError, match=rf"^s3://mute/: no object store answers at http://{place} \(.*; check"):
            stored_record(SweepFiles("s3://mute/out"))
        assert time.monotonic() - started < 20.0


def test_a_local_folder_needs_nothing_and_is_left_alone(tmp_path: Path) -> None:
    require_answer(str(tmp_path))
    require_client(str(tmp_path))
    require_client(f"file://{tmp_path}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not has_s3(), reason="no moto for an S3 server")
@pytest.mark.parametrize(
    ("folder", "left"),
    [
        ("s3://bucket/out", {"other/a", "outside"}),
        ("s3://bucket/out/", {"other/a", "outside"}),
        ("s3://bucket", set()),
        ("s3://bucket/", set()),
    ],
)
def test_no_upload_that_was_cut_off_keeps_a_key(folder: str, left: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process leaves the parts of a checkpoint that it had sent."""
    import boto3
    from moto import mock_aws

    for name, value in NOBODY.items():
        monkeypatch.setenv(name, value)
    with mock_aws():
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        for key in ("out/trials/a/private/checkpoint.pt", "out/tuning/trials/b/private/x", "other/a", "outside"):
            upload = client.create_multipart_upload(Bucket="bucket", Key=key)["UploadId"]
            client.upload_part(Bucket="bucket", Key=key, UploadId=upload, PartNumber=1, Body=b"key")
        abort_uploads(folder)
        found = client.list_multipart_uploads(Bucket="bucket").get("Uploads", [])
    assert {upload["Key"] for upload in found} == left


SWEEP = small(
    clipping="individual",
    noise="constant",
    seeds=0,
    epochs=4,
    norms={"refreshes_per_epoch": 1},
    execution={"checkpoint_every_epochs": 1},
    accounting={"individual": "rdp"},
)


@pytest.fixture
def planned() -> PlannedTrial:
    (planned,) = plan_sweep(parse_sweep(SWEEP)).trials
    return planned


def refusing(monkeypatch: pytest.MonkeyPatch, after: int, times: int) -> Callable[[], int]:
    """Let the store refuse so many writes after so many; returns how often it refused so far."""
    write, counts = storage._put_object, {"writes": 0, "refused": 0}

    def put(filesystem: fs.FileSystem, path: str, pieces: Sequence[bytes | memoryview]) -> None:
        counts["writes"] += 1
        if counts["writes"] > after and counts["refused"] < times:
            counts["refused"] += 1
            raise OSError("503 Slow Down")
        write(filesystem, path, pieces)

    monkeypatch.setattr(storage, "_put_object", put)
    return lambda: counts["refused"]


@pytest.mark.long
def test_a_store_that_refuses_for_a_while_changes_no_bit(
    planned: PlannedTrial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_checks, "PAUSES", (0.0,) * 5)
    refused, steps = refusing(monkeypatch, after=12, times=3), list[int]()
    context = TrialContext(SweepFiles(f"mock://{uuid.uuid4()}/sweep"), parse_sweep(SWEEP).disclosure, NO_CODE)

    def report(progress: Progress) -> None:
        steps.append(progress.step)

    train_patiently(planned, context.files.trial(planned.key).root, NO_CODE, report)
    assert refused() == 3
    assert steps[0] < max(steps), "it went on from a checkpoint"
    assert len(set(steps)) == 4
    files = context.files.trial(planned.key)
    account_trial(job_of(files.root, planned.spec.delta, "rdp"))
    undisturbed = run_undisturbed(parse_sweep(SWEEP), tmp_path).trial(planned.key)
    models = [torch.load(BytesIO(read_bytes(each.model)), weights_only=True) for each in (files, undisturbed)]
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())
    ours, theirs = (read_epsilons(each.epsilons).upper for each in (files, undisturbed))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("root", "attempts"), [("mock://{name}/sweep", 3), ("{folder}/{name}", 1)])
def test_what_refuses_for_good_fails_the_trial(
    root: str, attempts: int, planned: PlannedTrial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local disk is full: nobody waits for it."""
    begun = 0

    def counted(*arguments: Any, **options: Any) -> TrainingResult:
        nonlocal begun
        begun += 1
        return run_trial(*arguments, **options)

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(storage_checks, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr("dpsweep.workers.trials.trial.run_trial", counted)
    monkeypatch.setattr(storage, "_put_object", refuse)
    monkeypatch.setattr(local_files, "replace_file", refuse)
    context = TrialContext(
        SweepFiles(root.format(name=uuid.uuid4(), folder=tmp_path)), parse_sweep(SWEEP).disclosure, NO_CODE
    )
    with pytest.raises(StorageError, match="No space left"):
        train_patiently(planned, context.files.trial(planned.key).root, NO_CODE, lambda progress: None)
    assert begun == attempts


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    probe = Probe.written(str(tmp_path / "probe"))
    assert not probe.obstacle()
    probe.require()
    other = Probe.written(probe.uri)
    assert (probe.obstacle(), other.obstacle()) == ("it has other content there", ""), "a folder of the same name"
    Path(probe.uri).unlink()
    assert other.obstacle() == "it is not there"
    with pytest.raises(InvalidInput, match=r"was written by the driver but cannot be read on node .*such as s3://"):
        other.require()


def test_a_node_that_joins_later_with_other_versions_is_refused(tmp_path: Path) -> None:
    probe = replace(Probe.written(str(tmp_path / "probe")), versions={**versions_here(), "torch": "2.11.0"})
    with pytest.raises(
        UnfitNode, match=r"^node .*, which joined later, has torch .* \(2\.11\.0 here\); install the same"
    ):
        probe.require()


def test_a_link_that_is_down_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is cut off when its trial starts shares the storage all the same."""
    probe, refused = Probe.written(f"mock://{uuid.uuid4()}/probe"), list[str]()
    open_filesystem = storage.open_filesystem

    def cut_off(uri: str) -> tuple[fs.FileSystem, str]:
        if len(refused) < 2:
            refused.append(uri)
            raise OSError("network is unreachable")
        return open_filesystem(uri)

    monkeypatch.setattr(storage_checks, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(storage, "open_filesystem", cut_off)
    probe.require()
    assert refused == [probe.uri] * 2
    monkeypatch.setattr(storage_checks, "PAUSES", ())
    refused.clear()
    assert "network is unreachable" in probe.obstacle()
    refused.clear()
    with pytest.raises(InvalidInput, match=r"cannot be read on node .*network is unreachable.*; choose an --output"):
        probe.require()


@dataclass(frozen=True)
class Number:
    """A part, and a result."""

    part: int


@dataclass(frozen=True)
class Doubled:
    """A job on numbers."""

    root: str

    def account(self, part: Number) -> Number:
        return Number(2 * part.part)


def test_no_part_is_accounted_on_a_node_that_does_not_share_the_storage(tmp_path: Path) -> None:
    """A process proves it once, at its first part."""
    probe, job = Probe.written(str(tmp_path / "probe")), Doubled("trial")
    proven = OnSharedStorage(job, probe)
    assert (proven.root, account_part(proven, Number(21))) == ("trial", Number(42))
    Path(probe.uri).unlink()
    assert account_part(proven, Number(1)) == Number(2)
    with pytest.raises(InvalidInput, match=r"cannot be read on node .*, which joined later: .*; choose an --output"):
        account_part(OnSharedStorage(job, Probe(probe.uri, b"of another folder")), Number(1))


def test_no_trial_starts_on_a_node_that_does_not_share_the_storage(tmp_path: Path) -> None:
    sweep, files = parse_sweep(small(clipping="flat", noise="constant", seeds=0)), SweepFiles(str(tmp_path))
    (planned,) = plan_sweep(sweep).trials
    context = TrialContext(files, sweep.disclosure, NO_CODE, probe=Probe.written(files.probe))
    blind = replace(context, probe=Probe(files.probe, b"of another folder"))
    failure = _attempt(planned, blind, ResourceSettings())
    assert "storage-probe was written by the driver but cannot be read on node" in str(failure)
    assert not Path(files.trial(planned.key).checkpoint).exists()
