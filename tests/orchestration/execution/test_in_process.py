"""Trials that one process trains share a folder, as those of an embedded run do."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpsweep.orchestration.pipeline import run_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import permitted
from dpsweep.workers.machine.folders import NODE_FOLDER
from tests.orchestration.sample_grids import in_process, small

OWN = f"""
import os, pathlib
from torch import nn

SEEN = pathlib.Path(__file__).with_name("seen.txt")

def model(feature_shape, num_classes):
    with SEEN.open("a") as opened:
        print(os.environ.get({NODE_FOLDER!r}, ""), file=opened)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""


def test_trials_share_a_folder_that_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NODE_FOLDER, raising=False)
    (tmp_path / "own.py").write_text(OWN)
    text = small(model="own.py:model", clipping="none", noise="constant", seeds=[0, 1])
    code = permitted(parse_sweep(text), tmp_path)
    seen = tmp_path / "seen.txt"
    run_sweep(in_process(text, tmp_path / "out", code=code))
    folders = {Path(line) for line in seen.read_text().splitlines() if line}
    assert len(folders) == 1
    assert not folders.pop().parent.exists()
