"""A probe takes a few real steps and keeps nothing but times and memory."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dpsweep.workers.spec import Component, NormSpec, TrialSpec
from dpsweep.workers.trials.probe import probe_trial
from dpsweep.workers.trials.trial import run_trial


def trial(**changes: object) -> TrialSpec:
    text = """{"key": "a", "data": {"name": "digits"}, "model": {"name": "mlp"}, "clipping": {"name": "flat"},
        "sampling": {"method": "poisson", "batch_size": 128}, "noise": {"initial_noise_multiplier": 1.0},
        "epochs": 6, "delta": 1e-5, "seed": 0}"""
    return replace(TrialSpec.from_json(text), **changes)  # type: ignore[arg-type]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("clipping", ["none", "flat", "individual", "dpsgd_f"])
def test_steps_take_a_part_of_a_trial(temporary: Path, clipping: str) -> None:
    """By CPU time, which other work on the machine does not change."""
    spec = trial(clipping=Component(clipping))
    if clipping == "none":
        spec = replace(spec, noise=replace(spec.noise, initial_noise_multiplier=0.0))
    probe_trial(spec)  # shows that rows are independent, once in a process
    before = torch.random.get_rng_state()
    probe = probe_trial(spec)
    assert torch.equal(before, torch.random.get_rng_state())
    assert list(temporary.iterdir()) == [], "neither norms, nor the model, nor the key of the noise"
    assert probe.steps > 3
    assert probe.memory > 50 * 2**20
    began = time.thread_time()
    result = run_trial(spec, str(temporary / "trial"))
    took = time.thread_time() - began
    assert took / 50.0 < result.steps * probe.step < took, "which is also for norms, evaluation and checkpoints"


def test_a_trial_of_one_step_is_measured_by_it(temporary: Path) -> None:
    spec = trial(epochs=1, norms=NormSpec("every_step"))
    whole = replace(spec, sampling=replace(spec.sampling, batch_size=1438))
    assert probe_trial(whole).steps == 1
    assert list(temporary.iterdir()) == []


def test_a_trial_that_cannot_train_leaves_nothing_either(temporary: Path) -> None:
    with pytest.raises(ValueError, match="cpux"):
        probe_trial(replace(trial(), execution=replace(trial().execution, device="cpux")))
    assert list(temporary.iterdir()) == []
