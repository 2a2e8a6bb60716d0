"""Empty batches, gradients that are not finite, refused models, determinism, dtypes, and what is left behind."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.nn import functional
from torch.nn.utils import parametrizations

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.clipping.clipping_method import NORM_ERROR
from dpsweep.workers.gradients.checks import check_model
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.gradients.layers import find_layers
from dpsweep.workers.gradients.pass_results import BatchNorms
from dpsweep.workers.models.extra_layers import WeightStandardizedConv2d
from dpsweep.workers.spec import ExecutionSpec
from dpsweep.workers.training.reproducible import reproducible
from tests.workers.brute_force import gradients_one_by_one, norms_of, per_example_loss, relative_error
from tests.workers.devices import DEVICE, NAME


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        WeightStandardizedConv2d(6, 4, 3),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


def small_batch(rows: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(1)
    return torch.randn(rows, 3, 6, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def clip(norms: BatchNorms) -> Tensor:
    return (0.5 / norms.norms).clamp(max=1.0)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_gets_weight_0_and_touches_no_other(
    bad: float, micro_batch_size: int | None
) -> None:
    model, (x, y) = small_model(), small_batch()
    x[3, 0, 0, 0] = bad
    others = torch.tensor([0, 1, 2, 4, 5])
    engine = GradientEngine(model, per_example_loss, micro_batch_size=micro_batch_size)
    expected = engine.weighted_sum(x[others], y[others], clip)

    for got in (engine.weighted_sum(x, y, clip), engine.weighted_sum_rowwise(x, y, lambda norms, rows: clip(norms))):
        assert got.non_finite == 1
        assert got.norms.norms[3] == math.inf
        assert got.weights[3] == 0
        torch.testing.assert_close(got.norms.norms[others], expected.norms.norms)
        for name, gradient in got.gradients.items():
            torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-4, atol=1e-6)


def test_nothing_is_left_when_no_gradient_is_finite() -> None:
    model, (x, y) = small_model(), small_batch()
    for micro_batch_size in (None, 2):
        engine = GradientEngine(model, per_example_loss, layerwise=True, micro_batch_size=micro_batch_size)
        got = engine.weighted_sum(torch.full_like(x, math.nan), y, lambda norms: torch.ones(6, 4))
        assert got.non_finite == 6
        assert not got.weights.any()
        assert not any(gradient.any() for gradient in got.gradients.values())


@pytest.mark.parametrize("layerwise", [False, True])
def test_an_empty_batch_gives_zeros(layerwise: bool) -> None:
    model, (x, y) = small_model(), small_batch()
    engine = GradientEngine(model, per_example_loss, layerwise=layerwise, micro_batch_size=2)
    seen: list[BatchNorms] = []

    def weigh(norms: BatchNorms) -> Tensor:
        seen.append(norms)
        return torch.zeros(0)

    got = engine.weighted_sum(x[:0], y[:0], weigh)

    assert len(seen) == 1  # a clipping method decides on every step
    assert got.norms.norms.shape == got.norms.losses.shape == (0,)
    assert layerwise == (got.norms.layer_norms is not None)
    assert {name: g.shape for name, g in got.gradients.items()} == {n: p.shape for n, p in model.named_parameters()}
    assert not any(gradient.any() for gradient in got.gradients.values())
    assert got.non_finite == 0


def test_weigh_sees_the_whole_batch_once_and_rowwise_sees_the_parts() -> None:
    model, (x, y) = small_model(), small_batch(5)
    engine = GradientEngine(model, per_example_loss, micro_batch_size=2)
    whole: list[int] = []
    parts: list[slice] = []

    def weigh(norms: BatchNorms) -> Tensor:
        whole.append(len(norms.norms))
        return clip(norms)

    def weigh_rows(norms: BatchNorms, rows: slice) -> Tensor:
        parts.append(rows)
        return clip(norms)

    engine.weighted_sum(x, y, weigh)
    engine.weighted_sum_rowwise(x, y, weigh_rows)
    assert whole == [5]
    assert parts == [slice(0, 2), slice(2, 4), slice(4, 5)]


class Watched(nn.Module):
    """Hands its input on, and counts the tensors it has returned that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.alive.append(sum(one() is not None for one in self.returned))
        out = x.clone()
        self.returned.append(weakref.ref(out))
        return out


def test_what_a_micro_batch_kept_is_freed_before_the_next_one_starts() -> None:
    watched, (x, y) = Watched(), small_batch(8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 5), watched, nn.Linear(5, 3))
    engine = GradientEngine(model, per_example_loss, micro_batch_size=2)
    for _ in range(5):
        engine.norms(x, y)  # the first batch is also verified, and the first and fourth after it compared again
    watched.alive.clear()
    engine.norms(x, y)
    engine.weighted_sum(x, y, clip)
    engine.weighted_sum_rowwise(x, y, lambda norms, rows: clip(norms))
    assert watched.alive == 16 * [0]


def test_losses_are_those_of_the_model() -> None:
    model, (x, y) = small_model(), small_batch()
    expected = per_example_loss(model(x), y).detach()
    torch.testing.assert_close(GradientEngine(model, per_example_loss).norms(x, y).losses, expected)
    paired = GradientEngine(model, per_example_loss, multiplicity=2).norms(x, y).losses
    torch.testing.assert_close(paired, expected.view(3, 2).mean(1))


def test_equal_bits_from_run_to_run() -> None:
    x, y = small_batch()
    engines = [GradientEngine(small_model(), per_example_loss) for _ in range(2)]  # on torch's default device
    with reproducible(ExecutionSpec(device=NAME), seed=0):
        first, second = (engine.weighted_sum(x, y, clip) for engine in engines)
    assert torch.equal(first.norms.norms, second.norms.norms)
    assert all(torch.equal(first.gradients[name], second.gradients[name]) for name in first.gradients)


def test_the_model_and_the_random_state_are_left_as_they_were() -> None:
    model, (x, y) = small_model(), small_batch()
    model.append(nn.LSTM(3, 3, batch_first=True))  # never called usefully: it fails below, inside the pass
    state, before = torch.get_rng_state(), {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the model raises comes through
        GradientEngine(model, lambda output, y: output / (1 // 0)).norms(x, y)
    assert torch.equal(torch.get_rng_state(), state)
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert module.training
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_dropout_draws_the_same_masks_in_norms_and_gradients(micro_batch_size: int | None) -> None:
    """Also where norms and gradients come from two passes: else clipped gradients would exceed their bound."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 50), nn.Dropout(0.5), nn.PReLU(), nn.Dropout(0.5), nn.Linear(50, 3))
    x, y = torch.randn(4, 5), torch.randint(0, 3, (4,))
    engine = GradientEngine(model, per_example_loss, micro_batch_size=micro_batch_size)
    for one in range(4):
        weights = functional.one_hot(torch.tensor(one), 4).float()
        got = engine.weighted_sum(x, y, lambda norms, weights=weights: weights)  # type: ignore[misc]  # mypy infers no lambda with defaults
        total = torch.stack([g.norm() for g in got.gradients.values()]).norm()
        torch.testing.assert_close(got.norms.norms[one], total)


def test_double_precision_stays_double() -> None:
    model, (x, y) = small_model().double(), small_batch()
    x = x.double()
    got = GradientEngine(model, per_example_loss).weighted_sum(x, y, lambda norms: torch.ones(6))
    expected = gradients_one_by_one(model, x, y)
    assert got.norms.norms.dtype == torch.float64
    torch.testing.assert_close(got.norms.norms, norms_of(expected), rtol=1e-11, atol=0)
    for name, gradient in got.gradients.items():
        torch.testing.assert_close(gradient, expected[name].sum(0), rtol=1e-9, atol=1e-12)


def test_channels_last_inputs_and_weights() -> None:
    model, (x, y) = small_model(), small_batch()
    expected = GradientEngine(model, per_example_loss).norms(x, y).norms
    model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(GradientEngine(model, per_example_loss).norms(x, y).norms, expected, rtol=1e-5, atol=0)


def test_autocast_leaves_norms_within_two_percent() -> None:
    model, (x, y) = small_model(), small_batch(32)
    exact = GradientEngine(model, per_example_loss).weighted_sum(x, y, clip)
    cast = GradientEngine(model, per_example_loss, autocast=torch.bfloat16).weighted_sum(x, y, clip)
    assert cast.norms.norms.dtype == torch.float32
    assert not torch.equal(cast.norms.norms, exact.norms.norms)
    torch.testing.assert_close(cast.norms.norms, exact.norms.norms, rtol=0.02, atol=0)
    for name, gradient in cast.gradients.items():
        assert gradient.dtype == torch.float32
        assert relative_error(gradient, exact.gradients[name]) < 0.05


@pytest.mark.parametrize("micro_batch_size", [None, 64, 256])
def test_under_autocast_no_example_moves_the_sum_by_more_than_its_bound(micro_batch_size: int | None) -> None:
    """Half precision would round the sum of a large batch by more than that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
    x, y = 3.0 * torch.randn(512, 20), torch.arange(512) % 2
    engine = GradientEngine(model, per_example_loss, micro_batch_size=micro_batch_size, autocast=torch.bfloat16)
    everyone = engine.weighted_sum(x, y, clip).gradients
    for row in range(12):
        rest = torch.arange(512) != row
        others = engine.weighted_sum(x[rest], y[rest], clip).gradients
        moved = torch.cat([(everyone[name] - others[name]).flatten() for name in everyone]).norm()
        assert moved <= 0.5 * (1.0 + NORM_ERROR)


def test_cancelling_positions_keep_their_digits() -> None:
    """Two positions whose gradients cancel to 1e-5 of their size: Gram matrices alone would lose every digit."""
    torch.manual_seed(0)
    model = nn.Linear(40, 30, bias=False)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return (output[:, 0] - output[:, 1]).sum(1)

    base = torch.randn(5, 1, 40)
    x = torch.cat([base, base + 1e-5 * torch.randn(5, 1, 40)], dim=1)
    exact = (x[:, 0].double() - x[:, 1].double()).norm(dim=1) * math.sqrt(30)
    got = GradientEngine(model, loss).norms(x, torch.zeros(5)).norms
    torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=0)


def _spectral_norm() -> Any:
    normed: Any = parametrizations.spectral_norm(nn.Linear(3, 2))
    return normed.parametrizations.weight[0]


REFUSED: dict[str, tuple[Any, str]] = {
    "BatchNorm2d": (nn.BatchNorm2d(3), "GroupNorm"),
    "BatchNorm1d": (nn.BatchNorm1d(3, affine=False), "GroupNorm"),
    "SyncBatchNorm": (nn.SyncBatchNorm(3), "GroupNorm"),
    "InstanceNorm2d": (nn.InstanceNorm2d(3, track_running_stats=True), "track_running_stats=False"),
    "Embedding": (nn.Embedding(3, 2, max_norm=1.0), "max_norm=None"),
    "EmbeddingBag": (nn.EmbeddingBag(3, 2, sparse=True), "sparse=False"),
    "_SpectralNorm": (_spectral_norm(), "weight_norm"),
    "ScriptModule": (torch.jit.ScriptModule(), "made from"),
    "LSTM": (nn.LSTM(3, 3), "batch_first=True"),
    "MultiheadAttention": (nn.MultiheadAttention(4, 2), "batch_first=True"),
    "LazyLinear": (nn.LazyLinear(3), "forward pass"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_layers_without_per_example_gradients_are_refused_by_name(kind: str) -> None:
    module, remedy = REFUSED[kind]
    model = nn.Sequential(nn.Linear(3, 3), nn.ModuleDict({"inner": module}))
    for refuse in (check_model, lambda model: GradientEngine(model, per_example_loss)):
        with pytest.raises(InvalidInput, match=f"'1.inner' \\({kind}\\).*{remedy}"):
            refuse(model)


def test_batch_norm_is_accepted_in_evaluation_mode_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())
    engine = GradientEngine(model, per_example_loss)
    x, y = torch.randn(6, 3), torch.arange(6) % 3
    engine.norms(x, y)
    model.train()
    with pytest.raises(InvalidInput, match=r"'1' \(BatchNorm1d\) mixes the examples .* return it in \.eval\(\)"):
        engine.norms(x, y)
    without = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False).eval())
    with pytest.raises(InvalidInput, match="mixes the examples"):
        check_model(without)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(InvalidInput, match="nothing to train"):
        check_model(nn.Linear(2, 2).requires_grad_(False))


class PositionsWithoutBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.positions(torch.arange(4))
        return out


@pytest.mark.thinned(2)
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 6])
@pytest.mark.parametrize("first", [1, 3, 4, 6])
def test_a_layer_without_the_batch_is_told_from_one_with_it_whatever_the_number_of_rows(rows: int, first: int) -> None:
    """With four rows the positions are as many."""
    model = PositionsWithoutBatch()
    engine = GradientEngine(model, per_example_loss)
    for count in (first, rows):
        x, y = torch.randn(count, 4, 3), torch.zeros(count, dtype=torch.long)
        found = engine.norms(x, y).norms
        torch.testing.assert_close(found, norms_of(gradients_one_by_one(model, x, y)), rtol=1e-5, atol=0)


class Trimmed(nn.Module):
    """Sums over the positions [b, t, 3] up to the last one that is not 0 in any example."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        present = (x != 0).any(2).sum(1).amax()
        out: Tensor = self.head(torch.tanh(self.inner(x[:, :present])).sum(1))
        return out


def test_a_layer_that_is_given_no_position_has_gradients_of_zero() -> None:
    torch.manual_seed(0)
    model = Trimmed()
    engine = GradientEngine(model, per_example_loss)
    for x in (torch.rand(3, 5, 3) + 0.5, torch.zeros(3, 5, 3)):
        y = torch.arange(3)
        found = engine.weighted_sum_rowwise(x, y, lambda norms, _: torch.ones(3))
        expected = gradients_one_by_one(model, x, y)
        torch.testing.assert_close(found.norms.norms, norms_of(expected), rtol=1e-5, atol=0)
        assert relative_error(found.gradients["head.bias"], expected["head.bias"].sum(0)) < 1e-5
    assert not found.gradients["inner.weight"].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"micro_batch_size": 0}, "micro_batch_size is 0"), ({"multiplicity": 0}, "multiplicity is 0")],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        GradientEngine(nn.Linear(2, 2), per_example_loss, **options)


def test_impossible_batches_and_losses_are_refused() -> None:
    model, (x, y) = small_model(), small_batch()
    with pytest.raises(InvalidInput, match="6 rows and y 5"):
        GradientEngine(model, per_example_loss).norms(x, y[:5])
    with pytest.raises(InvalidInput, match="multiple of 4"):
        GradientEngine(model, per_example_loss, multiplicity=4).norms(x, y)
    with pytest.raises(InvalidInput, match=r"must return one number for each"):
        GradientEngine(model, functional.cross_entropy).norms(x, y)


class Hungry(nn.Module):
    """Lacks memory where a step does more than plain passes do: where ``more`` says so of its input."""

    def __init__(self, more: Callable[[Tensor], bool], mixing: float) -> None:
        super().__init__()
        self.weight, self.more, self.mixing = nn.Parameter(torch.randn(5, 3)), more, mixing

    def forward(self, x: Tensor) -> Tensor:
        if self.more(x):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x @ self.weight + self.mixing * x.detach().mean()


HUNGRY: dict[str, tuple[Callable[[Tensor], bool], float]] = {
    "the input's gradient": (lambda x: x.requires_grad, 0.0),
    "double precision": (lambda x: x.dtype is torch.float64, 1.0),
    "vmap": (is_batchedtensor, 0.0),
}


@pytest.mark.parametrize("name", HUNGRY)
def test_lack_of_memory_is_no_reason_to_verify_less_or_to_blame_the_model(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Hungry(*HUNGRY[name]), nn.Linear(3, 3))
    engine = GradientEngine(model, per_example_loss)
    if name == "vmap":
        engine._verified.layers = find_layers(model, {"0": "it is to run per example"})
    with pytest.raises(torch.OutOfMemoryError):
        engine.norms(torch.randn(4, 5), torch.arange(4) % 3)
