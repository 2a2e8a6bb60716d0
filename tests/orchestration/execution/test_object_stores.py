"""What an object store needs is found missing before anything is written."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dpsweep.accounting.errors import InvalidInput, StorageError
from dpsweep.orchestration.comparison.stored import stored_record
from dpsweep.orchestration.execution.object_stores import _is_installed, abort_uploads, require_answer, require_client
from dpsweep.orchestration.pipeline import RunRequest, run_sweep
from dpsweep.orchestration.records.layout import SweepFiles
from dpsweep.orchestration.sweeps.schema import parse_sweep
from tests.orchestration.sample_grids import small
from tests.orchestration.servers import closed_port, has_s3, mute

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
