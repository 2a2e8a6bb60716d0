"""A sweep without Ray and without interruption: what a run on any cluster has to reproduce."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dpsweep.accounting.records.epsilon_files import Epsilons, read_epsilons
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.own_code.imports import NO_CODE, UserCode
from dpsweep.workers.trials.trial import run_trial
from tests.accounting.stored_trial import account_trial, job_of


def run_undisturbed(sweep: SweepSpec, folder: Path, code: UserCode = NO_CODE) -> SweepFiles:
    """Train and account every trial of the plan in this process."""
    files = SweepFiles(str(folder))
    for planned in plan_sweep(sweep, code).trials:
        root = files.trial(planned.spec.key).root
        run_trial(planned.spec, root, code=code, releases=planned.releases)
        if planned.spec.is_private:
            account_trial(job_of(root, planned.spec.delta, sweep.accounting.individual))
    return files


def assert_same_trial(ours: TrialFiles, theirs: TrialFiles, private: bool) -> None:
    """Equal bits in the model and, for a private trial, in the epsilon of every example."""
    models = [torch.load(files.model, weights_only=True) for files in (ours, theirs)]
    assert models[0].keys() == models[1].keys()
    for name, value in models[0].items():
        assert torch.equal(value, models[1][name]), name
    if private:
        epsilons: list[Epsilons] = [read_epsilons(files.epsilons) for files in (ours, theirs)]
        np.testing.assert_array_equal(epsilons[0].example_ids, epsilons[1].example_ids)
        np.testing.assert_array_equal(epsilons[0].upper, epsilons[1].upper)
