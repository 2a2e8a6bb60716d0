"""Fractions of a GPU, on a simulated cluster whose node claims to have one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.orchestration.execution.three_nodes import CLOSED, three_nodes
from tests.orchestration.processes import dpsweep
from tests.orchestration.sample_grids import small

WAITS = """
import math, os, pathlib, time
import ray
from torch import nn

MET = pathlib.Path({met!r})


class Waits(nn.Linear):
    def forward(self, x):
        if self.training and ray.is_initialized() and not (met := MET / str(os.getpid())).exists():
            met.touch()
            end = time.monotonic() + 300
            while len(list(MET.iterdir())) < 2 and time.monotonic() < end:
                time.sleep(0.05)
        return super().forward(x)


def build(feature_shape, num_classes):
    return nn.Sequential(nn.Flatten(), Waits(math.prod(feature_shape), num_classes))
"""
"""A model whose training under Ray goes on when another process trains too."""


@pytest.mark.long
def test_two_trials_share_a_gpu_and_a_third_waits(tmp_path: Path) -> None:
    """`test_cluster.py` shows that a trial gets the half of a GPU that it asks for."""
    met = tmp_path / "met"
    met.mkdir()
    (tmp_path / "waits.py").write_text(WAITS.replace("{met!r}", repr(str(met))))
    text = small(
        model="waits:build",
        clipping="flat",
        noise="constant",
        seeds=[0, 1, 2],
        epochs=1,
        resources={"cpus": 0.5, "gpus": 0.5},
        execution={"device": "cpu", "allow_cpu": True},
    )
    (tmp_path / "sweep.yaml").write_text(text)
    arguments = ("run", tmp_path / "sweep.yaml", "--output", tmp_path / "out", "--json")
    with three_nodes(tmp_path) as nodes:
        done = dpsweep(*arguments, "--address", nodes.address, **CLOSED)
    assert done.returncode == 0, done.stderr
    keys = [trial["key"] for trial in json.loads(done.stdout)["trials"]]
    results = [json.loads((tmp_path / "out" / "trials" / key / "result.json").read_text()) for key in keys]
    first, second, third = sorted((result["started"], result["ended"]) for result in results)
    assert second[0] < first[1], "two train at once"
    assert third[0] >= min(first[1], second[1]), "the third waits for half of the GPU"
