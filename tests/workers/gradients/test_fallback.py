"""Modules that run once per example: what the usual ways of writing models ask of that."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.gradients.engine import GradientEngine
from tests.workers.brute_force import gradients_one_by_one, norms_of, per_example_loss
from tests.workers.devices import DEVICE


def batch(rows: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(1)
    return torch.randn(rows, 4, 8, generator=generator), torch.arange(rows) % 3


def assert_agrees(model: nn.Module, x: Tensor, y: Tensor) -> None:
    got = GradientEngine(model, per_example_loss).norms(x, y).norms
    expected = norms_of(gradients_one_by_one(model, x, y))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)


class WithClassToken(nn.Module):
    """A transformer whose outermost module owns a parameter, as vision transformers are written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(torch.cat([self.token.expand(len(x), -1, -1), x], 1))[:, 0])
        return out


@pytest.mark.parametrize("training", [True, False])
def test_transformers_inside_a_module_with_parameters_of_its_own(training: bool) -> None:
    """Within it torch would choose kernels for inference, which have no derivative."""
    assert_agrees(WithClassToken().train(training), *batch())
    assert torch.backends.mha.get_fastpath_enabled()


class Remembering(nn.Module):
    """Attention that keeps its last weights to look at."""

    def __init__(self, *, in_buffer: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Parameter(torch.randn(8))
        self.last: Tensor | None
        if in_buffer:
            self.register_buffer("last", torch.zeros(4))
        else:
            self.last = None

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ self.query).softmax(1)
        self.last = weights.detach()[0]
        return (weights[..., None] * x).sum(1)


def test_nothing_of_a_pass_per_example_stays_in_the_model() -> None:
    model = nn.Sequential(Remembering(in_buffer=False), nn.Linear(8, 3))
    GradientEngine(model, per_example_loss).norms(*batch())
    copied = copy.deepcopy(model)
    assert torch.equal(copied(batch()[0]), model(batch()[0]))
    assert_agrees(model, *batch())


def test_a_buffer_written_per_example_is_refused_by_name_and_put_back() -> None:
    model = nn.Sequential(Remembering(in_buffer=True), nn.Linear(8, 3))
    with pytest.raises(InvalidInput, match=r"'0' \(Remembering\) writes its buffers last"):
        GradientEngine(model, per_example_loss).norms(*batch())
    assert torch.equal(copy.deepcopy(model).state_dict()["0.last"], torch.zeros(4))


class Experts(nn.Module):
    """Experts of whom each sees the positions of all rows that the gate gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 8)
        best, out = self.gate(flat).softmax(1).max(1), torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (chosen,) = (best.indices == number).nonzero(as_tuple=True)
            out = out.index_add(0, chosen, expert(flat[chosen]) * best.values[chosen, None])
        return out.reshape(x.shape)


def test_experts_that_see_some_of_the_rows_run_per_example_with_the_module_around_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Experts(), nn.Flatten(), nn.Linear(32, 3))
    assert_agrees(model, *batch())
    engine = GradientEngine(model, per_example_loss)
    engine.norms(*batch())
    assert set(engine.per_example) == {"1"}


class Matrix(nn.Module):
    """A parameter that its module reads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class RareExpert(nn.Module):
    """A part that only rows with a large first value reach: as ``read`` calls it with these rows."""

    def __init__(self, expert: nn.Module, read: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.expert, self.read, self.head = nn.Linear(8, 8), expert, read, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows, flat = x.flatten(0, -2), self.first(x).flatten(0, -2)
        (chosen,) = (rows[:, 0] > 4.0).nonzero(as_tuple=True)
        if len(chosen):
            flat = flat.index_add(0, chosen, self.read(self.expert, rows[chosen]))
        out: Tensor = self.head(flat.view(len(x), -1, 8).tanh().mean(1))
        return out


RARE: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "a layer": (lambda: nn.Linear(8, 8), lambda expert, rows: expert(rows)),
    "a parameter": (Matrix, lambda expert, rows: expert(rows)),
    "a recurrence": (lambda: nn.GRU(8, 8, batch_first=True), lambda expert, rows: expert(rows[:, None])[0][:, 0]),
}


@pytest.mark.parametrize("chosen", [[(0, 0)], [(0, 0), (0, 1), (1, 0), (1, 1)], [(2, 1)]], ids=str)
@pytest.mark.parametrize("name", RARE)
def test_a_part_that_is_reached_for_the_first_time_is_verified_then(name: str, chosen: list[tuple[int, int]]) -> None:
    """Its rows are those of some examples, and may be as many as the batch has."""
    torch.manual_seed(0)
    make, read = RARE[name]
    model, (x, y) = RareExpert(make(), read), batch()
    engine = GradientEngine(model, per_example_loss)
    for _ in range(3):
        engine.norms(x, y)
    for row, position in chosen:
        x[row, position, 0] = 5.0
    expected = norms_of(gradients_one_by_one(model, x, y))
    torch.testing.assert_close(engine.norms(x, y).norms, expected, rtol=1e-5, atol=0)


class Checkpointed(nn.Module):
    """A layer that runs per example and one with a rule, in a part that is computed again in the backward pass."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again = again
        self.first, self.slope, self.last = nn.Linear(8, 8), nn.PReLU(8), nn.Linear(8, 3)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)

    def part(self, h: Tensor) -> Tensor:
        out: Tensor = self.slope(self.attention(h).transpose(1, 2))
        return out

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = checkpoint(self.part, h, use_reentrant=False) if self.again else self.part(h)
        out: Tensor = self.last(h.mean(2))
        return out


@pytest.mark.parametrize("micro_batch_size", [None, 4])
def test_parts_that_are_computed_again_have_the_same_gradients(micro_batch_size: int | None) -> None:
    results = []
    for again in (False, True):
        torch.manual_seed(2)
        engine = GradientEngine(Checkpointed(again=again), per_example_loss, micro_batch_size=micro_batch_size)
        results.append(engine.weighted_sum(*batch(), lambda norms: 1.0 / norms.norms))
    assert torch.equal(results[0].norms.norms, results[1].norms.norms)
    assert all(torch.equal(results[0].gradients[name], results[1].gradients[name]) for name in results[0].gradients)


def test_attention_with_a_parametrised_part_runs_per_example() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            parametrizations.weight_norm(self.attention.out_proj)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.attention(x, x, x)[0].mean(1))
            return out

    assert_agrees(Attention(), *batch())


class TimeFirst(nn.Module):
    """Writes what a layer gives for [t, b, width] into a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(x.shape[1], len(x), 8)
        out[:] = self.layer(x.transpose(0, 1))
        return out.transpose(0, 1).tanh()


def test_a_part_that_fails_once_the_parts_before_it_run_per_example_does_so_too() -> None:
    torch.manual_seed(0)
    assert_agrees(nn.Sequential(TimeFirst(), TimeFirst(), nn.Flatten(), nn.Linear(32, 3)), *batch())


def test_a_layer_that_is_called_with_other_weights_than_its_own_adds_no_gradient_of_these() -> None:
    class Generated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.made, self.head = nn.Linear(2, 64), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.made(torch.ones(1, 2)).view(8, 8)
            out: Tensor = torch.func.functional_call(self.head, {"weight": weight}, (x.mean(1),))
            return out

    assert_agrees(Generated(), *batch())


@pytest.mark.thinned(2)
@pytest.mark.parametrize("following", [nn.ReLU(inplace=True), nn.Dropout(0.0, inplace=True), nn.LeakyReLU(0.2, True)])
def test_instance_norm_before_a_step_in_place(following: nn.Module) -> None:
    """Its output is a view, whose place in the graph such a step takes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.InstanceNorm2d(4, affine=True), following, nn.Flatten())
    model.append(nn.Linear(4 * 4 * 8, 3))
    x, y = batch()
    assert_agrees(model, x[:, None], y)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="CUDA draws otherwise in place")
def test_dropout_in_place_keeps_the_gradient_of_the_norm_before_it() -> None:
    norms = []
    for inplace in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.InstanceNorm2d(4, affine=True), nn.Dropout(0.5, inplace))
        model.extend([nn.Flatten(), nn.Linear(4 * 4 * 8, 3)])
        x, y = batch()
        norms.append(GradientEngine(model, per_example_loss, layerwise=True).norms(x[:, None], y).layer_norms)
    first, second = norms
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
    assert (first[:, 1] > 0.0).all()


def test_an_adapter_that_shows_the_weight_of_the_layer_inside_computes_none_in_a_hook() -> None:
    class Adapter(nn.Linear):
        weight = property(lambda self: self.base_layer.weight)  # as those of peft have

        def __init__(self) -> None:
            nn.Module.__init__(self)
            torch.manual_seed(0)
            self.base_layer = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base_layer(x.mean(1))
            return out

    assert_agrees(Adapter(), *batch())


@pytest.mark.parametrize("hook", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_weights_computed_in_hooks_are_refused_by_name(hook: type) -> None:
    model = nn.Sequential(nn.Flatten(), hook(nn.Linear(32, 3)))
    with pytest.raises(InvalidInput, match=r"'1' \(Linear\) computes its weight in a hook"):
        GradientEngine(model, per_example_loss)
