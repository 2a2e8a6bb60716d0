"""How often a step asks for a value on the device, counted by operators on the CPU: each time a GPU would run dry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.gradients.pass_results import BatchNorms
from dpsweep.workers.models import build_for_shape
from dpsweep.workers.models.extra_layers import WeightStandardizedConv2d
from dpsweep.workers.spec import Component
from tests.workers.brute_force import gradients_one_by_one, norms_of, per_example_loss
from tests.workers.gradients.test_engine import CASES, IMAGE, Case, image_model

WAITING = frozenset(
    {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "bincount", "isin"}
    | {"_unique", "_unique2", "unique_dim", "unique_consecutive", "linalg_matrix_rank"}
)
"""Operators whose result, or its shape, the host must wait for."""


class Waits(TorchDispatchMode):
    """Counts such operators by name, and indexing by masks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            index is not None and index.dtype is torch.bool for index in args[1]
        )
        if name in WAITING or masked or (name == "repeat_interleave" and func._overloadname == "Tensor"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def bundled(name: str, shape: tuple[int, ...]) -> Case:
    return Case(lambda: build_for_shape(Component(name), shape, 3, seed=0), shape)


STEPS = {
    **{name: bundled(name, (3, 32, 32)) for name in ("resnet20_gn", "wrn16_4", "transformer")},
    "logistic": bundled("logistic", (40,)),
    **{
        name: CASES[name]
        for name in ("embedding", "linear on sequences", "self-attention", "states of a gru", "own parameter", "prelu")
    },
    "conv2d of 16 channels": CASES["conv2d of 16 channels"],
    "weight-standardised conv2d": CASES["weight-standardised conv2d"],
}


def clip(norms: BatchNorms) -> Tensor:
    return (1.0 / norms.norms).clamp(max=1.0)


def counted(run: Callable[[], object]) -> Counter[str]:
    waits = Waits()
    with waits:
        run()
    return waits.counts


@pytest.mark.long
@pytest.mark.thinned(16)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n == "wrn16_4" else n for n in STEPS])
def test_a_step_waits_for_the_device_once(name: str) -> None:
    torch.manual_seed(0)
    model, (x, y) = STEPS[name].model(), STEPS[name].inputs(4)
    assert counted(lambda: per_example_loss(model(x), y).sum().backward()).total() == 0
    for size in (None, 2):
        engine = GradientEngine(model, per_example_loss, micro_batch_size=size)
        for _ in range(2):
            engine.norms(x, y)  # verifies the model, and compares it again
        steps = {
            "norms": counted(lambda engine=engine: engine.norms(x, y)),  # type: ignore[misc]  # no lambda with defaults
            "sum": counted(lambda engine=engine: engine.weighted_sum_rowwise(x, y, lambda norms, rows: clip(norms))),  # type: ignore[misc]
        }
        assert {step: counts.total() for step, counts in steps.items()} == {"norms": 1, "sum": 1}, steps


def cancelling(rows: int) -> tuple[nn.Module, Tensor]:
    """A linear layer on positions that cancel in every other row."""
    x = torch.randn(rows, 1, 40).repeat(1, 2, 1)
    x[::2, 1] *= -1.0 - 1e-3
    last = nn.Linear(60, 3)
    with torch.no_grad():
        last.weight[:, 30:] = last.weight[:, :30]
    return nn.Sequential(nn.Linear(40, 30), nn.Flatten(), last), x


@pytest.mark.thinned(2)
@pytest.mark.parametrize("weigh_together", [False, True])
@pytest.mark.parametrize("size", [None, 3, 1])
def test_norms_that_lost_digits_are_computed_again_before_they_weigh(size: int | None, weigh_together: bool) -> None:
    torch.manual_seed(0)
    model, x = cancelling(7)
    y = torch.arange(7) % 3
    expected = gradients_one_by_one(model, x, y)
    engine = GradientEngine(model, per_example_loss, micro_batch_size=size)
    for _ in range(2):  # from the second time on each micro-batch is looked at for itself
        if weigh_together:
            got = engine.weighted_sum(x, y, clip)
        else:
            got = engine.weighted_sum_rowwise(x, y, lambda norms, rows: clip(norms))
        torch.testing.assert_close(got.norms.norms, norms_of(expected), rtol=1e-5, atol=0.0)
        assert got.non_finite == 0
        for name, gradient in got.gradients.items():
            clipped = torch.tensordot(clip(got.norms), expected[name], 1)
            torch.testing.assert_close(gradient, clipped, rtol=1e-4, atol=1e-6)


def test_the_layer_on_cancelling_positions_loses_digits() -> None:
    """Or the test above would show nothing."""
    torch.manual_seed(0)
    model, x = cancelling(7)
    engine, y = GradientEngine(model, per_example_loss), torch.arange(7) % 3
    engine.norms(x, y)
    assert counted(lambda: engine.norms(x, y))["nonzero"] > 0


@dataclass(frozen=True)
class Gains:
    """Gains of two channels, before one of several steps."""

    first: float
    second: float


@pytest.mark.long
@pytest.mark.thinned(2)
@pytest.mark.parametrize("size", [None, 2])
def test_gains_that_become_too_small_to_divide_by_change_bits_at_no_other_step(size: int | None) -> None:
    torch.manual_seed(0)
    layer = WeightStandardizedConv2d(4, 2, 3)
    model = image_model(layer, 2)
    x, y = Case(lambda: model, IMAGE).inputs()
    engine = GradientEngine(model, per_example_loss, micro_batch_size=size)
    for gains in (Gains(1.0, 2.0), Gains(1.0, 0.0), Gains(1.0, 1e-5), Gains(1.0, 0.7), Gains(0.9, 0.8)):
        with torch.no_grad():
            layer.gain.copy_(torch.tensor([gains.first, gains.second]))
        expected = norms_of(gradients_one_by_one(model, x, y))
        resumed = GradientEngine(model, per_example_loss, micro_batch_size=size)
        for got in (engine.norms(x, y).norms, engine.weighted_sum_rowwise(x, y, lambda n, _: clip(n)).norms.norms):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=0.0)
            assert torch.equal(got, resumed.norms(x, y).norms)


class Operators(TorchDispatchMode):
    """Counts the operators that compute something: views are left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = [each.alias_info for each in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returned)
        self.count += not is_view and func.overloadpacket.__name__ != "_unsafe_view"
        return func(*args, **(kwargs or {}))


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("name", "most"), [("logistic", 27), ("resnet20_gn", 534), ("wrn16_4", 1212), ("transformer", 271)]
)
def test_a_step_takes_no_more_operators_than_documented(name: str, most: int) -> None:
    torch.manual_seed(0)
    model, (x, y) = STEPS[name].model(), STEPS[name].inputs(4)
    engine = GradientEngine(model, per_example_loss)
    for _ in range(2):
        engine.norms(x, y)  # verifies the model, and compares it again
    with Operators() as operators:
        engine.weighted_sum_rowwise(x, y, lambda norms, rows: clip(norms))
    assert operators.count <= most
