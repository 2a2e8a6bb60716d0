"""Trials on several ranks under Ray: a lost rank, a scheduler that stops one, and what is left of them."""

from __future__ import annotations

import json
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.orchestration.execution.ray_ranks import _Rank
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import permitted
from dpsweep.workers.evaluation.scores import Evaluation
from dpsweep.workers.training.history import Progress
from tests.orchestration.processes import Command, dpsweep
from tests.orchestration.sample_grids import small
from tests.workers.rank_runs import ended, started

NOTES = """
import json, math, os, pathlib, signal
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
                (NOTES / f"{{rank}}-{{os.getpid()}}").write_text(json.dumps(note))
            if self.steps == 60 and rank == 1 and not (NOTES / "killed").exists():
                (NOTES / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def build(feature_shape, num_classes):
    return nn.Sequential(nn.Flatten(), Noting(math.prod(feature_shape), num_classes))
"""
"""A model that notes who trains it and which placement groups there are; its second rank dies once."""
ON_RANKS = {
    "model": "noting:build",
    "data": {"name": "digits", "public_fraction": 0.1},
    "clipping": {"name": "flat", "bound": 1.0},
    "seeds": 0,
    "epochs": 5,
}
ONE = small(**ON_RANKS, noise="constant", resources={"ranks": 2})
THREE = small(
    **ON_RANKS,
    optimizer=[{"name": "sgd", "learning_rate": rate} for rate in (0.5, 0.001, 0.4)],
    noise=["constant", "constant", {"name": "exponential", "decay": 0.1}],
    zip=["optimizer", "noise"],
    scheduler={"name": "asha", "grace_epochs": 2, "reduction_factor": 2},
    resources=[{"when": {"noise": "constant"}, "cpus": 2, "ranks": 2}, {"cpus": 2, "max_concurrent": 1}],
)


def statuses(folder: Path, sweep: str) -> list[str]:
    """Of the trials of a sweep that ran in this folder."""
    (folder / "notes").mkdir()
    (folder / "noting.py").write_text(NOTES.format(notes=str(folder / "notes")))
    (folder / "sweep.yaml").write_text(sweep)
    done = dpsweep("run", folder / "sweep.yaml", "--output", folder / "out", "--json")
    assert done.returncode == 0, done.stderr
    assert (folder / "notes" / "killed").exists()
    return [trial["status"] for trial in json.loads(done.stdout)["trials"]]


def assert_first_is_undisturbed(folder: Path, text: str) -> None:
    """Whether it has the model of one that lost no rank."""
    sweep = parse_sweep(text)
    (first, *_) = plan_sweep(sweep, permitted(sweep, folder, ())).trials
    assert ended(started({"again": first.spec}, folder, 2)) == [0, 0]
    files = SweepFiles(str(folder / "out")).trial(first.key)
    model, again = (torch.load(path, weights_only=True) for path in (files.model, folder / "again/model.pt"))
    assert all(torch.equal(model[name], again[name]) for name in model)


@pytest.mark.long
def test_a_trial_that_loses_a_rank_ends_like_one_that_did_not(tmp_path: Path) -> None:
    assert statuses(tmp_path, ONE) == ["finished"]
    assert_first_is_undisturbed(tmp_path, ONE)


@pytest.mark.long
def test_a_lost_rank_and_a_stopped_trial(tmp_path: Path) -> None:
    """The first trial loses a rank and ends like one that did not; the second is stopped and leaves both CPUs to the
    third, which has one rank and finds no other placement group than its own."""
    assert statuses(tmp_path, THREE) == ["finished", "stopped", "finished"]
    notes = (path for path in (tmp_path / "notes").iterdir() if path.name != "killed")
    found: list[dict[str, Any]] = [json.loads(note.read_text()) for note in notes]
    ranks = Counter(note["rank"] for note in found)
    assert ranks == {0: 3, 1: 3, None: 2}, "two trials, the first of them twice; the third, and who closes the second"
    for note in found:
        groups = [group for group in note["groups"] if group[0] != "REMOVED"]
        if note["rank"] is None:
            assert {size for _, size in groups} <= {1}, "of the third trial"
        else:
            assert groups == [["CREATED", 2]]
    assert_first_is_undisturbed(tmp_path, THREE)


def test_one_call_lets_a_rank_go_on_and_takes_its_next_report() -> None:
    """Of two calls Ray may begin the later one first, as after SIGSTOP and SIGCONT: one thread alone is free for both,
    and would wait for an epoch that nothing lets begin.
    """
    rank, evaluation = _Rank(), Evaluation(0.5, 1.0, (), {})
    epochs = [Progress(epoch, epoch, 3, 1.0, Trace(100), evaluation) for epoch in (1, 2, 3)]
    with ThreadPoolExecutor(2) as threads:
        training = threads.submit(deque, map(rank._report, epochs), 0)
        calls = (rank.first_report, rank.next_report, rank.next_report)
        assert [threads.submit(call).result(10.0) for call in calls] == epochs
        assert not training.done(), "the last report waits, too"
        rank._may_continue.release()
        training.result(10.0)


def test_ranks_need_ray(tmp_path: Path, command: Command) -> None:
    (tmp_path / "sweep.yaml").write_text(small(resources={"ranks": 2}))
    done = command("run", tmp_path / "sweep.yaml", "--output", tmp_path / "out", "--address", "in-process")
    assert done.code == 2
    assert "resources give a trial 2 ranks, but --address in-process trains in one process" in done.err
