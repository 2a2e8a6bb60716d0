"""Models that let one example move the gradients of others are refused by name; the others of their kind are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.gradients.engine import GradientEngine
from tests.workers.brute_force import per_example_loss
from tests.workers.devices import DEVICE
from tests.workers.gradients import adversarial
from tests.workers.gradients.adversarial import (
    COUPLED,
    HARMLESS,
    KEEPING,
    LATER,
    MIXING,
    PLACED,
    SEEN,
    Between,
    Step,
    batch,
    model,
)


@pytest.mark.thinned(18)
@pytest.mark.parametrize("name", MIXING)
def test_rows_that_depend_on_others_are_refused_by_the_name_of_the_module(name: str) -> None:
    with pytest.raises(InvalidInput, match="of some examples depend on others of their batch") as refused:
        GradientEngine(model(MIXING[name]), per_example_loss).norms(*batch())
    backward_only = name.startswith("gradients")  # no forward pass shows it
    assert backward_only or "from module '1' (Between) on" in str(refused.value)


@pytest.mark.parametrize("name", PLACED)
def test_rows_that_depend_on_their_place_are_refused(name: str) -> None:
    """Without its first row, the clipped sum of 40 rows would move by up to 8 bounds."""
    with pytest.raises(InvalidInput, match="of some examples depend on their place in the batch"):
        GradientEngine(model(PLACED[name]), per_example_loss).norms(*batch(40))


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", KEEPING)
def test_what_is_kept_of_examples_outside_of_parameters_and_buffers_is_refused_by_name(name: str) -> None:
    step, where = KEEPING[name]
    with pytest.raises(InvalidInput, match=rf"model or loss keep [^:]*{where}[^:]*, neither parameter nor buffer"):
        GradientEngine(model(step), per_example_loss).norms(*batch())
    assert Between.kept is None
    assert adversarial.MEAN is None
    assert SEEN == {}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", COUPLED)
def test_losses_that_depend_on_other_rows_or_labels_are_refused(name: str) -> None:
    torch.manual_seed(0)  # other weights may be refused first for gradients that are not those of one example
    with pytest.raises(InvalidInput, match="of some examples depend on others of their batch"):
        GradientEngine(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), COUPLED[name]).norms(*batch())


class FrozenTable(nn.Module):
    """Looks whole numbers [b, t] up in a frozen table, and adds ``share`` of the mean over the batch."""

    def __init__(self, share: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.share, self.head = nn.Embedding(20, 6).requires_grad_(False), share, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.table(x).mean(1)
        out: Tensor = self.head(found + self.share * found.mean(0))
        return out


@pytest.mark.parametrize("share", [1e-3, 1e-12])
def test_whole_numbers_are_differentiated_by_what_is_looked_up_for_them(share: float) -> None:
    x = torch.randint(0, 20, (6, 4), generator=torch.Generator(DEVICE).manual_seed(1))
    with pytest.raises(InvalidInput, match=r"numbers from whole numbers of the input .* depend on others"):
        GradientEngine(FrozenTable(share), per_example_loss).norms(x, torch.arange(6) % 3)
    assert GradientEngine(FrozenTable(0.0), per_example_loss).norms(x, torch.arange(6) % 3).norms.isfinite().all()


class FrozenPositions(nn.Module):
    """Adds frozen positions to frozen tokens [b, t], a causal mask, and ``share`` of the row before."""

    order: Tensor

    def __init__(self, share: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = (nn.Embedding(20, 6).requires_grad_(False) for _ in range(2))
        self.share, self.head = share, nn.Linear(6, 3)
        self.register_buffer("order", torch.arange(9), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found = self.tokens(x) + self.places(self.order[: x.shape[1]])
        earlier = torch.ones(x.shape[1], x.shape[1]).tril().bool().float()
        found = earlier @ found
        out: Tensor = self.head((found + self.share * found.roll(1, 0)).mean(1))
        return out


@pytest.mark.thinned(2)
@pytest.mark.parametrize("length", [1, 3, 4, 6])
def test_tables_that_have_as_many_entries_as_a_batch_has_rows_are_not_taken_for_it(length: int) -> None:
    """Four examples pass together, and six as a whole."""
    x = torch.randint(0, 20, (6, length), generator=torch.Generator(DEVICE).manual_seed(1))
    y = torch.arange(6) % 3
    assert GradientEngine(FrozenPositions(0.0), per_example_loss).norms(x, y).norms.isfinite().all()
    with pytest.raises(InvalidInput, match=r"numbers from whole numbers of the input .* depend on others"):
        GradientEngine(FrozenPositions(1e-12), per_example_loss).norms(x, y)


@pytest.mark.parametrize(("share", "summed"), [(0.001, False), (1e-5, True)])
def test_a_large_batch_is_refused_for_what_two_digits_would_not_show(share: float, summed: bool) -> None:
    """Of 512 rows these move the clipped sum by 75 and 87 bounds."""
    step: Step = lambda m, h: h + share * (h.sum(0) if summed else h.mean(0))  # noqa: E731
    with pytest.raises(InvalidInput, match=r"from module '1' \(Between\) on"):
        GradientEngine(model(step), per_example_loss).norms(*batch(512))


@pytest.mark.thinned(18)
@pytest.mark.parametrize("name", LATER)
def test_a_model_that_misbehaves_from_its_second_batch_on_is_refused_then(name: str) -> None:
    net = model(lambda m, h: h)
    bias = dict(net.named_parameters())["0.bias"]
    first = bias.detach().clone()

    def step(m: Between, h: Tensor) -> Tensor:
        return h if torch.equal(bias.detach(), first) else LATER[name](m, h)

    vars(net[1])["step"] = step
    engine = GradientEngine(net, per_example_loss)
    engine.norms(*batch())
    with torch.no_grad():
        bias.add_(0.1)
    with pytest.raises(InvalidInput, match=r"of some examples depend on (others of their|their place in the) batch"):
        engine.norms(*batch())


def test_every_few_batches_some_examples_are_compared_again() -> None:
    net = model(lambda m, h: h)
    engine = GradientEngine(net, per_example_loss)
    for _ in range(8):
        engine.norms(*batch())
    vars(net[1])["step"] = lambda m, h: h + 1e-9 * h.mean(0)
    with pytest.raises(InvalidInput, match="of some examples depend on others of their batch"):
        engine.norms(*batch())  # the eighth after the first


class Swapped(nn.Module):
    """The identity, whose forward a test replaces."""

    def forward(self, h: Tensor) -> Tensor:
        return h


def _replace(net: nn.Sequential) -> None:
    net[1] = nn.Softmax(dim=0)


def _hook(net: nn.Sequential) -> None:
    net[1].register_forward_hook(lambda module, args, output: output + output.mean(0))


def _hook_before(net: nn.Sequential) -> None:
    net[1].register_forward_pre_hook(lambda module, args: (args[0].softmax(0),))


def _hook_backward(net: nn.Sequential) -> None:
    net[2].register_full_backward_hook(lambda module, grads, outer: (grads[0] + grads[0].mean(0),))


def _patch(net: nn.Sequential) -> None:
    vars(net[1])["forward"] = lambda h: h + h.mean(0)


@pytest.mark.parametrize("change", [_replace, _hook, _hook_before, _hook_backward, _patch])
def test_a_module_or_hook_that_is_new_is_verified_at_once(change: Callable[[nn.Sequential], None]) -> None:
    """Not only in the next of the few batches that are compared again."""
    net = model(Swapped())
    engine = GradientEngine(net, per_example_loss)
    for _ in range(3):
        engine.norms(*batch())
    change(net)
    with pytest.raises(InvalidInput, match="of some examples depend on others of their batch"):
        engine.norms(*batch())


# -- what looks alike and is harmless ----------------------------------------------------------------------------------


@pytest.mark.thinned(8)
@pytest.mark.parametrize("name", HARMLESS)
def test_models_with_independent_rows_are_not_refused_and_stay_as_they_are(name: str) -> None:
    torch.manual_seed(0)
    net, x = HARMLESS[name]()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    engine = GradientEngine(net, per_example_loss)
    for _ in range(2):  # the next batch is compared too
        assert engine.norms(x, torch.arange(len(x)) % 3).norms.isfinite().all()
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


def test_a_gate_on_the_mean_of_the_batch_that_starts_at_0_runs_once_per_example() -> None:
    """The module reads a parameter of its own, so it can be run on single rows, which then have no others."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(7))

        def forward(self, h: Tensor) -> Tensor:
            return h + self.gate * h.mean(0)

    net = nn.Sequential(nn.Linear(5, 7), Gated(), nn.Tanh(), nn.Linear(7, 3))
    engine = GradientEngine(net, per_example_loss)
    engine.norms(*batch())
    assert set(engine.per_example) == {"1"}
