"""Parameters that modules read themselves: on the whole batch, and as if every example ran alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dpsweep.workers.gradients.engine import GradientEngine
from tests.workers.brute_force import gradients_one_by_one, norms_of, per_example_loss
from tests.workers.devices import DEVICE

LENGTH, WIDTH = 5, 8


class Reads(nn.Module):
    """Reads parameters of the given shapes between two layers, in the way of ``read``."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...], read: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own = nn.ParameterList([torch.randn(shape) for shape in shapes])
        self.read = read
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.read(self.first(x), *self.own)).mean(1))
        return out


def token_in_front(x: Tensor, token: Tensor, positions: Tensor) -> Tensor:
    return torch.cat([token.expand(x.shape[0], -1, -1), x], dim=1) + positions


def prompt_repeated(x: Tensor, prompt: Tensor) -> Tensor:
    return torch.cat([prompt.unsqueeze(0).repeat(len(x), 1, 1), x], 1)


def added_in_place(x: Tensor, positions: Tensor) -> Tensor:
    x = x * 1.0
    x += positions
    return x


def normalised(x: Tensor, scale: Tensor) -> Tensor:
    return scale * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(scale.dtype)


def low_rank(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, magnitude: Tensor) -> Tensor:
    """As DoRA composes a weight from its parts."""
    whole = weight + up @ down
    direction = whole / torch.linalg.vector_norm(whole, dim=1, keepdim=True)
    return functional.linear(x, magnitude[:, None] * direction)


def attended(x: Tensor, bias: Tensor) -> Tensor:
    """A bias of the scores that depends on positions alone."""
    return functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], bias[None, None])[:, 0]


def repeated_for_heads(x: Tensor, positions: Tensor, scale: Tensor) -> Tensor:
    """As DeBERTa does with the keys of positions: heads of all rows on one axis."""
    heads, length, width = positions.shape
    split = (x * scale).view(len(x), length, heads, width).transpose(1, 2).reshape(-1, length, width)
    scores = split @ positions.repeat(len(split) // heads, 1, 1).mT
    return (scores @ split).view(len(x), heads, length, width).transpose(1, 2).reshape(x.shape)


def tokens_of(x: Tensor) -> Tensor:
    return (x[:, :, 0].abs() * 3).long().clamp(max=6)


FAST: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., Tensor]]] = {
    "class token and positions": (((1, 1, WIDTH), (1, LENGTH + 1, WIDTH)), token_in_front),
    "class token, expanded with all sizes": (
        ((1, 1, WIDTH),),
        lambda x, token: torch.cat([token.expand((len(x), 1, WIDTH)), x], 1),
    ),
    "token as a vector": (((WIDTH,),), lambda x, token: torch.cat([x, token.expand(len(x), 1, WIDTH)], 1)),
    "expanded as": (((1, 1, WIDTH),), lambda x, token: x * token.expand_as(x)),
    "repeated prompt": (((4, WIDTH),), prompt_repeated),
    "positions without the batch axis": (((LENGTH, WIDTH),), lambda x, positions: x + positions),
    "added in place": (((1, LENGTH, WIDTH),), added_in_place),
    "scale of a norm": (((WIDTH,),), normalised),
    "one number": (((),), lambda x, scale: x / scale.exp() - scale),
    "subtracted from": (((WIDTH,),), lambda x, shift: shift - x),
    "a function of the parameter alone": (((WIDTH,),), lambda x, scale: x * functional.softplus(scale).clamp(min=0.1)),
    "composed weight": (((WIDTH, WIDTH), (2, WIDTH), (WIDTH, 2), (WIDTH,)), low_rank),
    "layer norm of functions": (
        ((WIDTH,), (WIDTH,)),
        lambda x, weight, bias: functional.layer_norm(x, (WIDTH,), weight, bias),
    ),
    "looked up by the batch": (((7, WIDTH),), lambda x, table: x + table[(x[:, :, 0].abs() * 3).long().clamp(max=6)]),
    "contracted": (((WIDTH, WIDTH),), lambda x, weight: torch.einsum("btd,de->bte", x, weight)),
    "product": (((WIDTH, WIDTH),), lambda x, weight: x @ weight),
    "bias of attention": (((LENGTH, LENGTH),), attended),
    "checkpointed": (
        ((WIDTH,),),
        lambda x, scale: checkpoint(lambda h: torch.tanh(h * scale) * h, x, use_reentrant=False),
    ),
    "read in two ways": (((WIDTH, WIDTH),), lambda x, weight: functional.linear(x, weight) + x * weight[0]),
    "repeated for all rows and heads": (((2, LENGTH, 4), (WIDTH,)), repeated_for_heads),
    "linear by its own parameters": (((WIDTH, WIDTH), (WIDTH,)), functional.linear),
    "linear by a function of a parameter": (
        ((WIDTH, WIDTH), (WIDTH,)),
        lambda x, weight, bias: functional.linear(x, weight, bias.exp()),
    ),
    "embedded by its own table": (((7, WIDTH),), lambda x, table: x + functional.embedding(tokens_of(x), table)),
    "embedded by a scaled table": (((7, WIDTH),), lambda x, table: x + functional.embedding(tokens_of(x), 2 * table)),
    "embedded with padding": (
        ((7, WIDTH),),
        lambda x, table: x + functional.embedding(tokens_of(x), table, padding_idx=-2),
    ),
    "as many as rows": (((6, WIDTH),), lambda x, table: x + table.mean(0)),
}

GENERAL: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., Tensor]]] = {
    "positions first": (((LENGTH, 1, WIDTH),), lambda x, positions: (x.transpose(0, 1) + positions).transpose(0, 1)),
    "its values": (((WIDTH,),), lambda x, scale: x * scale if math.isfinite(float(scale.detach().sum())) else x),
}


@pytest.mark.thinned(24)
@pytest.mark.parametrize("multiplicity", [1, 2])
@pytest.mark.parametrize("rows", [2, 4, 6, 10])
@pytest.mark.parametrize("name", FAST)
def test_agrees_with_one_example_at_a_time(name: str, rows: int, multiplicity: int) -> None:
    """Also where axes of a parameter have as many entries as the batch has rows."""
    model = Reads(*FAST[name])
    engine = GradientEngine(model, per_example_loss, multiplicity=multiplicity)
    for count in (6, rows):
        x = torch.randn(count, LENGTH, WIDTH, generator=torch.Generator(DEVICE).manual_seed(1))
        y = torch.arange(count) % 3
        expected = gradients_one_by_one(model, x, y, multiplicity)
        got = engine.weighted_sum(x, y, lambda norms: torch.ones_like(norms.norms))
        torch.testing.assert_close(got.norms.norms, norms_of(expected), rtol=1e-5, atol=0)
        for parameter, gradient in got.gradients.items():
            torch.testing.assert_close(gradient, expected[parameter].sum(0), rtol=1e-4, atol=1e-5)
    assert engine.forms["model"] == "parameters per row"
    assert engine.forms["first"] == engine.forms["last"] == "rule"


@pytest.mark.parametrize("rows", [2, 4, 6, 10])
def test_a_parameter_may_meet_rows_and_positions_on_one_axis(rows: int) -> None:
    model = Reads(((WIDTH, WIDTH),), lambda x, weight: (x.reshape(-1, WIDTH) @ weight).view(x.shape))
    engine = GradientEngine(model, per_example_loss)
    for count in (6, rows):
        x, y = torch.randn(count, LENGTH, WIDTH), torch.arange(count) % 3
        expected = norms_of(gradients_one_by_one(model, x, y))
        torch.testing.assert_close(engine.norms(x, y).norms, expected, rtol=1e-5, atol=0)
    assert engine.forms["model"] == "parameters per row"


@pytest.mark.parametrize("name", GENERAL)
def test_what_cannot_be_told_apart_by_rows_runs_per_example(name: str) -> None:
    model = Reads(*GENERAL[name])
    x, y = torch.randn(6, LENGTH, WIDTH), torch.arange(6) % 3
    engine = GradientEngine(model, per_example_loss, layerwise=True)
    before = engine.layer_names
    norms = engine.norms(x, y)
    torch.testing.assert_close(norms.norms, norms_of(gradients_one_by_one(model, x, y)), rtol=1e-5, atol=0)
    assert engine.forms == {"model": "per example"}
    assert engine.layer_names == before
    assert norms.layer_norms is not None
    assert norms.layer_norms.shape == (6, 3)


def test_parameters_are_put_back_after_a_pass_and_after_an_error() -> None:
    model = Reads(*FAST["class token and positions"])
    before = dict(model.named_parameters())
    engine = GradientEngine(model, per_example_loss)
    engine.norms(torch.randn(6, LENGTH, WIDTH), torch.arange(6) % 3)
    with pytest.raises(RuntimeError):
        engine.norms(torch.randn(6, LENGTH + 1, WIDTH), torch.arange(6) % 3)
    assert all(value is before[name] for name, value in model.named_parameters())


def test_another_way_of_reading_after_the_first_batch_is_verified_then() -> None:
    def read(x: Tensor, weight: Tensor) -> Tensor:
        return (x.reshape(-1, WIDTH) @ weight).view(x.shape) if len(x) == 8 else x @ weight

    model = Reads(((WIDTH, WIDTH),), read)
    engine = GradientEngine(model, per_example_loss)
    for rows in (6, 8):
        x, y = torch.randn(rows, LENGTH, WIDTH), torch.arange(rows) % 3
        expected = norms_of(gradients_one_by_one(model, x, y))
        torch.testing.assert_close(engine.norms(x, y).norms, expected, rtol=1e-5, atol=0)
