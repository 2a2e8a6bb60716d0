"""A sweep that does not fit on the disk is refused before it starts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.execution.disk_space import require_space
from dpsweep.orchestration.records.layout import SweepFiles
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from tests.orchestration.sample_grids import small


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
