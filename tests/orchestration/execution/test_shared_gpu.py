"""Fractions of a GPU on a simulated cluster: Ray counts the GPU that its node claims to have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.orchestration.execution.test_cluster import CLOSED
from tests.orchestration.processes import dpsweep, script
from tests.orchestration.sample_grids import small

NODE = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "num_gpus": 1, "include_dashboard": False})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
WAITS = """
import math, pathlib, time, uuid
from torch import nn

MET = pathlib.Path({met!r})


class Waits(nn.Linear):
    def forward(self, x):
        if self.training and len(x) > 8 and not hasattr(self, "met"):  # the planner tries it on a few examples
            self.met = MET / uuid.uuid4().hex
            self.met.touch()
            end = time.monotonic() + 300
            while len(list(MET.iterdir())) < 2 and time.monotonic() < end:
                time.sleep(0.05)
            time.sleep(2)
        return super().forward(x)


def build(feature_shape, num_classes):
    return nn.Sequential(nn.Flatten(), Waits(math.prod(feature_shape), num_classes))
"""
"""A model whose training goes on when that of another has begun, and then takes two seconds at least."""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with script(NODE, errors=tmp_path / "stderr", **CLOSED) as process:
        assert process.stdout is not None
        yield next(line.strip() for line in process.stdout if ":" in line)


def test_two_trials_share_a_gpu_and_a_third_waits(address: str, tmp_path: Path) -> None:
    met = tmp_path / "met"
    met.mkdir()
    (tmp_path / "waits.py").write_text(WAITS.replace("{met!r}", repr(str(met))))
    text = small(
        model="waits:build",
        clipping="flat",
        noise="constant",
        seeds=[0, 1, 2],
        epochs=1,
        resources={"cpus": 1, "gpus": 0.5},
        execution={"device": "cpu"},
    )
    (tmp_path / "sweep.yaml").write_text(text)
    done = dpsweep(
        "run", tmp_path / "sweep.yaml", "--output", tmp_path / "out", "--address", address, "--json", **CLOSED
    )
    assert done.returncode == 0, done.stderr
    keys = [trial["key"] for trial in json.loads(done.stdout)["trials"]]
    results = [json.loads((tmp_path / "out" / "trials" / key / "result.json").read_text()) for key in keys]
    first, second, third = sorted((result["started"], result["ended"]) for result in results)
    assert second[0] < first[1], "two train at once"
    assert third[0] >= min(first[1], second[1]), "the third waits for half of the GPU"
