"""What per-example gradients cannot be computed for is refused, by name, before anything is trained with it."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.gradients.checks import require_trained
from dpsweep.workers.gradients.engine import GradientEngine
from tests.workers.brute_force import gradients_one_by_one, norms_of, per_example_loss
from tests.workers.devices import DEVICE, NAME
from tests.workers.gradients.adversarial import batch


class Calls(nn.Module):
    """Two linear layers, used as ``call`` says."""

    def __init__(self, call: Callable[[Calls, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.call = call
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def sorted_by_first_feature(model: Calls, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    out: Tensor = model.second(model.first(x[order])[order.argsort()])
    return out


REORDERING: dict[str, Callable[[Calls, Tensor], Tensor]] = {
    "reverses rows and back": lambda m, x: m.second(m.first(x.flip(0)).flip(0)),
    "sorts rows and back": sorted_by_first_feature,
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("rows", [4, 6])
@pytest.mark.parametrize("name", REORDERING)
def test_a_model_that_reorders_rows_is_refused(name: str, rows: int) -> None:
    """The sum over the batch is right all the same; whose gradient is whose is not."""
    engine = GradientEngine(Calls(REORDERING[name]), per_example_loss, multiplicity=2)
    with pytest.raises(InvalidInput, match=r"first\.weight, .* rows of a batch independently"):
        engine.norms(*batch(rows))


def contrastive(output: Tensor, y: Tensor) -> Tensor:
    return per_example_loss(output, y) + (output @ output.T).sum(1)


def test_coupling_is_found_in_the_first_batch_that_can_show_it() -> None:
    engine = GradientEngine(nn.Linear(5, 3), contrastive)
    engine.norms(*batch(1))
    with pytest.raises(InvalidInput, match="rows of a batch independently"):
        engine.norms(*batch(2))


@pytest.mark.parametrize("start", ["zero", "random"])
def test_a_parameter_read_elsewhere_is_refused_even_behind_a_layer_that_starts_at_zero(start: str) -> None:
    """At such a start its gradient is 0, whatever it is computed from."""
    model = Calls(lambda m, x: m.second(functional.linear(m.first(x), m.first.weight)))
    if start == "zero":
        nn.init.zeros_(model.second.weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InvalidInput, match=r"of first\.weight are not"):
        GradientEngine(model, per_example_loss).norms(*batch())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("draw", "reason"),
    [
        (random.random, "draw from Python's or numpy's generator"),
        (np.random.rand, "draw from Python's or numpy's generator"),
        (random.SystemRandom().random, "change from pass to pass, with hidden state"),
    ],
)
def test_random_numbers_from_elsewhere_are_refused(draw: Callable[[], float], reason: str) -> None:
    model = Calls(lambda m, x: m.second(m.first(x) * (1.0 + draw())))
    with pytest.raises(InvalidInput, match=reason):
        GradientEngine(model, per_example_loss).norms(*batch())


def test_what_another_thread_draws_meanwhile_is_not_the_models() -> None:
    """As the thread that starts Ray does, beside the one that plans."""
    threads = [threading.Thread(target=random.random), threading.Thread(target=np.random.rand)]

    def call(model: Calls, x: Tensor) -> Tensor:
        for thread in threads:
            if thread.ident is None:
                thread.start()
                thread.join()
                break
        out: Tensor = model.second(model.first(x))
        return out

    GradientEngine(Calls(call), per_example_loss).norms(*batch())
    assert all(thread.ident for thread in threads)


def test_a_model_that_begins_to_draw_from_elsewhere_is_refused_where_two_passes_must_agree() -> None:
    share, draw = [0.0], random.SystemRandom().random
    model = Calls(lambda m, x: m.second(m.first(x) * (1.0 + share[0] * draw())))
    x, y = batch()
    engine = GradientEngine(model, per_example_loss, micro_batch_size=2)
    engine.norms(x, y)
    engine.norms(x, y)  # compared again, and not soon after
    share[0] = 1.0
    with pytest.raises(InvalidInput, match="differ from one pass to the next"):
        engine.weighted_sum(x, y, lambda norms: norms.norms)


def test_an_input_changed_in_place_after_a_layer_read_it_is_refused() -> None:
    """Autograd refuses this too, but is not asked for the gradient of a first layer's weight."""

    def call(model: Calls, x: Tensor) -> Tensor:
        x = x.clone()
        hidden = model.first(x)
        if model.training:
            x.mul_(2.0)
        out: Tensor = model.second(hidden)
        return out

    with pytest.raises(InvalidInput, match=r"'first' \(Linear\) read a tensor that was changed in place"):
        GradientEngine(Calls(call), per_example_loss).norms(*batch())


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.second.requires_grad_(False),
        lambda model: model.first.requires_grad_(True),
        lambda model: setattr(model, "second", nn.Linear(4, 3)),
        lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
    ],
    ids=["freezing", "unfreezing", "another head", "assigned values"],
)
def test_parameters_that_are_others_than_when_the_engine_was_made_are_refused(
    change: Callable[[nn.Module], object],
) -> None:
    model = Calls(lambda m, x: m.second(m.first(x)))
    model.first.requires_grad_(False)
    engine = GradientEngine(model, per_example_loss)
    change(model)
    with pytest.raises(InvalidInput, match=r"\.weight, .* were frozen, unfrozen or replaced"):
        engine.norms(*batch())


def test_trainable_parameters_are_found_as_torch_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that occur twice, tied weights, frozen and missing ones; they are looked for at every step."""
    first, tied, frozen = nn.Linear(3, 3, bias=False), nn.Linear(3, 3), nn.Linear(3, 2)
    inner = nn.Sequential(first, nn.LayerNorm(3))
    model = nn.ModuleDict({"b": inner, "a": nn.Sequential(inner, tied), "frozen": frozen})
    tied.weight = first.weight
    frozen.bias.requires_grad_(False)
    model.add_module("nothing", None)
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    monkeypatch.setattr(model, "named_parameters", lambda: iter(()))  # which would refuse
    require_trained(model, named)
    with pytest.raises(InvalidInput, match="were frozen, unfrozen or replaced"):
        require_trained(model, {f"{name}.": each for name, each in named.items()})


@pytest.mark.parametrize(
    ("dtype", "cure"),
    [(torch.bfloat16, "train in float32"), (torch.float16, "train in float32"), (torch.complex64, "view_as_complex")],
)
def test_parameters_of_other_than_single_or_double_precision_are_refused(dtype: torch.dtype, cure: str) -> None:
    with pytest.raises(InvalidInput, match=rf"weight \({dtype}\).*{cure}"):
        GradientEngine(nn.Linear(2, 2, dtype=dtype), per_example_loss)


def test_mixed_precision_is_refused_and_frozen_parts_may_be_of_any() -> None:
    with pytest.raises(InvalidInput, match=r"parameters 1\.weight \(torch\.float64\)"):
        GradientEngine(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), per_example_loss)
    GradientEngine(nn.Sequential(nn.Linear(2, 2).bfloat16().requires_grad_(False), nn.Linear(2, 2)), per_example_loss)


def test_inputs_that_are_not_tensors_are_refused() -> None:
    x, y = batch()
    with pytest.raises(InvalidInput, match="x is a dict"):
        GradientEngine(nn.Linear(5, 3), per_example_loss).norms({"features": x}, y)  # type: ignore[arg-type]


def test_autocast_and_inference_mode_around_a_call_are_refused() -> None:
    engine = GradientEngine(nn.Linear(5, 3), per_example_loss)
    x, y = torch.randn(4, 5), torch.zeros(4, dtype=torch.long)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16), pytest.raises(InvalidInput, match="would round norms"):
        engine.norms(x, y)
    with torch.inference_mode(), pytest.raises(InvalidInput, match="there are no gradients; leave its block"):
        engine.norms(x, y)


class Bags(nn.Module):
    """The mean over the words of each row, given all words on one axis and where rows begin."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bags(x.flatten(), torch.arange(0, x.numel(), x.shape[1]))
        return out


ON_THE_CPU = torch.embedding_bag


@pytest.mark.skipif(NAME != "cpu", reason="a GPU does not check the offset of the first bag")
def test_a_layer_that_does_not_run_on_one_row_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match=r"'bags' \(EmbeddingBag\) does not run on one row.*Error in "):
        GradientEngine(Bags(), per_example_loss).norms(torch.arange(8).view(4, 2) % 7, torch.zeros(4).long())


@pytest.mark.parametrize("length", [1, 2])
def test_bags_of_words_of_another_length_are_verified_again(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """On a GPU the offset of the first bag counts as 0, whatever it is, and so does that of every row alone."""
    if NAME == "cpu":
        monkeypatch.setattr(torch, "embedding_bag", first_from_the_start)
    torch.manual_seed(0)
    model, y = Bags(), torch.zeros(4, dtype=torch.long)
    engine = GradientEngine(model, per_example_loss)
    for first, words in enumerate((length, length, length, 5)):
        x = (first + torch.arange(4 * words).view(4, words)) % 7
        expected = norms_of(gradients_one_by_one(model, x, y))
        torch.testing.assert_close(engine.norms(x, y).norms, expected, rtol=1e-5, atol=0)


def first_from_the_start(weight: Tensor, words: Tensor, offsets: Tensor, *others: Any) -> Any:
    return ON_THE_CPU(weight, words, torch.cat([torch.zeros_like(offsets[:1]), offsets[1:]]), *others)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("micro_batch_size", [None, 4])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (7,), (6, 1)], ids=str)
def test_weights_of_another_number_of_examples_are_refused(
    shape: tuple[int, ...], micro_batch_size: int | None
) -> None:
    """One weight for all would be broadcast in some layers, and rows beyond the batch be passed over."""
    model = Calls(lambda m, x: m.second(m.first(x)))
    engine = GradientEngine(model, per_example_loss, micro_batch_size=micro_batch_size)
    with pytest.raises(InvalidInput, match=r"weigh returned weights of shape .* but must return \[6\]"):
        engine.weighted_sum(*batch(6), lambda norms: torch.ones(shape))
    with pytest.raises(InvalidInput, match=r"weigh returned weights of shape .* but must return \[\d\]"):
        engine.weighted_sum_rowwise(*batch(6), lambda norms, rows: torch.ones(shape))
