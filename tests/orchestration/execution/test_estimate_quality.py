"""The quality of estimated epsilons, measured on examples whose norms were taken at every step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.execution.completion import quality_of_estimates
from dpsweep.orchestration.store.published import EstimateQuality
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.workers.trials.trial import run_trial
from tests.accounting.stored_trial import account_trial, job_of
from tests.orchestration.sample_grids import small

WORST = 1e9


def quality(folder: Path, **norms: object) -> EstimateQuality:
    """A short run with the given norms, judged by 40 examples tracked exactly."""
    sweep = parse_sweep(
        small(
            clipping={"name": "flat", "bound": 4.0},
            noise="constant",
            seeds=0,
            epochs=4,
            privacy={"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"},
            norms={"exact_examples": 40, **norms},
        )
    )
    spec = plan_sweep(sweep).trials[0].spec
    files = TrialFiles(str(folder))
    run_trial(spec, files.root)
    epsilons = account_trial(job_of(files.root, spec.delta, "rdp"))
    shuffled = replace(epsilons, example_ids=epsilons.example_ids[::-1], upper=epsilons.upper[::-1])
    found = quality_of_estimates(files, [shuffled], read_trace(files.trace), WORST)
    assert found == quality_of_estimates(files, [epsilons], read_trace(files.trace), WORST)
    return found


@pytest.mark.long
def test_norms_of_every_step_leave_nothing_to_estimate_and_those_of_every_epoch_little(tmp_path: Path) -> None:
    exact = quality(tmp_path / "step", refreshes_per_epoch="every_step")
    assert exact.examples == 40
    assert exact.correlation == pytest.approx(1.0, abs=1e-9)
    assert exact.largest_error == pytest.approx(0.0, abs=1e-9)
    estimated = quality(tmp_path / "epoch", refreshes_per_epoch=1)
    assert estimated.correlation is not None
    assert 0.5 < estimated.correlation < 1.0
    assert 0.0 < estimated.mean_error < estimated.largest_error
