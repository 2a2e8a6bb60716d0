"""A trial that is killed and resumed ends with the weights, shards and epsilons of an undisturbed one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpsweep.accounting.mechanism.schedules import SCHEDULES, make_schedule
from dpsweep.workers.clipping import CLIPPING
from dpsweep.workers.noise.noise_sources import NOISE_SOURCES
from dpsweep.workers.sampling.samplers import SAMPLERS
from dpsweep.workers.spec import (
    BudgetSpec,
    Component,
    DataSpec,
    ExecutionSpec,
    NoiseSpec,
    NormSpec,
    SamplingSpec,
    TrialSpec,
)
from dpsweep.workers.training.history import TrainingResult
from dpsweep.workers.training.optimizers import OPTIMIZERS
from dpsweep.workers.training.trainer import Trainer
from dpsweep.workers.trials.trial import run_trial
from tests.accounting.stored_trial import account_trial, job_of
from tests.known import known
from tests.workers import own_clipping
from tests.workers.devices import NAME
from tests.workers.resumption import assert_same_trial, run_with_deaths, stored_bytes
from tests.workers.trial_specs import DROPOUT_NET, FROZEN_TRUNK, TUMOURS, TUMOURS_READ_ONCE, clipping_by, small_trial
from tests.workers.user_modules import code_of

SCHEDULE_PARAMS: Mapping[str, dict[str, Any]] = {
    "constant": {},
    "time": {"decay": 0.5, "every": 2},
    "exponential": {"decay": 0.2, "every": 1, "hold_before": 1},
    "step": {"factor": 0.8, "period": 1, "hold_before": 1, "hold_after": 2},
    "polynomial": {"end_noise_multiplier": 0.5, "period": 3, "power": 2.0},
    "linear": {"end_noise_multiplier": 0.5, "period": 4, "hold_after": 2},
    "cosine": {"end_noise_multiplier": 0.5, "period": 2, "hold_before": 1},
    "validation": {"factor": 0.8, "period": 1, "window": 1, "threshold": 0.5, "hold_before": 1, "hold_after": 3},
}
"""Every schedule so that its noise changes within four epochs."""


EPSILONS_OF_EXAMPLES = [name for name in SAMPLERS if name != "cyclic_poisson"]
"""Samplings with which epsilons of single examples are proven."""
IN_THE_GATE = ("poisson", "fixed", "shuffle", "random_allocation")


def in_the_gate(clipping: str, schedule: str, sampling: str) -> bool:
    """Whether the combination is one of those in which every clipping method and every schedule meet every sampling."""
    if sampling not in IN_THE_GATE:
        return False  # test_correlated_training.py
    with_all = [name for name in CLIPPING if name not in ("none", "filter")]
    if clipping not in with_all:
        return True
    place = with_all.index(clipping) + [*SAMPLERS].index(sampling)
    return [*SCHEDULES][place % len(SCHEDULES)] == schedule


COMBINATIONS = [
    pytest.param(
        clipping, schedule, sampling, marks=[] if in_the_gate(clipping, schedule, sampling) else [pytest.mark.long]
    )
    for clipping, schedule, sampling in itertools.product(CLIPPING, SCHEDULES, SAMPLERS)
    if clipping != "none" or schedule == "constant"  # without clipping there is no noise to schedule
    if clipping != "filter" or sampling == "poisson"  # filters refuse the others
    if sampling in EPSILONS_OF_EXAMPLES or clipping not in ("individual", "filter")
]
"""All of them take minutes together."""


def test_the_table_has_every_schedule_and_every_parameter() -> None:
    assert set(SCHEDULE_PARAMS) == set(SCHEDULES)
    parameters = {field.name for schedule in SCHEDULES.values() for field in fields(schedule)}
    assert {name for params in SCHEDULE_PARAMS.values() for name in params} == parameters - {"initial_noise_multiplier"}


def windowed_trial(clipping: str, schedule: str, sampling: str) -> TrialSpec:
    """Four epochs of two steps, the second of a shuffled epoch smaller than the first. Norms are taken every fourth
    step and checkpoints written every third, so that a death loses steps, a shard and an epoch's evaluation."""
    return small_trial(
        data=TUMOURS_READ_ONCE,
        sampling=SamplingSpec(sampling, 52),
        clipping=clipping_by(clipping),
        noise=NoiseSpec(float(clipping != "none"), Component(schedule, SCHEDULE_PARAMS[schedule])),
        epochs=4,
        norms=NormSpec(0.5 if sampling in EPSILONS_OF_EXAMPLES else "auto"),
        execution=ExecutionSpec(device=NAME, checkpoint_every_epochs=1.5),
    )


def assert_noise_followed(schedule: Component, result: TrainingResult) -> None:
    planned = make_schedule(schedule.name, 1.0, **schedule.params)
    accuracies = [record.public.main for record in result.history if record.public is not None]
    used = [record.noise_multiplier for record in result.history]
    assert used == [planned.noise_multiplier(epoch, accuracies[:epoch]) for epoch in range(result.epochs)]
    assert schedule.name == "constant" or len(set(used)) > 1


@pytest.mark.thinned(10)
@pytest.mark.parametrize(("clipping", "schedule", "sampling"), COMBINATIONS)
def test_every_combination_resumes_bit_for_bit(
    clipping: str, schedule: str, sampling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = windowed_trial(clipping, schedule, sampling)
    result = run_trial(spec, str(tmp_path / "undisturbed"), code=code_of(spec))
    if spec.is_private:
        assert_noise_followed(spec.noise.schedule, result)
    rng = random.Random(f"{clipping} {schedule} {sampling}")
    middle = result.steps // 2
    deaths = [rng.randint(1, middle), rng.randint(middle + 1, result.steps)]
    run_with_deaths(spec, tmp_path / "resumed", monkeypatch, deaths)
    assert_same_trial(spec, tmp_path / "undisturbed", tmp_path / "resumed")


@pytest.mark.long
@pytest.mark.thinned(4)
@pytest.mark.parametrize("sampling", EPSILONS_OF_EXAMPLES)
def test_epsilons_of_all_examples_are_those_of_an_undisturbed_run(
    sampling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = windowed_trial("dpsgd_f", "constant", sampling)
    run_trial(spec, str(tmp_path / "undisturbed"), code=code_of(spec))
    run_with_deaths(spec, tmp_path / "resumed", monkeypatch, [4, 7])
    before, after = (account_trial(job_of(str(tmp_path / name), spec.delta)) for name in ("undisturbed", "resumed"))
    assert np.array_equal(before.upper, after.upper)
    assert (before.lower is None) == (after.lower is None)
    assert before.lower is None or np.array_equal(before.lower, known(after.lower))
    assert np.isfinite(before.upper).all()
    assert before.upper.max() > before.upper.min() > 0.0


KINDS_OF_STATE: Mapping[str, dict[str, Any]] = {
    **{name: {"optimizer": Component(name, {"learning_rate": 0.01})} for name in OPTIMIZERS},
    "learning-rate": {"learning_rate_schedule": Component("cosine", {"warmup_epochs": 1})},
    "average": {"averaging": Component("ema")},
    "private-median": {"clipping": Component("flat", {"bound": {"median_multiple": 1.0}})},
    "dp-pca": {"preprocessing": Component("dp_pca", {"dimensions": 8})},
    "exact": {"norms": NormSpec("every_step", exact_examples=5)},
    "sampled": {"norms": NormSpec("when_sampled", rows_per_part=60)},
    "sampled, bounds change": {"norms": NormSpec("when_sampled"), "clipping": Component("dpsgd_f")},
    "sampled by layer": {"norms": NormSpec("when_sampled"), "clipping": Component("per_layer")},
    "own query": {"clipping": Component(f"{own_clipping.__file__}:NoisyCount", {"bound": 1.0})},
    "dropout": {"model": DROPOUT_NET},
    "frozen": {"model": FROZEN_TRUNK},
    "augmentation": {
        "data": DataSpec("digits", keep={str(digit): 6 for digit in range(10)}),
        "model": Component("cnn_dpsgdf", {"channels": [2, 2], "kernel_size": 3, "padding": 1, "hidden": 8}),
        "augmentation": Component("flip_and_crop", {"multiplicity": 2, "padding": 1}),
    },
    "micro-batches": {"execution": ExecutionSpec(device=NAME, micro_batch_size=5)},
    "no-public-data": {"data": replace(TUMOURS, public_fraction=0.0), "model": Component("mlp", {"hidden": [8]})},
    "budget": {
        "noise": NoiseSpec(4.0, Component("validation", {"factor": 0.5, "period": 1})),
        "budget": BudgetSpec(epsilon=5.0),
        "epochs": 12,
    },
}


@pytest.mark.thinned(16)
@pytest.mark.parametrize("changes", KINDS_OF_STATE.values(), ids=KINDS_OF_STATE)
def test_every_kind_of_state_resumes_bit_for_bit(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_trial(**changes)
    result = run_trial(spec, str(tmp_path / "undisturbed"), code=code_of(spec))
    assert (result.stopped == "budget") == (spec.budget is not None)
    run_with_deaths(spec, tmp_path / "resumed", monkeypatch, [1, 3, 4, result.steps])
    assert_same_trial(spec, tmp_path / "undisturbed", tmp_path / "resumed")


@pytest.mark.long
@pytest.mark.thinned(2)
@pytest.mark.parametrize("noise_source", sorted(set(NOISE_SOURCES) - {"seeded"}))
def test_replayed_steps_repeat_secret_noise(noise_source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs differ, but a resumed run rewrites the very shards it had written: unequal bytes would be an error."""
    spec = small_trial(noise_source=noise_source, norms=NormSpec("every_step"))
    run_with_deaths(spec, tmp_path / "one", monkeypatch, [1, 3, 7])
    run_with_deaths(spec, tmp_path / "two", monkeypatch, [3])
    one, two = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("one", "two"))
    assert not all(torch.equal(one[name], two[name]) for name in one)


def test_a_finished_trial_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_trial(data=replace(TUMOURS, public_fraction=0.0))
    result = run_trial(spec, str(tmp_path))
    before = stored_bytes(tmp_path)
    monkeypatch.delattr(Trainer, "step")
    assert run_trial(spec, str(tmp_path)) == result
    assert stored_bytes(tmp_path) == before
