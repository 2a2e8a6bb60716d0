"""Layers that see rows and other axes, such as positions, frames or windows, on one axis."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.gradients.layers import Axes
from tests.workers.brute_force import gradients_one_by_one, norms_of, per_example_loss

WIDTH, LENGTH = 4, 6


class Flattened(nn.Module):
    """Runs a layer on all positions of all rows, and classifies the mean of its outputs."""

    def __init__(self, layer: nn.Module, width: int, axes: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.before, self.layer, self.head = nn.Linear(WIDTH, WIDTH), layer, nn.Linear(width, 3)
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        stacked = self.before(x).flatten(0, 1)
        hidden: Tensor = self.layer(stacked.view(-1, *self.axes) if self.axes else stacked)
        out: Tensor = self.head(torch.tanh(hidden).view(len(x), LENGTH, -1).mean(1))
        return out


class PositionsFirst(nn.Module):
    """Positions before rows on the axis that holds both, so that the entries of a row are not consecutive."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        stacked = x.transpose(0, 1).reshape(-1, WIDTH)
        out: Tensor = self.head(torch.tanh(self.layer(stacked)).view(LENGTH, len(x), WIDTH).mean(0))
        return out


class Checkpointed(Flattened):
    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = checkpoint(lambda h: torch.tanh(self.layer(h)), x.flatten(0, 1), use_reentrant=False)
        out: Tensor = self.head(hidden.view(len(x), LENGTH, -1).mean(1))
        return out


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Flattened(nn.Linear(WIDTH, 5), 5),
    "two layers": lambda: Flattened(nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(), nn.Linear(5, 3)), 3),
    "layer norm": lambda: Flattened(nn.LayerNorm(WIDTH), WIDTH),
    "convolution of frames": lambda: Flattened(nn.Conv2d(1, 2, 2), 2, (1, 2, 2)),
    "group norm of frames": lambda: Flattened(nn.GroupNorm(2, WIDTH), WIDTH),
    "checkpointed": lambda: Checkpointed(nn.Linear(WIDTH, 5), 5),
}


def assert_agrees(model: nn.Module, engine: GradientEngine, rows: int, multiplicity: int = 1) -> None:
    """In double precision: a group norm of two values that are nearly equal loses four digits of single precision."""
    x, y = torch.randn(rows, LENGTH, WIDTH, dtype=torch.float64), torch.arange(rows) % 3
    expected = gradients_one_by_one(model, x, y, multiplicity)
    got = engine.weighted_sum(x, y, lambda norms: torch.ones_like(norms.norms))
    torch.testing.assert_close(got.norms.norms, norms_of(expected), rtol=1e-9, atol=0)
    for parameter, gradient in got.gradients.items():
        torch.testing.assert_close(gradient, expected[parameter].sum(0), rtol=1e-9, atol=1e-9)


@pytest.mark.thinned(12)
@pytest.mark.parametrize("multiplicity", [1, 2])
@pytest.mark.parametrize("first", [2, 6, 8])
@pytest.mark.parametrize("name", LAYERS)
def test_rows_that_are_stacked_with_positions_take_their_rule(name: str, first: int, multiplicity: int) -> None:
    """Whatever the numbers of rows in the first and later batches; the layer may have as many positions as rows."""
    torch.manual_seed(0)
    model = LAYERS[name]().double()
    engine = GradientEngine(model, per_example_loss, multiplicity=multiplicity)
    for rows in (first, 2, 6, 12, 4):
        assert_agrees(model, engine, rows, multiplicity)
    assert set(engine.forms.values()) == {"rule"}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("rows", [1, 5, 7])
def test_a_micro_batch_of_one_example_is_no_exception(rows: int) -> None:
    model = LAYERS["two layers"]().double()
    engine = GradientEngine(model, per_example_loss, micro_batch_size=2)
    assert_agrees(model, engine, 1)
    assert_agrees(model, engine, rows)


def test_entries_of_a_row_that_are_not_consecutive_run_once_per_example_in_the_module_around() -> None:
    torch.manual_seed(0)
    model = PositionsFirst().double()
    engine = GradientEngine(model, per_example_loss)
    assert_agrees(model, engine, 4)
    assert engine.per_example == {"model": "it gives layers other rows than those of the batch"}


def test_a_stack_is_only_found_before_gradients_are_verified() -> None:
    """Later an input whose length happens to grow with the batch, as that of texts may, is taken without the batch."""
    axes, passes = Axes(), [(LENGTH, 1), (4 * LENGTH, 4), (2 * LENGTH, 2), (LENGTH, 2)]
    assert [axes.per_row(("input of call", 0), length, rows) for length, rows in passes] == [0, LENGTH, LENGTH, 0]
    axes.stacks = False
    assert [axes.per_row(("input of call", 1), length, rows) for length, rows in passes] == [0, 0, 0, 0]
