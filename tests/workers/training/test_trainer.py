"""Training runs on real data: what they store, what single steps do, and the edge cases that decide correctness."""

from __future__ import annotations

import json
import math
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.data import Dataset, Split, load_dataset
from dpsweep.workers.evaluation.outcomes import Outcomes, read_outcomes
from dpsweep.workers.evaluation.predictions import Predictions
from dpsweep.workers.noise.gaussian_sources import SeededNoise
from dpsweep.workers.spec import BudgetSpec, Component, ExecutionSpec, NoiseSpec, NormSpec, SamplingSpec, TrialSpec
from dpsweep.workers.tasks.losses import Loss
from dpsweep.workers.training.batch_gradients import LocalGradients
from dpsweep.workers.training.history import Progress, read_training_result
from dpsweep.workers.training.trainer import Trainer
from dpsweep.workers.trials.trained_model import load_trained
from dpsweep.workers.trials.trial import run_trial
from tests.workers.devices import NAME
from tests.workers.trial_runs import TRAIN_SIZE, made_trainer, norms_of, train
from tests.workers.trial_specs import TUMOURS, small_trial
from tests.workers.user_modules import code_of


def new_trainer(spec: TrialSpec, root: Path) -> Trainer:
    trainer = made_trainer(spec, root)
    trainer.begin()
    return trainer


def flat_parameters(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in trainer.released_model().parameters()])


def test_a_trial_stores_its_spec_trace_norms_model_and_history(tmp_path: Path) -> None:
    reported: list[Progress] = []
    spec = small_trial(norms=NormSpec(3.0))
    result, trace, files = train(spec, tmp_path, on_progress=reported.append)
    assert TrialSpec.from_json(Path(files.spec).read_bytes()) == spec
    assert read_training_result(files.training) == result
    assert (result.epochs, result.steps, result.stopped) == (2, trace.steps, "completed")
    assert [record.epoch for record in result.history] == [0, 1]
    assert [(p.epoch, p.step, p.total_steps) for p in reported] == [
        (1, trace.steps // 2, trace.steps),
        (2, trace.steps, trace.steps),
    ]
    assert reported[-1].trace == trace
    assert reported[0].trace == trace.until(trace.steps // 2)
    assert reported[-1].evaluation == result.history[-1].test
    norms = norms_of(files)
    dataset = load_dataset(spec.data)
    assert np.array_equal(norms.example_ids, dataset.train.example_ids.numpy())
    assert np.array_equal(norms.groups, dataset.train.groups.numpy())
    assert len(norms.steps) == 2 * 3
    assert norms.steps[0] == 0


def test_test_data_are_predicted_once_for_each_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation after the last epoch and what is stored of the final model are read off the same predictions."""
    predicted: list[bool] = []

    def counted(self: LocalGradients, model: nn.Module, split: Split, dataset: Dataset, loss: Loss) -> Predictions:
        predicted.append(split is dataset.test)
        return original(self, model, split, dataset, loss)

    original = LocalGradients.predict
    monkeypatch.setattr(LocalGradients, "predict", counted)
    result, _, files = train(small_trial(), tmp_path)
    assert predicted.count(True) == result.epochs
    stored = read_outcomes(files.outcomes)
    assert isinstance(stored, Outcomes)
    assert (stored.predicted == stored.labels).mean() == result.history[-1].test.accuracy


def test_a_root_may_be_a_uri(tmp_path: Path) -> None:
    """Object stores and local paths are the same code; a file URI stands for them here."""
    train(small_trial(), tmp_path / "path")
    run_trial(small_trial(), (tmp_path / "uri").as_uri())
    stored = [sorted(p.relative_to(tmp_path / root) for p in (tmp_path / root).rglob("*")) for root in ("path", "uri")]
    assert stored[0] == stored[1]


def test_private_files_are_private_and_public_ones_hold_nothing_of_single_examples(tmp_path: Path) -> None:
    _, _, files = train(small_trial(norms=NormSpec(exact_examples=3)), tmp_path)
    private = Path(files.private)
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in private.rglob("*") if path.is_file()} == {0o600}
    public = {path.name for path in tmp_path.rglob("*") if path.is_file() and private not in path.parents}
    assert public == {"spec.json", "trace.arrow", "model.pt", "inputs.pt", "training.json", "device.json"}
    words = set(json.loads(Path(files.training).read_text()))
    assert words.isdisjoint({"norms", "contributions", "losses", "counters", "non_finite_gradients"})


def test_a_trial_computes_in_full_single_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFloat-32, which torch allows cuDNN, would let clipped gradients exceed their bound."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    during: list[tuple[bool, str]] = []

    def note(progress: Progress) -> None:
        during.append((torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()))

    train(small_trial(), tmp_path, on_progress=note)
    assert during == [(False, "highest")] * 2
    assert torch.backends.cudnn.allow_tf32


def test_one_step_is_the_clipped_sum_over_the_expected_batch_size(tmp_path: Path) -> None:
    """Without noise the update is known exactly; the realised batch size must not appear in it."""
    spec = small_trial(
        noise=NoiseSpec(0.0),
        clipping=Component("flat", {"bound": 0.5}),
        optimizer=Component("sgd", {"learning_rate": 2.0}),
    )
    trainer, twin = new_trainer(spec, tmp_path / "one"), new_trainer(spec, tmp_path / "two")
    before = flat_parameters(trainer)
    trainer.step()
    rows = torch.from_numpy(twin._sampler.next_batch())
    assert len(rows) != spec.sampling.batch_size
    x, y = twin._data.inputs(rows)
    expected = spec.sampling.expected_size(len(twin._data))
    total = torch.zeros_like(before)
    for row in range(len(rows)):
        model = twin.released_model()
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x[row : row + 1]), y[row : row + 1]).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        total += gradient * min(1.0, 0.5 / float(gradient.norm()))
    torch.testing.assert_close(flat_parameters(trainer), before - 2.0 * total / expected)


@pytest.mark.parametrize("noise_source", ["seeded", "os_entropy", "os_entropy_secure"])
def test_noise_has_the_stated_scale_also_on_empty_batches(noise_source: str, tmp_path: Path) -> None:
    spec = small_trial(
        noise_source=noise_source,
        noise=NoiseSpec(50.0),
        clipping=Component("flat", {"bound": 0.1}),
        sampling=SamplingSpec("poisson", 1),
        model=Component("mlp", {"hidden": [200]}),
        optimizer=Component("sgd", {"learning_rate": 1.0}),
        norms=NormSpec(1.0),
    )
    trainer = new_trainer(spec, tmp_path)
    seen_empty = False
    for _ in range(30):
        before, empty = flat_parameters(trainer), trainer.counters.empty_batches
        trainer.step()
        moved = flat_parameters(trainer) - before
        assert float(moved.std()) == pytest.approx(50.0 * 0.1 / 1, rel=0.06)
        seen_empty |= trainer.counters.empty_batches > empty
    assert seen_empty
    assert trainer.trace().steps == 30


@pytest.mark.parametrize("name", ["flat", "quantile", "dpsgd_f"])
def test_noise_is_scaled_to_the_sensitivity_and_covers_the_rounding_of_norms(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clipped gradient may exceed its bound by 1e-5 of it; every parameter gets the same noise std."""
    trainer = new_trainer(small_trial(noise=NoiseSpec(1.5), clipping=Component(name, {"bound": 3.0})), tmp_path)
    normal, stds = trainer._noise.normal, list[tuple[int, float]]()

    def recorded(shape: tuple[int, ...], std: float) -> torch.Tensor:
        stds.append((math.prod(shape), std))
        return normal(shape, std)

    monkeypatch.setattr(trainer._noise, "normal", recorded)
    trainer.step()
    sensitivity = trainer._rule.sensitivity
    assert sensitivity == 3.0 or name == "dpsgd_f"
    queries = {"quantile": [(1, 10.0)], "dpsgd_f": [(4, 10.0)]}.get(name, [])
    assert stds[: len(queries)] == queries
    assert [std for _, std in stds[len(queries) :]] == [pytest.approx(1.5 * sensitivity * 1.00001, rel=1e-9)] * 2


def test_the_initial_median_gets_the_noise_of_each_of_its_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise multiplier 20, sensitivity 1/2 and 12 rounds that together are one release."""
    normal, stds = SeededNoise.normal, list[float]()

    def recorded(source: SeededNoise, shape: tuple[int, ...], std: float) -> torch.Tensor:
        stds.append(std)
        return normal(source, shape, std)

    monkeypatch.setattr(SeededNoise, "normal", recorded)
    median = {"median_multiple": 1.0, "noise_multiplier": 20.0, "rounds": 12}
    new_trainer(small_trial(clipping=Component("flat", {"bound": median})), tmp_path)
    assert stds == [pytest.approx(0.5 * 20.0 * 12**0.5)] * 12


def test_schedules_are_shown_the_public_split_and_reports_the_test_split(tmp_path: Path) -> None:
    spec = small_trial()
    dataset, trainer = load_dataset(spec.data), new_trainer(spec, tmp_path)
    while not trainer.step_count or not trainer.at_epoch_end:
        trainer.step()
    record = trainer.end_epoch()
    assert dataset.public is not None
    assert record.public is not None
    sizes = [sum(group.examples for group in found.groups) for found in (record.test, record.public)]
    assert sizes == [len(dataset.test), len(dataset.public)]
    assert len({len(dataset.train), *sizes}) == 3, "they can be told apart"


RISING = NoiseSpec(0.0, Component("linear", {"end_noise_multiplier": 0.5, "period": 2}))
"""No noise in the first of two epochs."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": SamplingSpec("poisson", TRAIN_SIZE + 1)}, f"batch_size is .* {TRAIN_SIZE} training examples"),
        ({"clipping": Component("none")}, "multiplier reaches 1, but without clipping the sensitivity is infinite"),
        ({"clipping": Component("none"), "noise": RISING}, "reaches 0.25, but without clipping"),
        ({"epochs": 0}, "epochs is 0"),
        ({"learning_rate_schedule": Component("cosine", {"warmup_epochs": -1})}, "warmup_epochs is -1"),
        ({"execution": ExecutionSpec(device="gpu")}, "unknown device 'gpu'"),
        ({"execution": ExecutionSpec(device="meta")}, "unknown device 'meta'"),
        ({"execution": ExecutionSpec(device="cuda:64")}, r"device is 'cuda:64', but torch finds \d+ CUDA devices here"),
        ({"budget": BudgetSpec(epsilon=1e-4)}, "does not pay for one epoch"),
        ({"optimizer": Component("sgd", {"learning_rate": -1.0})}, "learning_rate is -1"),
        (
            {
                "noise": NoiseSpec(1.0, Component("validation", {"factor": 0.5, "period": 1})),
                "data": replace(TUMOURS, public_fraction=0.0),
            },
            "needs public data",
        ),
    ],
)
def test_impossible_trials_are_refused_in_words(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=message):
        run_trial(small_trial(**changes), str(tmp_path))
    assert not Path(TrialFiles(str(tmp_path)).training).exists()


def test_micro_batches_change_memory_and_not_the_result(tmp_path: Path) -> None:
    whole, _, whole_files = train(small_trial(), tmp_path / "whole")
    parts, _, parts_files = train(
        small_trial(execution=ExecutionSpec(device=NAME, micro_batch_size=5)), tmp_path / "parts"
    )
    left, right = (torch.load(files.model, weights_only=True) for files in (whole_files, parts_files))
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-6)
    assert whole.evaluation.accuracy == parts.evaluation.accuracy


def test_a_trial_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(11)
    before = (torch.get_rng_state(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    run_trial(small_trial(), str(tmp_path))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())


def half_trunk(feature_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A frozen layer in half precision below one that trains."""
    trunk = nn.Linear(feature_shape[0], 8).bfloat16().requires_grad_(False)
    return nn.Sequential(trunk, nn.Tanh(), nn.Linear(8, num_classes))


def test_a_frozen_trunk_in_half_precision_runs_under_autocast_wherever_it_runs(tmp_path: Path) -> None:
    spec = small_trial(model=Component(f"{__file__}:half_trunk"), norms=NormSpec("every_step"))
    with pytest.raises(InvalidInput, match=r"frozen parameters are torch.bfloat16.*execution.autocast: true"):
        run_trial(spec, str(tmp_path / "without"), code=code_of(spec))
    spec = replace(spec, execution=replace(spec.execution, autocast=True))
    result = run_trial(spec, str(tmp_path), code=code_of(spec))
    files = TrialFiles(str(tmp_path))
    assert read_trace(files.trace).contributions == "estimate", "rounding depends on the batch size"
    stored, test = read_outcomes(files.outcomes), load_dataset(spec.data).test
    assert isinstance(stored, Outcomes)
    logits = load_trained(files, spec, code_of(spec)).logits(test.features)
    assert np.array_equal(logits.argmax(1), stored.predicted)
    assert result.evaluation.accuracy == (stored.predicted == test.labels.numpy()).mean()


def test_averaged_parameters_are_what_is_evaluated_and_stored(tmp_path: Path) -> None:
    plain, _, plain_files = train(small_trial(epochs=4), tmp_path / "plain")
    averaged, _, averaged_files = train(small_trial(epochs=4, averaging=Component("ema")), tmp_path / "averaged")
    left, right = (torch.load(files.model, weights_only=True) for files in (plain_files, averaged_files))
    assert not torch.equal(left["1.weight"], right["1.weight"])
    assert plain.evaluation.loss != averaged.evaluation.loss


@pytest.mark.parametrize(("source", "research"), [("seeded", True), ("os_entropy", False)])
def test_a_model_with_noise_from_a_known_seed_is_called_research(source: str, research: bool, tmp_path: Path) -> None:
    found = train(small_trial(noise_source=source, epochs=1), tmp_path)[0]
    assert ("known_seed" in found.reasons) is research
