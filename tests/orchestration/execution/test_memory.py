"""Workers that Ray kills for lack of memory: one line that names it, fewer trials at once, and the sweep goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.orchestration.processes import dpsweep
from tests.orchestration.sample_grids import small


@pytest.mark.long
def test_a_trial_that_lacks_memory_alone_fails_in_one_line(tmp_path: Path) -> None:
    """Ray takes more than a thousandth of the memory for too much, so it kills every worker that trains, also one that
    takes one example at a time."""
    (tmp_path / "sweep.yaml").write_text(
        small(
            sampling={"method": "poisson", "batch_size": 4},
            clipping="flat",
            noise="constant",
            seeds=[0, 1],
            epochs=50,
            resources={"max_failures": 0},
        )
    )
    environment = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "50"}
    out = tmp_path / "out"
    done = dpsweep("run", tmp_path / "sweep.yaml", "--output", out, "--json", **environment)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "lacked memory; it starts anew with execution.micro_batch_size: 1" in done.stderr
    trials = json.loads(done.stdout)["trials"]
    assert {trial["status"] for trial in trials} == {"failed"}
    for trial in trials:
        assert "killed for lack of memory, also with no trial beside it" in trial["error"]
        assert "micro_batch_size" in trial["error"]
