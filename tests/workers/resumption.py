"""Trials that die and are resumed: how a test kills them, and what must be equal in the end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.records.sealed import read_private_sealed
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.training.trainer import Trainer
from dpsweep.workers.trials.trial import run_trial
from tests.workers.user_modules import code_of


class Killed(BaseException):
    """Stands for the end of the process: nothing may catch it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, steps: Iterator[int]) -> None:
    """The process dies after the update of the given step, before anything about it is stored."""
    original, next_step = Trainer.step, next(steps)

    def step(self: Trainer) -> None:
        nonlocal next_step
        original(self)
        if self.step_count == next_step:
            next_step = next(steps, -1)
            raise Killed

    monkeypatch.setattr(Trainer, "step", step)


def run_with_deaths(spec: TrialSpec, root: Path, monkeypatch: pytest.MonkeyPatch, steps: list[int]) -> None:
    """Kill the trial at each of ``steps``, resuming it every time, and let it end."""
    with monkeypatch.context() as patched:
        kill_at(patched, iter(steps))
        for _ in steps:
            with pytest.raises(Killed):
                run_trial(spec, str(root), code=code_of(spec))
        run_trial(spec, str(root), code=code_of(spec))


def delete_unfinished(root: Path) -> None:
    """Delete what a death within a write has left; resuming has deleted what holds the key of the noise."""
    for unfinished in root.rglob("*.partial"):
        assert "checkpoint" not in unfinished.name, "it holds the key of the noise"
        unfinished.unlink()


def stored_bytes(root: Path) -> dict[str, str]:
    """Digest of every file of a trial but device.json, whose peak memory differs between runs, and its own digest."""
    files = (path for path in root.rglob("*") if path.is_file() and path.name != "device.json")
    return {str(path.relative_to(root)): hashlib.sha256(_comparable(path)).hexdigest() for path in files}


def _comparable(path: Path) -> bytes:
    content = path.read_bytes()
    if path.name != "digests.json":
        return content
    noted = json.loads(read_private_sealed(str(path), "") or b"{}")
    return json.dumps({name: sha256 for name, sha256 in noted.items() if name != "device.json"}).encode()


def assert_same_trial(spec: TrialSpec, undisturbed: Path, resumed: Path) -> None:
    """Both folders hold the same weights, the same bytes in the same files, and the same epsilon."""
    left, right = TrialFiles(str(undisturbed)), TrialFiles(str(resumed))
    before, after = torch.load(left.model, weights_only=True), torch.load(right.model, weights_only=True)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert stored_bytes(undisturbed) == stored_bytes(resumed)
    if spec.is_private:
        epsilons = [account(read_trace(files.trace), spec.delta).epsilon for files in (left, right)]
        assert epsilons[0] == epsilons[1] < float("inf")
