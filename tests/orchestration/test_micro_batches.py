"""A trial that lacks memory is trained in smaller micro-batches, unless that would cost privacy again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dpsweep.orchestration.execution.environment import IN_PROCESS
from dpsweep.orchestration.pipeline import Outcome, RunRequest, run_sweep
from dpsweep.orchestration.store.attempts import read_attempts
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import permitted
from dpsweep.orchestration.tracking.tracker import NO_TRACKING
from tests.orchestration.sample_grids import small
from tests.orchestration.told import Told

GREEDY = """
import math
import torch
from torch import nn


class Greedy(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)
        self.seen = 0

    def forward(self, features):
        self.seen += self.training  # the planner tries it on a few examples, a few times
        if self.training and len(features) > {most} and self.seen > {after}:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return self.layer(features.flatten(1))


def build(feature_shape, num_classes):
    return Greedy(math.prod(feature_shape), num_classes)
"""
"""A model whose training needs too much memory for more than so many examples at once."""


def run(folder: Path, most: int, after: int, clipping: Sequence[str], told: Told) -> Outcome:
    """after: forward passes of training batches that still have enough memory."""
    (folder / "greedy.py").write_text(GREEDY.replace("{most}", str(most)).replace("{after}", str(after)))
    text = small(model="greedy.py:build", clipping=list(clipping), noise="constant", seeds=0)
    sweep = parse_sweep(text)
    code = permitted(sweep, folder)
    return run_sweep(RunRequest(sweep, text, str(folder / "out"), IN_PROCESS, NO_TRACKING, code), told)


def stored(outcome: Outcome) -> list[dict[str, Any]]:
    specs = [json.loads(Path(outcome.files.trial(point.key).spec).read_text()) for point in outcome.record.points]
    return [spec["execution"] for spec in specs]


@pytest.mark.long
def test_it_starts_anew_with_a_quarter_of_the_micro_batch_until_that_fits(tmp_path: Path) -> None:
    told = Told()
    outcome = run(tmp_path, 20, 0, ["none", "flat"], told)
    assert [outcome.record.status(point.key).state for point in outcome.record.points] == [TrialState.FINISHED] * 2
    assert [execution["micro_batch_size"] for execution in stored(outcome)] == [8, 8], "128, 32, 8"
    said = [each for each in told.warnings if "lacked memory; it starts anew with execution.micro_batch_size: " in each]
    assert [each.rpartition(": ")[2] for each in said] == ["32", "8"] * 2
    assert [len(read_attempts(outcome.files, point.key)) for point in outcome.record.points] == [0, 1]


@pytest.mark.long
def test_one_example_that_is_too_much_fails(tmp_path: Path) -> None:
    outcome = run(tmp_path, 0, 24, ["none"], Told())
    (point,) = outcome.record.points
    status = outcome.record.status(point.key)
    assert status.state is TrialState.FAILED
    assert "does not suffice at execution.micro_batch_size: 1 " in str(status.error)


@pytest.mark.parametrize(("clipping", "state"), [("flat", TrialState.FAILED), ("none", TrialState.FINISHED)])
def test_a_private_trial_that_has_shown_an_epoch_is_left_to_its_user(
    clipping: str, state: TrialState, tmp_path: Path
) -> None:
    """What it showed has cost privacy, which another start would cost again; a baseline has no such cost."""
    told = Told()
    outcome = run(tmp_path, 40, 19, [clipping], told)
    (point,) = outcome.record.points
    assert outcome.record.status(point.key).state is state, outcome.record.status(point.key).error
    assert any("lacked memory" in each for each in told.warnings) == (clipping == "none")
    if clipping == "flat":
        assert len(read_attempts(outcome.files, point.key)) == 1
        assert Path(outcome.files.trial(point.key).checkpoint).exists()
