"""Trials on several ranks under Ray: a lost rank, a scheduler that stops one, and what is left of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from orchestration.records.layout import SweepFiles
from orchestration.sweeps.plan import plan_sweep
from orchestration.sweeps.schema import parse_sweep
from orchestration.sweeps.user_code import permitted
from tests.orchestration.processes import dpsweep
from tests.orchestration.sample_grids import small
from tests.workers.rank_runs import ended, started

NOTES = """
import json, math, os, pathlib, signal, uuid
import ray
import torch.distributed as distributed
from torch import nn

NOTES = pathlib.Path({notes!r})


class Noting(nn.Linear):
    steps = 0

    def forward(self, x):
        if self.training and ray.is_initialized():
            self.steps += 1
            rank = distributed.get_rank() if distributed.is_initialized() else None
            if self.steps == 1:
                groups = ray.util.placement_group_table().values()
                note = {{"rank": rank, "pid": os.getpid(), "groups": [[g["state"], len(g["bundles"])] for g in groups]}}
                (NOTES / uuid.uuid4().hex).write_text(json.dumps(note))
            if self.steps == 60 and rank == 1 and not (NOTES / "killed").exists():
                (NOTES / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def build(feature_shape, num_classes):
    return nn.Sequential(nn.Flatten(), Noting(math.prod(feature_shape), num_classes))
"""
"""A model that notes who trains it and which placement groups there are; its second rank dies once."""
SWEEP = small(
    model="noting:build",
    data={"name": "digits", "public_fraction": 0.1},
    optimizer=[{"name": "sgd", "learning_rate": rate} for rate in (0.5, 0.001, 0.4)],
    clipping={"name": "flat", "bound": 1.0},
    noise=["constant", "constant", {"name": "exponential", "decay": 0.1}],
    zip=["optimizer", "noise"],
    seeds=0,
    epochs=5,
    scheduler={"name": "asha", "grace_epochs": 2, "reduction_factor": 2},
    resources=[{"when": {"noise": "constant"}, "cpus": 2, "ranks": 2}, {"cpus": 2, "max_concurrent": 1}],
)


def test_a_lost_rank_and_a_stopped_trial(tmp_path: Path) -> None:
    """The first trial loses a rank and ends like one that did not; the second is stopped and leaves both CPUs to the
    third, which has one rank and finds no other placement group than its own."""
    notes = tmp_path / "notes"
    notes.mkdir()
    (tmp_path / "noting.py").write_text(NOTES.format(notes=str(notes)))
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    files = SweepFiles(str(tmp_path / "out"))
    done = dpsweep("run", tmp_path / "sweep.yaml", "--output", files.root, "--json")
    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)["trials"]
    assert [trial["status"] for trial in trials] == ["finished", "stopped", "finished"]
    assert (notes / "killed").exists()

    found: list[dict[str, Any]] = [json.loads(note.read_text()) for note in notes.iterdir() if note.name != "killed"]
    assert Counter(note["rank"] for note in found) == {0: 3, 1: 3, None: 1}, "two trials, the first of them twice"
    for note in found:
        own = 1 if note["rank"] is None else 2
        assert [group for group in note["groups"] if group[0] != "REMOVED"] == [["CREATED", own]]

    sweep = parse_sweep(SWEEP)
    (first, *_) = plan_sweep(sweep, permitted(sweep, tmp_path, ())).trials
    assert ended(started({"again": first.spec}, tmp_path, 2)) == [0, 0]
    model, again = (
        torch.load(folder, weights_only=True) for folder in (files.trial(first.key).model, tmp_path / "again/model.pt")
    )
    assert all(torch.equal(model[name], again[name]) for name in model)


def test_ranks_need_ray(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(small(resources={"ranks": 2}))
    done = dpsweep("run", tmp_path / "sweep.yaml", "--output", tmp_path / "out", "--address", "in-process")
    assert done.returncode == 2
    assert "resources give a trial 2 ranks, but --address in-process trains in one process" in done.stderr
