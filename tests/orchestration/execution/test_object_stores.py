"""What an object store needs is found missing before anything is written."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from accounting.errors import InvalidInput
from orchestration.execution.object_stores import require_client
from orchestration.pipeline import RunRequest, run_sweep
from orchestration.sweeps.schema import parse_sweep
from tests.orchestration.sample_grids import small

TEXT = small(clipping="flat", noise="constant", seeds=0)


@pytest.mark.skipif(importlib.util.find_spec("boto3") is not None, reason="boto3 is installed here")
def test_a_missing_package_is_named_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    request = RunRequest(parse_sweep(TEXT), TEXT, "s3://nobody-owns-this-bucket/out", "in-process")
    with pytest.raises(InvalidInput, match=r"s3:// with the package boto3.*pip install 'dpsweep\[s3\]'"):
        run_sweep(request)
    assert list(tmp_path.iterdir()) == []


def test_a_local_folder_needs_nothing(tmp_path: Path) -> None:
    require_client(str(tmp_path))
    require_client(f"file://{tmp_path}")
