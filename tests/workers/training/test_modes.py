"""Modules train in the modes that the author of the model gave them, whatever was evaluated in between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.data import load_dataset
from dpsweep.workers.evaluation.predictions import evaluate
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.gradients.modes import modes_of
from dpsweep.workers.machine.checkpoint import load_checkpoint, save_checkpoint
from dpsweep.workers.spec import Component, NormSpec
from dpsweep.workers.tasks.losses import build_loss
from dpsweep.workers.training.trainer import Trainer
from tests.known import known
from tests.workers.devices import DEVICE
from tests.workers.resumption import assert_same_trial, run_with_deaths
from tests.workers.trial_runs import made_trainer, norms_of, train
from tests.workers.trial_specs import small_trial


def resting_trunk(feature_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A part with dropout that is kept in evaluation, as pretrained ones are handed out, below one that trains."""
    trunk = nn.Sequential(nn.Linear(feature_shape[0], 16), nn.Tanh(), nn.Dropout(0.5)).eval()
    return nn.Sequential(trunk, nn.Linear(16, num_classes))


def resting_whole(feature_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return resting_trunk(feature_shape, num_classes).eval()


TRUNK, WHOLE = Component(f"{__file__}:resting_trunk"), Component(f"{__file__}:resting_whole")
EVERY_STEP = small_trial(model=TRUNK, norms=NormSpec("every_step"), epochs=3)


def trainer_of(model: Component, folder: Path) -> Trainer:
    trainer = made_trainer(replace(EVERY_STEP, model=model), folder)
    trainer.begin()
    return trainer


def run_epoch(trainer: Trainer) -> None:
    while True:
        trainer.step()
        if trainer.at_epoch_end:
            trainer.end_epoch()
            return


@pytest.mark.parametrize("model", [TRUNK, WHOLE], ids=["trunk", "whole"])
def test_training_after_an_evaluation_goes_on_in_the_modes_of_the_author(model: Component, tmp_path: Path) -> None:
    """Norms taken are those of the gradients summed, in every epoch, so contributions are output-specific."""
    trainer = trainer_of(model, tmp_path)
    modes = modes_of(trainer.released_model())
    assert False in modes.values()
    for _ in range(2):
        run_epoch(trainer)
        assert modes_of(trainer.released_model()) == modes
    rows = torch.arange(len(trainer._data), device=DEVICE)
    recorded = trainer._everyone.measure().examples.norms
    used = trainer._clipped_sum(rows).norms.norms
    torch.testing.assert_close(used, recorded, rtol=1e-5, atol=1e-6)
    assert trainer.trace().contributions == "output_specific"


@pytest.mark.thinned(2)
@pytest.mark.parametrize("noise_source", ["seeded", "os_entropy"])
def test_a_part_kept_in_evaluation_resumes_bit_for_bit(
    noise_source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the first evaluation: until then, and afterwards, the trunk computes the same. Norms of a step that
    is replayed are written to the same bytes, or refused."""
    spec = replace(EVERY_STEP, noise_source=noise_source)
    result, _, _ = train(spec, tmp_path / "undisturbed")
    run_with_deaths(spec, tmp_path / "resumed", monkeypatch, [result.steps_per_epoch + 1, 2 * result.steps_per_epoch])
    if noise_source == "seeded":
        assert_same_trial(spec, tmp_path / "undisturbed", tmp_path / "resumed")
    for folder in ("undisturbed", "resumed"):
        assert read_trace(TrialFiles(str(tmp_path / folder)).trace).contributions == "output_specific"


def test_recorded_norms_are_those_of_the_model_that_trains(tmp_path: Path) -> None:
    """A dropout kept in evaluation is none: the same model without it records the same norms at every step."""
    _, _, kept = train(EVERY_STEP, tmp_path / "kept")
    _, _, without = train(replace(EVERY_STEP, model=Component(f"{__file__}:trunk_alone")), tmp_path / "without")
    np.testing.assert_array_equal(norms_of(kept).norms, norms_of(without).norms)


def trunk_alone(feature_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    trunk = nn.Sequential(nn.Linear(feature_shape[0], 16), nn.Tanh())
    return nn.Sequential(trunk, nn.Linear(16, num_classes))


class Changing(nn.Module):
    """Puts a part into another mode, or begins to draw, once it has seen so many training batches."""

    def __init__(self, feature_shape: tuple[int, ...], num_classes: int, what: str, after: int) -> None:
        super().__init__()
        self.what, self.after = what, after
        self.first, self.last = nn.Linear(feature_shape[0], 8), nn.Linear(8, num_classes)
        self.drop = nn.Dropout(0.5).eval()
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + float(self.training)
        changed = self.training and float(self.seen) > self.after
        if changed and self.what == "modes":
            self.drop.train()
        hidden = self.drop(self.first(x).tanh())
        if changed and self.what == "draws":
            hidden = hidden * (torch.rand_like(hidden) + 0.5)
        out: Tensor = self.last(hidden)
        return out


@pytest.mark.long
@pytest.mark.thinned(4)
@pytest.mark.parametrize("what", ["modes", "draws"])
@pytest.mark.parametrize(("after", "claim"), [(12, "estimate"), (10_000, "output_specific")])
def test_a_model_that_changes_itself_later_has_estimates(
    what: str, after: int, claim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on as changed where it is resumed: the checkpoint knows modes and claim."""
    spec = replace(EVERY_STEP, model=Component(f"{__file__}:Changing", {"what": what, "after": after}))
    result, trace, _ = train(spec, tmp_path / "undisturbed")
    assert trace.contributions == claim
    run_with_deaths(spec, tmp_path / "resumed", monkeypatch, [result.steps_per_epoch + 2, result.steps - 1])
    assert_same_trial(spec, tmp_path / "undisturbed", tmp_path / "resumed")


def test_individual_clipping_keeps_its_guarantee_whatever_the_model_does(tmp_path: Path) -> None:
    model = Component(f"{__file__}:Changing", {"what": "modes", "after": 12})
    _, trace, _ = train(replace(EVERY_STEP, model=model, clipping=Component("individual")), tmp_path)
    assert trace.contributions == "output_specific"


def test_evaluation_evaluates_all_parts_and_leaves_each_as_it_was() -> None:
    dataset = load_dataset(EVERY_STEP.data)
    model = nn.Sequential(resting_trunk(dataset.feature_shape, 8), nn.Dropout(0.9), nn.Linear(8, dataset.num_classes))
    before, loss = modes_of(model), build_loss(Component("cross_entropy"))
    assert evaluate(model, dataset.test, dataset, loss) == evaluate(model, dataset.test, dataset, loss)
    assert modes_of(model) == before


def test_a_failed_evaluation_leaves_the_modes() -> None:
    dataset = load_dataset(EVERY_STEP.data)
    model = nn.Sequential(resting_trunk(dataset.feature_shape, 8), nn.Linear(9, dataset.num_classes))
    before = modes_of(model)
    with pytest.raises(RuntimeError):
        evaluate(model, dataset.test, dataset, build_loss(Component("cross_entropy")))
    assert modes_of(model) == before


class MixingInTraining(nn.Module):
    """Subtracts the mean of the batch where it trains."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if self.training else x


def test_a_model_is_checked_again_when_a_part_changes_modes() -> None:
    """The model as a whole is in training all the time."""
    mixing = MixingInTraining().eval()
    model = nn.Sequential(nn.Linear(4, 3), mixing, nn.Tanh(), nn.Linear(3, 2))
    engine = GradientEngine(model, build_loss(Component("cross_entropy")))
    x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    engine.norms(x, y)
    mixing.train()
    with pytest.raises(InvalidInput, match="independently"):
        engine.norms(x, y)


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(TRUNK, tmp_path)
    stored = str(tmp_path / "checkpoint.pt")
    save_checkpoint(stored, "trial", {name: value for name, value in trainer.state().items() if name != "modes"})
    older = known(load_checkpoint(stored, "trial"))
    with pytest.raises(InvalidInput, match=r"lacks modes: another version of dpsweep.*delete the trial's folder"):
        trainer.restore(older)
