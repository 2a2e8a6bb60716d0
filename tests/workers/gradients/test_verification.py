"""What the check on the first batch finds: it sees the model as it trains, but for chance."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torchvision.ops import StochasticDepth

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.gradients.engine import GradientEngine
from tests.workers.brute_force import per_example_loss
from tests.workers.devices import DEVICE
from tests.workers.gradients.adversarial import Between, Step, batch, model


def _mixup(m: Between, h: Tensor) -> Tensor:
    return 0.5 * h + 0.5 * h[torch.randperm(len(h))] if m.training else h


def _like_some_row(m: Between, h: Tensor) -> Tensor:
    return h + h[torch.randint(len(h), (1,))] if m.training else h


def _mixup_by_beta(m: Between, h: Tensor) -> Tensor:
    if not m.training:
        return h
    share = torch.distributions.Beta(0.2, 0.2).sample()
    return share * h + (1.0 - share) * h[torch.randperm(len(h))]


def _mixup_now_and_then(m: Between, h: Tensor, above: bool) -> Tensor:
    return _mixup(m, h) if m.training and bool(torch.rand(()) > 0.5) is above else h


def _with_normalised_noise(m: Between, h: Tensor) -> Tensor:
    noise = torch.randn_like(h)
    return h - h.mean(0) + (noise - noise.mean(1, keepdim=True)) / noise.std(1, keepdim=True)


@torch.library.custom_op("dpsweep_tests::mask", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded])
def mask(like: Tensor) -> Tensor:
    """Draw as a fused kernel does, outside the operators that can be replaced."""
    return (torch.rand_like(like) > 0.5).to(like.dtype)


def _as_chosen(m: Between, h: Tensor) -> Tensor:
    out: Tensor = torch.cond(torch.tensor(True), lambda z: z.relu(), lambda z: z.tanh(), (h,))
    return out - m.training * out.mean(0)


MIXING: dict[str, Step] = {
    "subtracts the mean beside random slopes": lambda m, h: functional.rrelu(h, training=True) - m.training * h.mean(0),
    "subtracts the mean beside a kernel that draws": lambda m, h: h * mask(h.detach()) - m.training * h.mean(0),
    "subtracts the mean beside an operator of higher order": _as_chosen,
    "subtracts the mean": lambda m, h: h - h.mean(0) if m.training else h,
    "subtracts the mean after dropout": lambda m, h: (
        functional.dropout(h, training=m.training) - (h.mean(0) if m.training else 0.0)
    ),
    "batch norm": lambda m, h: functional.batch_norm(h, None, None, training=True) if m.training else h,
    "mixup": _mixup,
    "like a random row": _like_some_row,
    "mixup with a share from a beta distribution": _mixup_by_beta,
    "mixup if a number is large": partial(_mixup_now_and_then, above=True),
    "mixup if a number is small": partial(_mixup_now_and_then, above=False),
    "subtracts the mean and adds noise of unit length": _with_normalised_noise,
    "subtracts the mean and adds noise of a gamma distribution": lambda m, h: (
        h - h.mean(0) + torch.distributions.Gamma(1.0, 1.0).sample(h.shape)
    ),
    "subtracts the mean of larger batches": lambda m, h: h - h.mean(0) if len(h) > 4 else h,
}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", MIXING)
def test_rows_that_are_mixed_in_training_only_are_found(name: str) -> None:
    with pytest.raises(InvalidInput, match="rows of a batch independently"):
        GradientEngine(model(MIXING[name]), per_example_loss).norms(*batch())


def test_each_mode_of_the_model_is_checked() -> None:
    engine = GradientEngine(model(MIXING["subtracts the mean"]).eval(), per_example_loss)
    engine.norms(*batch())
    engine.model.train()
    with pytest.raises(InvalidInput, match="rows of a batch independently"):
        engine.norms(*batch())


def _averages(m: Between, h: Tensor) -> Tensor:
    m.get_buffer("mean").mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return h


def _replaces(m: Between, h: Tensor) -> Tensor:
    m.mean = 0.9 * m.get_buffer("mean") + 0.1 * h.detach().mean(0)
    return h


def _counts_rows(m: Between, h: Tensor) -> Tensor:
    m.get_buffer("count").add_(len(h))
    return h


@pytest.mark.parametrize(
    ("step", "buffer"),
    [(_averages, r"1\.mean"), (_replaces, r"1\.mean"), (_counts_rows, r"1\.count")],
    ids=["average", "replaced", "count of rows"],
)
def test_buffers_that_take_up_something_of_the_rows_are_refused(step: Any, buffer: str) -> None:
    """They are part of the model that is released."""
    net = model(step)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(InvalidInput, match=f"buffers {buffer} change with the examples"):
        GradientEngine(net, per_example_loss).norms(*batch())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


class Codebook(nn.Module):
    """Subtracts a frozen parameter from its input [b, 7], and moves it towards the rows by ``move``."""

    def __init__(self, move: Callable[[nn.Parameter, Tensor], object]) -> None:
        super().__init__()
        self.code, self.move = nn.Parameter(torch.zeros(7), requires_grad=False), move

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.move(self.code, 0.001 * h.mean(0))
        return h - self.code


class Renormalised(nn.Module):
    """An embedding of seven tokens that shortens the rows that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(3.0 * torch.ones(7, 7))

    def forward(self, h: Tensor) -> Tensor:
        return h + functional.embedding((h[:, 0] > 0).long(), self.rows, max_norm=1.0)


@pytest.mark.parametrize(
    ("step", "changed"),
    [
        pytest.param(lambda: Codebook(lambda code, mean: code.add_(mean)), "1.code", id="in place"),
        pytest.param(lambda: Codebook(lambda code, mean: code.data.add_(mean)), "1.code", id="by its data"),
        pytest.param(Renormalised, "1.rows", id="max_norm"),
    ],
)
def test_parameters_that_take_up_something_of_the_rows_are_refused(step: Any, changed: str) -> None:
    engine = GradientEngine(model(step()), per_example_loss)
    with pytest.raises(
        InvalidInput, match=f"the forward pass changes the parameters {changed}, .* no noise would cover"
    ):
        engine.norms(*batch())


def test_a_model_that_begins_to_change_a_parameter_later_is_refused_then() -> None:
    moves = Codebook(lambda code, mean: None)
    engine = GradientEngine(model(moves), per_example_loss)
    engine.norms(*batch())
    engine.norms(*batch())
    moves.move = lambda code, mean: code.add_(mean)
    with pytest.raises(InvalidInput, match=r"the forward pass changes the parameters 1\.code"):
        engine.norms(*batch())


def test_observers_of_quantisation_are_refused() -> None:
    net = model(FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255))
    with pytest.raises(InvalidInput, match=r"1\.activation_post_process\.max_val change"):
        GradientEngine(net, per_example_loss).norms(*batch())


@pytest.mark.parametrize("place", ["1.count", "1.noted"])
def test_losses_that_change_with_the_number_of_passes_are_refused(place: str) -> None:
    """Micro-batches would be computed at different counts, and one example fewer would move others to another one."""

    def count(m: Between, h: Tensor) -> Tensor:
        m.noted = (m.noted or 0) + 1
        m.get_buffer("count").add_(1)
        return h * (1.0 + 0.01 * (m.noted if place == "1.noted" else m.get_buffer("count")))

    with pytest.raises(InvalidInput, match=r"change from pass to pass, with 1\.count, 1\.noted"):
        GradientEngine(model(count), per_example_loss).norms(*batch())


def test_buffers_that_count_passes_are_fine_and_the_check_leaves_them_alone() -> None:
    def count(m: Between, h: Tensor) -> Tensor:
        m.get_buffer("count").add_(1)
        return h

    net = model(count)
    GradientEngine(net, per_example_loss).norms(*batch())
    assert net.get_buffer("1.count") == 1


DRAWING: dict[str, Step | nn.Module] = {
    "dropout": lambda m, h: functional.dropout(h, training=m.training),
    "alpha dropout": lambda m, h: functional.alpha_dropout(h, training=m.training),
    "noise": lambda m, h: h + torch.randn_like(h),
    "normal": lambda m, h: h + torch.normal(torch.zeros_like(h), 1.0),
    "bernoulli": lambda m, h: h * torch.bernoulli(torch.full_like(h, 0.5)),
    "gumbel softmax": lambda m, h: functional.gumbel_softmax(h),
    "multinomial": lambda m, h: h * torch.multinomial(torch.ones(len(h), 7), 1),
    "random integers": lambda m, h: h * torch.randint(1, 3, h.shape),
    "stochastic depth": StochasticDepth(0.5, "row"),
    "random slopes": nn.RReLU(),
}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", DRAWING)
def test_chance_within_rows_is_fine_and_known(name: str) -> None:
    net = model(DRAWING[name])
    engine = GradientEngine(net, per_example_loss)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()  # noqa: NPY002
    assert engine.draws(*batch())
    after = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()  # noqa: NPY002
    assert torch.equal(states[0], after[0])
    assert states[1:] == after[1:]
    assert engine.norms(*batch()).norms.isfinite().all()


def test_recurrent_layers_with_dropout_are_compared_without() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(5, 4, 2, batch_first=True, dropout=0.5)

        def forward(self, x: Tensor) -> Tensor:
            states: Tensor = self.cells(x[:, None])[0]
            return states[:, -1]

    net = Recurrent()
    engine = GradientEngine(net, per_example_loss)
    assert engine.draws(*batch())
    assert engine.norms(*batch()).norms.isfinite().all()
    assert net.cells.dropout == 0.5


def test_a_model_without_chance_does_not_draw() -> None:
    assert not GradientEngine(model(lambda m, h: h), per_example_loss).draws(*batch())
    assert not GradientEngine(model(nn.Dropout(0.5)).eval(), per_example_loss).draws(*batch())


@pytest.mark.parametrize(
    "happens",
    [
        lambda h: torch.rand(()) < 0.1,
        lambda h: torch.rand(len(h), 1) > 0.9,
        lambda h: torch.rand(len(h)).bernoulli_(0.1)[:, None] > 0.0,
        lambda h: torch.bernoulli(torch.full_like(h, 0.9)) == 0.0,
        lambda h: torch.randint(0, 10, ()) == 9,
    ],
)
def test_rows_that_are_mixed_by_rare_chance_are_found(happens: Callable[[Tensor], Tensor]) -> None:
    net = model(lambda m, h: torch.where(happens(h), h.flip(0), h))
    with pytest.raises(InvalidInput, match="of some examples depend on others"):
        GradientEngine(net, per_example_loss).norms(*batch())


def test_a_parameter_that_is_tied_by_hand_in_a_model_that_draws_is_found() -> None:
    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            code = self.encode(x)
            return functional.linear(code + torch.randn_like(code), self.encode.weight.T)

    for net in (Autoencoder(), Autoencoder().eval()):
        with pytest.raises(InvalidInput, match=r"of encode\.weight are not"):
            GradientEngine(net, per_example_loss).norms(*batch())


def test_gradients_of_zero_are_no_evidence() -> None:
    def loss(output: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(output, y, reduction="none", ignore_index=-100)

    engine = GradientEngine(model(MIXING["subtracts the mean"]), loss)
    x, y = batch()
    engine.norms(x, torch.full((6,), -100))
    with pytest.raises(InvalidInput, match="rows of a batch independently"):
        engine.norms(x, y)


def test_a_model_that_needs_several_rows_is_refused_in_one_line() -> None:
    net = model(lambda m, h: functional.batch_norm(h, m.get_buffer("mean"), torch.ones(7), training=m.training))
    with pytest.raises(InvalidInput, match="do not run on one example, or a few: ValueError in "):
        GradientEngine(net, per_example_loss).norms(*batch())


def test_a_loss_that_no_parameter_reaches_has_gradients_of_zero() -> None:
    engine = GradientEngine(model(lambda m, h: h), lambda output, y: y.float())
    assert torch.equal(engine.norms(*batch()).norms, torch.zeros(6))


def test_frozen_parts_in_half_precision_run_under_autocast() -> None:
    net = nn.Sequential(nn.Linear(5, 7).bfloat16().requires_grad_(False), nn.Linear(7, 3))
    engine = GradientEngine(net, per_example_loss, autocast=torch.bfloat16)
    assert engine.norms(*batch()).norms.isfinite().all()


def test_an_empty_parameter_is_no_obstacle() -> None:
    class Tail(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.softmax = nn.AdaptiveLogSoftmaxWithLoss(5, 10, [3, 6], div_value=8.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.softmax.log_prob(x)

    net = Tail()
    assert any(parameter.numel() == 0 for parameter in net.parameters())
    assert GradientEngine(net, per_example_loss).norms(*batch()).norms.isfinite().all()


def test_a_generator_of_the_models_own_is_refused() -> None:
    """Its numbers come from a known seed, and no checkpoint keeps it."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    net = model(lambda m, h: h * (torch.rand(h.shape, generator=generator) > 0.5))
    assert GradientEngine(net, per_example_loss).draws(*batch())
    with pytest.raises(InvalidInput, match=r"draw from a torch.Generator of their own"):
        GradientEngine(net, per_example_loss).norms(*batch())


BUFFERS: dict[str, Tensor] = {
    "expanded": torch.ones(1).expand(7),
    "sparse": torch.eye(7).to_sparse(),
    "compressed": torch.eye(7).to_sparse_csr(),
    "quantised": torch.quantize_per_tensor(torch.ones(7), 0.1, 0, torch.quint8),
    "not a number": torch.full((7,), torch.nan),
    "booleans": torch.ones(7, dtype=torch.bool),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.filterwarnings("ignore:.*quantized|.*Sparse CSR")
def test_buffers_of_any_layout_are_fine_while_they_do_not_change(kind: str) -> None:
    net = model(lambda m, h: h)
    net[1].register_buffer("other", BUFFERS[kind])
    assert GradientEngine(net, per_example_loss).norms(*batch()).norms.isfinite().all()
    assert net.get_buffer("1.other") is BUFFERS[kind]


@pytest.mark.long
def test_operators_of_higher_order_are_fine() -> None:
    def step(m: Between, h: Tensor) -> Tensor:
        out: Tensor = torch.cond(torch.tensor(True), lambda z: z.relu(), lambda z: z.tanh(), (h,))
        return out

    engine = GradientEngine(model(step), per_example_loss)
    assert engine.norms(*batch()).norms.isfinite().all()
    assert not engine.draws(*batch())


def test_a_unit_on_the_edge_of_a_kink_is_no_reason_to_refuse() -> None:
    """In single precision rounding decides on which side it is, and differs between a batch and an example alone."""

    def step(m: Between, h: Tensor) -> Tensor:
        rounding = torch.finfo(h.dtype).eps * len(h)
        return h if rounding < 3e-7 else 2.0 * h

    net = model(step)
    parameters, before = list(net.parameters()), {name: value.clone() for name, value in net.state_dict().items()}
    buffers = list(net.buffers())
    assert GradientEngine(net, per_example_loss).norms(*batch()).norms.isfinite().all()
    assert all(one is other for one, other in zip(parameters, net.parameters(), strict=True))
    assert all(one is other for one, other in zip(buffers, net.buffers(), strict=True))
    assert all(
        value.dtype == before[name].dtype and torch.equal(value, before[name])
        for name, value in net.state_dict().items()
    )


def test_a_model_that_mixes_rows_and_fails_in_double_precision_is_refused() -> None:
    def step(m: Between, h: Tensor) -> Tensor:
        return (h - h.mean(0)) @ torch.eye(7)

    with pytest.raises(InvalidInput, match="rows of a batch independently"):
        GradientEngine(model(step), per_example_loss).norms(*batch())


def _checkpointed_tanh(h: Tensor) -> Tensor:
    out: Tensor = checkpoint(lambda z: z.float().tanh(), h, use_reentrant=False)
    return out


def test_rounding_is_no_reason_to_refuse_what_activation_checkpointing_computes_again() -> None:
    """Code that asks for single precision then does so in the backward pass, too."""

    def step(m: Between, h: Tensor) -> Tensor:
        return _checkpointed_tanh(h if torch.finfo(h.dtype).eps * len(h) < 3e-7 else 2.0 * h)

    assert GradientEngine(model(step), per_example_loss).norms(*batch()).norms.isfinite().all()


def test_mixed_rows_that_activation_checkpointing_computes_again_are_refused() -> None:
    with pytest.raises(InvalidInput, match="rows of a batch independently"):
        GradientEngine(model(lambda m, h: _checkpointed_tanh(h - h.mean(0))), per_example_loss).norms(*batch())
