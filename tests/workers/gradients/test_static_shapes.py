"""Padded micro-batches: one shape for every batch, the same results, and no example that is left out or added."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.gradients.pass_results import BatchNorms, WeightedSum
from dpsweep.workers.machine.devices import torch_defaults
from dpsweep.workers.spec import ExecutionSpec
from tests.workers.brute_force import per_example_loss
from tests.workers.devices import NAME
from tests.workers.gradients.test_engine import CASES
from tests.workers.training.test_trainer import new_trainer
from tests.workers.trial_specs import small_trial

SOME = (
    "linear",
    "conv2d of 16 channels",
    "embedding",
    "linear on sequences",
    "self-attention",
    "states of a gru",
    "prelu",
)
SIZES = (1, 3, 4, 5, 8, 11)


def clip(norms: BatchNorms) -> Tensor:
    return (0.3 / norms.norms).clamp(max=1.0)


class Shapes:
    """A loss that records the shapes of the outputs and targets it is given."""

    def __init__(self) -> None:
        self.seen = set[tuple[tuple[int, ...], tuple[int, ...]]]()

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        self.seen.add((tuple(output.shape), tuple(y.shape)))
        return per_example_loss(output, y)


def weights_by_layer(norms: BatchNorms) -> Tensor:
    assert norms.layer_norms is not None
    return 0.3 / norms.layer_norms


def require_equal(found: WeightedSum, wanted: WeightedSum) -> None:
    assert found.weights.shape == wanted.weights.shape
    assert found.non_finite == 0
    torch.testing.assert_close(found.norms.norms, wanted.norms.norms, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.norms.layer_norms, wanted.norms.layer_norms, rtol=1e-5, atol=1e-7)
    for parameter, gradient in wanted.gradients.items():
        torch.testing.assert_close(found.gradients[parameter], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.thinned(18)
@pytest.mark.parametrize("multiplicity", [1, 2])
@pytest.mark.parametrize("name", SOME)
def test_padded_micro_batches_have_one_shape_and_the_same_results(name: str, multiplicity: int) -> None:
    torch.manual_seed(0)
    model, shapes = CASES[name].model(), Shapes()
    x, y = CASES[name].inputs(max(SIZES) * multiplicity)
    make = partial(GradientEngine, micro_batch_size=4, multiplicity=multiplicity, layerwise=True)
    padded, plain = make(model, shapes, last_micro_batch="padded"), make(model, per_example_loss)
    padded.norms(x, y)  # verifies the model on a few examples
    shapes.seen.clear()
    for size in SIZES:
        some = x[: size * multiplicity], y[: size * multiplicity]
        expected, norms = plain.norms(*some), padded.norms(*some)
        assert norms.norms.shape == norms.losses.shape == (size,)
        torch.testing.assert_close(norms.norms, expected.norms, rtol=1e-5, atol=1e-7)
        for weigh in (clip, weights_by_layer):
            wanted = plain.weighted_sum(*some, weigh)
            require_equal(padded.weighted_sum(*some, weigh), wanted)
            require_equal(padded.weighted_sum_rowwise(*some, lambda norms, _, weigh=weigh: weigh(norms)), wanted)  # type: ignore[misc]  # no lambda with defaults
    assert len(shapes.seen) == 1


class Root(nn.Module):
    """A layer whose gradient is not finite at zero, which padding is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = self.linear(x) * x.abs().sum(1, keepdim=True).sqrt().log()
        return scale


@pytest.mark.parametrize("together", [False, True])
def test_padding_whose_gradient_is_not_finite_adds_nothing(together: bool) -> None:
    torch.manual_seed(0)
    model, x, y = Root(), torch.rand(7, 3) + 0.5, torch.arange(7) % 3
    engines = [
        GradientEngine(model, per_example_loss, micro_batch_size=4),
        GradientEngine(model, per_example_loss, micro_batch_size=4, last_micro_batch="padded"),
    ]
    for _ in range(2):
        expected, found = (
            engine.weighted_sum(x, y, clip) if together else engine.weighted_sum_rowwise(x, y, lambda n, _: clip(n))
            for engine in engines
        )
        assert found.non_finite == 0
        assert found.norms.norms.shape == (7,)
        for parameter, gradient in expected.gradients.items():
            torch.testing.assert_close(found.gradients[parameter], gradient)


def test_an_example_whose_gradient_is_not_finite_is_counted_beside_padding() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 3), torch.rand(6, 3), torch.arange(6) % 3
    x[5] = torch.inf
    engine = GradientEngine(model, per_example_loss, micro_batch_size=4, last_micro_batch="padded")
    found = engine.weighted_sum_rowwise(x, y, lambda n, _: clip(n))
    assert found.non_finite == 1
    assert found.weights.tolist()[5] == 0.0
    assert all(bool(gradient.isfinite().all()) for gradient in found.gradients.values())


@torch_defaults()
def test_poisson_batches_of_a_trial_have_one_shape_and_lose_no_example(tmp_path: Path) -> None:
    """The same trial with padding and without: the same batches, whose models agree but for rounding."""
    parameters = []
    plain = ExecutionSpec(device=NAME, micro_batch_size=8)
    for execution in (plain, replace(plain, last_micro_batch="padded")):
        trainer = new_trainer(small_trial(execution=execution), tmp_path / execution.last_micro_batch)
        shapes = set[tuple[int, ...]]()
        trainer.step()
        hook = trainer._model.register_forward_pre_hook(partial(note_shape, shapes))
        for _ in range(6):
            trainer.step()
        hook.remove()
        assert (len(shapes) == 1) == (execution.last_micro_batch == "padded")
        parameters.append(torch.cat([each.detach().flatten() for each in trainer._model.parameters()]))
    torch.testing.assert_close(*parameters, rtol=1e-4, atol=1e-5)


def note_shape(seen: set[tuple[int, ...]], module: nn.Module, args: tuple[Tensor]) -> None:
    seen.add(tuple(args[0].shape))


def test_padding_to_no_size_and_unknown_forms_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"execution\.last_micro_batch is padded, .* give a micro_batch_size"):
        ExecutionSpec(last_micro_batch="padded")
    with pytest.raises(InvalidInput, match=r"last_micro_batch is padded, .*; give micro_batch_size"):
        GradientEngine(nn.Linear(2, 1), per_example_loss, last_micro_batch="padded")
    with pytest.raises(InvalidInput, match="last_micro_batch is 'longer', but must be one of shorter, padded"):
        GradientEngine(nn.Linear(2, 1), per_example_loss, last_micro_batch="longer")  # type: ignore[arg-type]
