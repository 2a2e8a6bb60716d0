"""The U-Net: a logit for each class at every pixel, rows that do not mix, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.models import build_for_shape
from dpsweep.workers.spec import Component


def build(shape: tuple[int, ...] = (3, 16, 24), **params: Any) -> nn.Module:
    return build_for_shape(Component("unet", params), shape, 5, seed=3)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_logits_have_the_size_of_the_picture(depth: int) -> None:
    assert build(width=8, depth=depth)(torch.rand(2, 3, 16, 24)).shape == (2, 5, 16, 24)


def test_its_size_is_that_of_its_layers() -> None:
    """Two convolutions with a norm each: 840 from 3 to 8 channels, 3,552 from 8 to 16, 1,776 from 16 to 8; 520 of the
    transposed convolution; 45 of the head."""
    count = sum(parameter.numel() for parameter in build(width=8, depth=1).parameters())
    assert count == 840 + 3_552 + 520 + 1_776 + 45


def test_pictures_do_not_touch_each_other_and_the_seed_decides() -> None:
    model, x = build(width=4), torch.rand(4, 3, 16, 24)
    torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(x), build(width=4)(x), rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("shape", "params", "message"),
    [
        ((3, 16, 18), {}, "halves pictures 2 times, but they have 16 x 18 pixels; choose a `size` that 4 divides"),
        ((3, 16, 16), {"width": 6}, "width of unet is 6, which 4 groups do not divide"),
        ((64,), {}, "unet takes images"),
    ],
)
def test_what_does_not_fit_is_refused(shape: tuple[int, ...], params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        build(shape, **params)
