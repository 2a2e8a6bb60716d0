"""Ray starts beside other work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dpsweep.orchestration.execution.early_start import ray_ahead
from dpsweep.orchestration.execution.environment import EMBEDDED, IN_PROCESS
from dpsweep.orchestration.execution.shared_connection import kept
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.workers.own_code.imports import NO_CODE
from tests.orchestration.execution.test_shared_connection import connections
from tests.orchestration.processes import PATIENCE, environment

SWEEP = """
name: ahead
data: {name: digits}
model: logistic
sampling: {method: poisson, batch_size: 64}
epochs: 1
clipping: [flat]
noise: constant
seeds: [0]
privacy: {target_epsilon: 3, delta: 1e-4}
"""
SCRIPT = """
import os, sys
from pathlib import Path
from dpsweep.orchestration.execution.environment import EMBEDDED, prepare_environment
prepare_environment(EMBEDDED)
from dpsweep.orchestration.execution.early_start import ray_ahead
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.workers.own_code.imports import NO_CODE

def workers():
    return len(set(Path(os.environ["RAY_TMPDIR"]).glob("ray/session_2*/logs/worker-*.out")))

class Trial:
    def answer(self):
        return "asked"

with ray_ahead(parse_sweep(sys.argv[2]), sys.argv[1], EMBEDDED, NO_CODE):
    from dpsweep.orchestration.execution.cluster import connected
    with connected(EMBEDDED, Path(sys.argv[1], "log")):
        import ray
        before = workers()
        print(before, ray.get(ray.remote(num_cpus=1)(Trial).remote().answer.remote()), workers())
"""


@pytest.mark.long
def test_an_embedded_ray_starts_a_worker_when_one_is_asked_for(tmp_path: Path) -> None:
    """Those that Ray would start before, one per core, have not the variables that Tune gives its trials."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "out"), SWEEP],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout == "0 asked 1\n"


def test_nothing_starts_for_a_sweep_in_this_process(tmp_path: Path) -> None:
    with ray_ahead(parse_sweep(SWEEP), str(tmp_path / "out"), IN_PROCESS, NO_CODE), kept(connections([])) as found:
        assert found == 0, "what is opened is what was asked for"


def test_nothing_starts_before_the_plan_of_a_sweep_that_may_be_over(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    with ray_ahead(parse_sweep(SWEEP), str(tmp_path), EMBEDDED, NO_CODE), kept(connections([])) as found:
        assert found == 0
