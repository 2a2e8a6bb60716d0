"""Norms of large layers: what is clipped by them stays within the bound, up to the error that noise allows for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpsweep.workers.clipping.clipping_method import NORM_ERROR
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.gradients.factors import sum_of_squares
from dpsweep.workers.gradients.linear import OuterProducts
from dpsweep.workers.gradients.pass_results import BatchNorms
from dpsweep.workers.models.extra_layers import WeightStandardizedConv2d
from tests.workers.brute_force import per_example_loss
from tests.workers.gradients.test_engine import CASES


@pytest.mark.parametrize("size", [1, 4096, 8191, 8192, 8193, 100_000, 3_000_001])
def test_sum_of_squares_of_many_entries(size: int) -> None:
    torch.manual_seed(0)
    for gradients in (torch.full((2, size), 0.0123), torch.randn(2, size)):
        ratios = sum_of_squares(gradients).double().sqrt() / gradients.double().norm(dim=1)
        assert (ratios - 1.0).abs().max() < 0.5 * NORM_ERROR


def test_clipping_by_the_norm_of_a_large_layer_keeps_the_bound() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3_000_000, 1, bias=False)
    engine = GradientEngine(model, lambda output, y: output[:, 0] * y)

    def clip_at_one(norms: BatchNorms) -> Tensor:
        return (1.0 / norms.norms).clamp(max=1.0)

    clipped = engine.weighted_sum(torch.randn(1, 3_000_000), torch.ones(1), clip_at_one)
    assert clipped.gradients["weight"].double().norm() <= 1.0 + NORM_ERROR


def by_gram(products: OuterProducts) -> Tensor:
    """Squared norms by Gram matrices, and by other means where these mark them as inaccurate."""
    norm_sq = products.methods()["gram"].prepare()[0]
    rows = norm_sq.isnan().nonzero().squeeze(1)
    norm_sq[rows] = products.precise_norm_sq(rows) if len(rows) else norm_sq[rows]
    return norm_sq


@pytest.mark.parametrize("share", [1e-4, 1e-3, 1e-2, 0.1])
def test_positions_that_cancel_keep_the_digits_of_the_norm(share: float) -> None:
    """Equal positions of alternating sign, but for a part that makes up ``share`` of what they cancel."""
    torch.manual_seed(0)
    sign = torch.tensor([1.0, -1.0]).repeat(100, 1)[:, :, None]
    activations = torch.randn(100, 1, 200) + (2.0 * share) ** 0.5 * torch.randn(100, 2, 200)
    products = OuterProducts(activations, sign * torch.randn(100, 1, 10))
    norms = by_gram(products).double().sqrt()
    exact = (products.grads.double().mT @ products.activations.double()).flatten(1).norm(dim=1)
    assert (norms / exact - 1.0).abs().max() < NORM_ERROR


@pytest.mark.parametrize(("length", "width"), [(16, 128), (64, 512), (100, 768)])
def test_repeated_positions_that_cancel_keep_the_digits_of_the_norm(length: int, width: int) -> None:
    """Their terms are rounded alike, so errors add up instead of averaging out."""
    for seed in range(5):
        torch.manual_seed(seed)
        x, first = torch.randn(1, 1, width), torch.randn(width)
        second = first + 0.05 * torch.randn(width)
        grads = torch.cat([first.expand(length // 2, width), -second.expand(length // 2, width)])[None]
        products = OuterProducts(x.repeat(1, length, 1), grads)
        norm = by_gram(products).double().sqrt()
        exact = (products.grads.double().mT @ products.activations.double()).norm()
        assert abs(float(norm / exact) - 1.0) < NORM_ERROR


@pytest.mark.thinned(2)
@pytest.mark.parametrize("positions", [(), (1,), (5,)])
@pytest.mark.parametrize(("small", "large"), [(1e-23, 1e18), (1e-20, 1e12)])
def test_factors_whose_squares_underflow_are_clipped_like_others(
    positions: tuple[int, ...], small: float, large: float
) -> None:
    engine = GradientEngine(nn.Linear(3, 2, bias=False), lambda output, y: (output * y[0]).flatten(1).sum(1))
    x = torch.full((4, *positions, 3), small)
    clipped = engine.weighted_sum(x, torch.full((4,), large), lambda norms: (1e-8 / norms.norms).clamp(max=1.0))
    torch.testing.assert_close(
        clipped.gradients["weight"].double().norm(), torch.tensor(4e-8).double(), rtol=1e-5, atol=0
    )


@pytest.mark.long
def test_standardised_kernels_under_autocast_keep_the_bound() -> None:
    """Their gradients are projected; what is taken away must be known more precisely than half precision is."""
    for seed in range(40):
        torch.manual_seed(seed)
        model = WeightStandardizedConv2d(3, 1, 3)
        engine = GradientEngine(
            model, lambda output, y: output.float().square().flatten(1).sum(1), autocast=torch.bfloat16
        )
        clipped = engine.weighted_sum(torch.randn(1, 3, 5, 5), torch.zeros(1), lambda norms: 1.0 / norms.norms)
        norm = torch.stack([gradient.double().norm() for gradient in clipped.gradients.values()]).norm()
        assert abs(float(norm) - 1.0) < NORM_ERROR


@pytest.mark.thinned(17)
@pytest.mark.parametrize("name", CASES)
def test_what_an_example_adds_under_autocast_keeps_the_bound(name: str) -> None:
    """Gradients are those of bfloat16, but what an example adds to a sum is as long as its norm says: both are made in
    float32 of the same activations and output gradients."""
    torch.manual_seed(0)
    model = CASES[name].model()
    x, y = CASES[name].inputs(3)
    engine = GradientEngine(model, per_example_loss, autocast=torch.bfloat16)
    engine.norms(x, y)
    for example in range(3):
        chosen = torch.nn.functional.one_hot(torch.tensor(example), 3)
        alone = engine.weighted_sum(x, y, lambda norms, chosen=chosen: chosen / norms.norms)  # type: ignore[misc]
        added = torch.cat([gradient.double().flatten() for gradient in alone.gradients.values()]).norm()
        assert abs(float(added) - 1.0) < NORM_ERROR
