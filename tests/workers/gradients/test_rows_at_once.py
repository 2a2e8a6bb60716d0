"""How many examples a norm pass takes: by the widths of layers, which are found without a trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpsweep.workers.gradients.modes import modes_of
from dpsweep.workers.gradients.rows_at_once import rows_of_size, widest_layer


class Counting(nn.Module):
    """Draws random numbers and counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.dropout = nn.Dropout(0.5)
        self.inner = nn.Sequential(nn.Linear(6, 50), self.dropout, nn.Linear(50, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.inner(x + torch.rand(()))
        return logits


def test_the_widest_layer_is_found_and_the_model_stays_as_it_is() -> None:
    model = Counting()
    model.dropout.eval()
    modes, drawn = modes_of(model), torch.get_rng_state()
    assert widest_layer(model, torch.zeros(1, 6)) == 50
    assert modes_of(model) == modes
    assert torch.equal(torch.get_rng_state(), drawn)
    assert float(model.calls) == 0.0
    assert not any(module._forward_hooks for module in model.modules())
    assert widest_layer(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten()), torch.zeros(1, 1, 10, 10)) == 4 * 8 * 8


def test_of_a_model_that_does_not_run_on_one_example_nothing_is_known() -> None:
    assert widest_layer(nn.Linear(3, 2), torch.zeros(1, 4)) == 0


@pytest.mark.parametrize("widest", [1, 784, 16_384, 10**9])
def test_fewer_examples_where_layers_are_wide(widest: int) -> None:
    rows = rows_of_size(3072, 270_000, widest)
    assert 16 <= rows <= rows_of_size(3072, 270_000) == 512
    assert rows * widest <= 2**20 or rows == 16
