"""Augmentation keeps the copies of an example together, and clips their mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.data import load_dataset
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.models import build_model
from dpsweep.workers.spec import Component, DataSpec, NoiseSpec, SamplingSpec
from dpsweep.workers.tasks.losses import build_loss
from dpsweep.workers.training.augmentation import FlipAndCrop, augmented, make_augmentation
from tests.workers.trial_runs import train
from tests.workers.trial_specs import small_trial


def test_flips_and_crops_keep_copies_together() -> None:
    images = torch.arange(4.0)[:, None, None, None].expand(4, 3, 8, 8).contiguous()
    copies = FlipAndCrop(multiplicity=3)(images, torch.Generator().manual_seed(0))
    assert copies.shape == (12, 3, 8, 8)
    assert copies[:, 0, 0, 0].tolist() == [float(i) for i in range(4) for _ in range(3)]
    ramp = torch.arange(8.0).expand(1, 1, 8, 8).contiguous()
    plain = FlipAndCrop(multiplicity=50, padding=0)(ramp, torch.Generator().manual_seed(0))
    flipped = (plain[:, 0, 0, 0] == 7.0).sum()
    assert 10 < flipped < 40
    assert torch.equal(plain[plain[:, 0, 0, 0] == 7.0][0], ramp[0].flip(2))
    assert FlipAndCrop(multiplicity=2)(images[:0], torch.Generator()).shape == (0, 3, 8, 8)


def test_masks_move_with_their_pictures() -> None:
    """Pictures whose pixels are their labels stay so; labels of another size are refused."""
    labels = torch.randint(-100, 30_000, (5, 8, 8))
    pictures = labels[:, None].float().expand(5, 3, 8, 8)
    x, y = augmented(FlipAndCrop(multiplicity=4), pictures, labels, torch.Generator().manual_seed(0))
    assert y.dtype == torch.int64
    assert x.shape == (20, 3, 8, 8)
    assert torch.equal(x[:, 1].long(), y)
    assert not torch.equal(y, labels.repeat_interleave(4, 0))
    with pytest.raises(InvalidInput, match=r"labels of pixels have the size \(4, 4\), but pictures \(8, 8\)"):
        augmented(FlipAndCrop(), pictures, labels[:, ::2, ::2], torch.Generator())


@pytest.mark.long
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


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"multiplicity": 0}, "multiplicity of flip_and_crop is 0, but must be at least 1"),
        ({"multiplicity": 2.5}, "multiplicity of flip_and_crop is 2.5, but must be a whole number"),
        ({"padding": -1}, "padding of flip_and_crop is -1, but must be at least 0"),
        ({"padding": float("nan")}, "padding of flip_and_crop is nan"),
        ({"paddin": 1}, "unknown key 'paddin'"),
    ],
)
def test_impossible_parameters(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make_augmentation(Component("flip_and_crop", params))


def test_pictures_that_are_too_small_or_none_are_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(InvalidInput, match=r"padding of flip_and_crop is 8, but .* has 8 x 8 pixels"):
        FlipAndCrop(padding=8)(torch.zeros(2, 1, 8, 8), generator)
    with pytest.raises(InvalidInput, match=r"needs images .* not \(2, 64\)"):
        FlipAndCrop()(torch.zeros(2, 64), generator)
    assert FlipAndCrop(padding=7)(torch.zeros(2, 1, 8, 8), generator).shape == (2, 1, 8, 8)
