"""An embedded Ray starts beside other work, and its first workers have imported what a trial needs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orchestration.execution import preloading
from orchestration.execution.ahead import ray_ahead
from orchestration.execution.environment import EMBEDDED, IN_PROCESS
from orchestration.execution.keeping import kept
from orchestration.execution.preloading import NO_PLACES, Places, places_for, take_place
from orchestration.sweeps.resources import ResourceSettings
from orchestration.sweeps.schema import parse_sweep
from tests.orchestration.execution.test_keeping import connections
from tests.orchestration.processes import PATIENCE, environment
from workers.imports import NO_CODE

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
import os, sys, time
from pathlib import Path
from orchestration.execution.environment import EMBEDDED, prepare_environment
prepare_environment(EMBEDDED)
from orchestration.execution.ahead import ray_ahead
from orchestration.sweeps.schema import parse_sweep
from workers.imports import NO_CODE

class Looking:
    def look(self):
        return "orchestration.execution.tune" in sys.modules, os.environ.get("OMP_NUM_THREADS")

with ray_ahead(parse_sweep(sys.argv[2]), sys.argv[1], EMBEDDED, NO_CODE):
    from orchestration.execution.cluster import connected
    with connected(EMBEDDED, Path(sys.argv[1], "log")):
        import ray
        actors = [ray.remote(num_cpus=1)(Looking).remote() for _ in range(int(ray.cluster_resources()["CPU"]))]
        print(ray.get([actor.look.remote() for actor in actors]), flush=True)
"""


def test_a_worker_has_imported_a_trial_with_the_threads_of_one_when_it_is_given_it(tmp_path: Path) -> None:
    variables = environment()
    del variables["OMP_NUM_THREADS"]
    text = SWEEP + "resources: {cpus: 2}\n"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "out"), text],
        env=variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stderr == ""
    assert "(True, '2')" in done.stdout


@pytest.mark.parametrize("address", [IN_PROCESS, "auto"])
def test_nothing_starts_for_another_address(tmp_path: Path, address: str) -> None:
    with ray_ahead(parse_sweep(SWEEP), str(tmp_path / "out"), address, NO_CODE), kept(connections([])) as found:
        assert found == 0, "what is opened is what was asked for"


def test_nothing_starts_before_the_plan_of_a_sweep_that_may_be_over(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    with ray_ahead(parse_sweep(SWEEP), str(tmp_path), EMBEDDED, NO_CODE), kept(connections([])) as found:
        assert found == 0


def test_each_place_is_given_to_one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with preloading.preloading(Places(number=2, threads=3)):
        assert [take_place(tmp_path) for _ in range(3)] == [3, 3, None]


def test_no_worker_imports_ahead_before_its_gpus_ranks_or_threads_are_known() -> None:
    usual = ResourceSettings(cpus=2.5)
    found = places_for([usual])
    assert found == replace(found, threads=2)
    assert found.number >= 1
    assert places_for([usual, ResourceSettings(cpus=2.0)]) == found, "as many threads"
    assert places_for([ResourceSettings(cpus=0.5)]).threads == 1
    for other in (ResourceSettings(gpus=1.0), ResourceSettings(ranks=2), ResourceSettings(cpus=1.0)):
        assert places_for([usual, other]) == NO_PLACES
