"""Augmentation keeps the copies of an example together, and clips their mean."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.workers.trial_runs import train
from tests.workers.trial_specs import small_trial
from workers.augmentation import FlipAndCrop
from workers.data import load_dataset
from workers.gradients import GradientEngine
from workers.losses import build_loss
from workers.models import build_model
from workers.spec import Component, DataSpec, NoiseSpec, SamplingSpec


def test_flips_and_crops_keep_copies_together() -> None:
    images = torch.arange(4.0)[:, None, None, None].expand(4, 3, 8, 8).contiguous()
    augmented = FlipAndCrop(multiplicity=3)(images, torch.Generator().manual_seed(0))
    assert augmented.shape == (12, 3, 8, 8)
    assert augmented[:, 0, 0, 0].tolist() == [float(i) for i in range(4) for _ in range(3)]
    ramp = torch.arange(8.0).expand(1, 1, 8, 8).contiguous()
    plain = FlipAndCrop(multiplicity=50, padding=0)(ramp, torch.Generator().manual_seed(0))
    flipped = (plain[:, 0, 0, 0] == 7.0).sum()
    assert 10 < flipped < 40
    assert torch.equal(plain[plain[:, 0, 0, 0] == 7.0][0], ramp[0].flip(2))
    assert FlipAndCrop(multiplicity=2)(images[:0], torch.Generator()).shape == (0, 3, 8, 8)


def test_augmented_training_clips_the_mean_of_the_copies(tmp_path: Path) -> None:
    """Each example's gradient is the mean over its copies: with K equal copies nothing changes."""
    data = DataSpec("digits", keep={str(digit): 6 for digit in range(10)})
    spec = small_trial(
        data=data,
        model=Component("cnn_dpsgdf", {"channels": [4, 4], "kernel_size": 3, "padding": 1, "hidden": 16}),
        augmentation=Component("flip_and_crop", {"multiplicity": 4, "padding": 1}),
        sampling=SamplingSpec("poisson", 16),
        noise=NoiseSpec(0.0),
        epochs=1,
    )
    dataset = load_dataset(data)
    model = build_model(spec.model, dataset, spec.seed)
    loss = build_loss(spec.loss)
    x, y = dataset.prepare(dataset.train.features[:8]), dataset.train.labels[:8]
    single = GradientEngine(model, loss).norms(x, y)
    copies = GradientEngine(model, loss, multiplicity=4).norms(x.repeat_interleave(4, 0), y.repeat_interleave(4))
    torch.testing.assert_close(single.norms, copies.norms, rtol=1e-4, atol=1e-6)
    result, trace, _ = train(spec, tmp_path)
    assert trace.contributions == "estimate"
    assert result.steps == trace.steps
