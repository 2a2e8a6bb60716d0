"""Resources by setting, nodes by label and fractions of a GPU, on a simulated cluster of two nodes.

Ray counts the GPU that its node claims to have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.orchestration.execution.test_cluster import CLOSED
from tests.orchestration.processes import dpsweep, script
from tests.orchestration.sample_grids import small

NODES = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
cluster.add_node(num_cpus=8, num_gpus=1, labels={"pool": "train", "ray.io/accelerator-type": "A100"})
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
NOTES = """
import math, pathlib, uuid
import ray
from torch import nn


class Notes(nn.Linear):
    def forward(self, x):
        if self.training and not hasattr(self, "noted"):
            self.noted = True
            if ray.is_initialized():
                context = ray.get_runtime_context()
                place = context.get_node_labels().get("pool", "") + " " + str(context.get_assigned_resources())
                (pathlib.Path({notes!r}) / uuid.uuid4().hex).write_text(place)
        return super().forward(x)


def build(feature_shape, num_classes):
    return nn.Sequential(nn.Flatten(), Notes(math.prod(feature_shape), num_classes))
"""
"""A model that notes, when it is trained by Ray, on which node and with what."""
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
ON_A100 = {"when": {"clipping": "flat"}, "gpus": 0.5, "labels": {"pool": "train", "ray.io/accelerator-type": "A100"}}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    said = tmp_path_factory.mktemp("nodes") / "stderr"
    with script(NODES, errors=said, **CLOSED) as process:
        assert process.stdout is not None
        yield next(line.strip() for line in process.stdout if ":" in line)


def test_each_setting_trains_on_what_it_asks_for(address: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    (tmp_path / "notes_model.py").write_text(NOTES.replace("{notes!r}", repr(str(notes))))
    text = small(
        model="notes_model:build",
        clipping=["none", "flat"],
        noise="constant",
        epochs=1,
        resources=[ON_A100, {"cpus": 1}],
        execution={"device": "cpu"},
    )
    (tmp_path / "sweep.yaml").write_text(text)
    done = dpsweep("run", tmp_path / "sweep.yaml", "--output", tmp_path / "out", "--address", address, **CLOSED)
    assert done.returncode == 0, done.stderr
    found = sorted(note.read_text() for note in notes.iterdir())
    assert sum("'GPU': 0.5" in note for note in found) == 2, found
    assert all(note.startswith("train ") for note in found if "GPU" in note)
    assert len(found) == 4, "both baselines and both private trials"


def test_a_label_that_no_node_has_is_refused_in_words(address: str, tmp_path: Path) -> None:
    section = {**ON_A100, "labels": {"ray.io/accelerator-type": "H100"}}
    (tmp_path / "sweep.yaml").write_text(small(resources=[section, {}]))
    done = dpsweep(
        "run", tmp_path / "sweep.yaml", "--output", tmp_path / "out", "--address", address, "--json", **CLOSED
    )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "a trial with clipping flat reserves 1 CPU and 0.5 GPU and 1 label ray.io/accelerator-type=H100" in line
    assert json.loads(done.stdout or "{}") == {}


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
