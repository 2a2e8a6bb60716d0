"""Models as people write them: norms equal those of one example at a time, on the fast path."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.architectures import FTTransformer
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.models import MODELS as REGISTERED
from tests.workers.brute_force import gradients_one_by_one, norms_of

FAST = {"rule", "rewrite", "parameters per row"}
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "FT-transformer": (lambda: FTTransformer(7, 16), (7,)),
    "U-Net": (lambda: REGISTERED["unet"]((3, 16, 16), 3, width=8), (3, 16, 16)),
}


def loss(output: Tensor, y: Tensor) -> Tensor:
    """Of classes, or of the mean over pixels if there is a prediction for each."""
    if output.dim() == 2:
        return functional.cross_entropy(output, y, reduction="none")
    pixels = y.view(-1, 1, 1).expand(-1, *output.shape[2:])
    return functional.cross_entropy(output, pixels, reduction="none").mean((1, 2))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("name", MODELS)
def test_they_take_the_fast_path(name: str, micro_batch_size: int | None) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().train()
    x, y = torch.randn(7, *shape), torch.arange(7) % 3
    engine = GradientEngine(model, loss, micro_batch_size=micro_batch_size)
    got = engine.weighted_sum_rowwise(x, y, lambda norms, rows: torch.ones_like(norms.norms))
    expected = gradients_one_by_one(model, x, y, loss_of=loss)
    torch.testing.assert_close(got.norms.norms, norms_of(expected), rtol=1e-5, atol=0.0)
    for parameter, gradient in got.gradients.items():
        torch.testing.assert_close(gradient, expected[parameter].sum(0), rtol=1e-3, atol=1e-5, msg=parameter)
    assert set(engine.forms.values()) <= FAST
