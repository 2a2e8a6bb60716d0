"""What flip_and_crop refuses; what it does is tested where it is trained with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.spec import Component
from dpsweep.workers.training.augmentation import FlipAndCrop, make_augmentation


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
