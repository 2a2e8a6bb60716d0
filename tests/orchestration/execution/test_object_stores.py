"""What an object store needs is found missing before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from accounting.errors import InvalidInput
from orchestration.execution.object_stores import _is_installed, require_client
from orchestration.pipeline import RunRequest, run_sweep
from orchestration.sweeps.schema import parse_sweep
from tests.orchestration.sample_grids import small

TEXT = small(clipping="flat", noise="constant", seeds=0)


@pytest.mark.skipif(_is_installed("google.cloud.storage"), reason="google-cloud-storage is installed here")
def test_a_missing_package_is_named_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    request = RunRequest(parse_sweep(TEXT), TEXT, "gs://nobody-owns-this-bucket/out", "in-process")
    with pytest.raises(InvalidInput, match=r"gs:// with the package google.cloud.storage.*pip install 'dpsweep\[gs\]'"):
        run_sweep(request)
    assert list(tmp_path.iterdir()) == []


def test_a_local_folder_needs_nothing(tmp_path: Path) -> None:
    require_client(str(tmp_path))
    require_client(f"file://{tmp_path}")
