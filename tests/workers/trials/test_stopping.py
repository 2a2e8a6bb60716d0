"""What is stored of a trial that was stopped: norms and trace as of one that ended there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.records.shards import NormShards
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.spec import ExecutionSpec, NormSpec, TrialSpec
from dpsweep.workers.training.history import Progress
from dpsweep.workers.trials.trial import close_trial, run_trial
from tests.accounting.stored_trial import account_trial, job_of
from tests.workers.devices import NAME
from tests.workers.trial_specs import TUMOURS, clipping_by, small_trial

STOP = 3
"""Epochs after which trials are stopped."""


class Stopped(Exception):
    """By the scheduler."""


def trial(checkpoints: float, refreshes: float = 0.5, epochs: int = 5) -> TrialSpec:
    execution = ExecutionSpec(device=NAME, checkpoint_every_epochs=checkpoints)
    norms, clipping = NormSpec(refreshes), clipping_by("individual")
    return small_trial(data=TUMOURS, clipping=clipping, epochs=epochs, norms=norms, execution=execution)


def stopped(spec: TrialSpec, folder: Path) -> int:
    """Run the trial until it is stopped; returns the steps that it ran."""

    def report(progress: Progress) -> None:
        if progress.epoch == STOP:
            raise Stopped(progress.step)

    with pytest.raises(Stopped) as caught:
        run_trial(spec, str(folder), on_progress=report)
    step: int = caught.value.args[0]
    return step


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("checkpoints", "refreshes"), [(1.0, 0.5), (1.0, 2.0), (2.0, 0.5), (9.0, 1.0)])
def test_its_norms_and_trace_are_those_of_a_trial_that_ended_there(
    checkpoints: float, refreshes: float, tmp_path: Path
) -> None:
    """Also where the last checkpoint lies epochs before, or no norms were stored yet; and however often."""
    spec = trial(checkpoints, refreshes)
    step = stopped(spec, tmp_path / "stopped")
    for _ in range(2):
        close_trial(spec, str(tmp_path / "stopped"), step)
    run_trial(replace(spec, epochs=STOP), str(tmp_path / "whole"))
    ours, theirs = (TrialFiles(str(tmp_path / name)) for name in ("stopped", "whole"))
    assert read_trace(ours.trace) == replace(read_trace(theirs.trace), ended_by_results=True)
    assert read_trace(ours.trace).steps == step
    found, expected = (NormShards(files.norms).read(0) for files in (ours, theirs))
    np.testing.assert_array_equal(found.steps, expected.steps)
    np.testing.assert_array_equal(found.contributions, expected.contributions)
    epsilons = [account_trial(job_of(files.root, 1e-5)) for files in (ours, theirs)]
    np.testing.assert_array_equal(epsilons[0].upper, epsilons[1].upper)


def test_it_is_not_begun_anew(tmp_path: Path) -> None:
    with pytest.raises(DataCorruption, match=r"checkpoint\.pt is missing"):
        close_trial(trial(1.0), str(tmp_path), 2)


def test_steps_of_several_ranks_are_not_repeated_by_one(tmp_path: Path) -> None:
    spec = trial(1.0)
    step = stopped(spec, tmp_path)
    with pytest.raises(InvalidInput, match="began with its gradients shared by 1 rank "):
        close_trial(spec, str(tmp_path), step, ranks=2)
