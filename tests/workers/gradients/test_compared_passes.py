"""Whole batches are compared with autograd, the first one and some later ones: no example's gradient is another's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.gradients.compared_passes import LaterBatches
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.spec import ExecutionSpec
from dpsweep.workers.training.reproducible import reproducible
from tests.workers.brute_force import gradients_one_by_one, norms_of, per_example_loss
from tests.workers.devices import DEVICE, NAME

DISAGREE = "are not those of each example alone"


class SortedByLength(nn.Module):
    """Texts [b, 10], padded with 0, go through an LSTM in the order of their lengths, and back into their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8, padding_idx=0)
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths, order = (x != 0).sum(1).sort(descending=True, stable=True)
        packed = pack_padded_sequence(self.embedding(x)[order], lengths.cpu(), batch_first=True)
        _, (last, _) = self.lstm(packed)
        out: Tensor = self.head(last[-1][order.argsort()])
        return out


def texts(*lengths: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(1, 50, (len(lengths), 10), generator=torch.Generator(DEVICE).manual_seed(1))
    for row, length in enumerate(lengths):
        x[row, length:] = 0
    return x, torch.arange(len(lengths)) % 3


@pytest.mark.parametrize("lengths", [(10, 10, 10, 4, 10, 7, 10, 2), (10, 9, 8, 7, 3, 5, 4, 2)])
def test_rows_that_change_places_anywhere_in_the_first_batch_are_found(lengths: tuple[int, ...]) -> None:
    """Among them the first three, the one in the middle and the last keep their places."""
    torch.manual_seed(0)
    with pytest.raises(InvalidInput, match=DISAGREE):
        GradientEngine(SortedByLength(), per_example_loss).norms(*texts(*lengths))


def test_a_model_that_would_move_other_rows_is_refused_while_all_stay_in_place() -> None:
    """Their lengths fall; where some are replaced, they do not."""
    torch.manual_seed(0)
    with pytest.raises(InvalidInput, match=DISAGREE):
        GradientEngine(SortedByLength(), per_example_loss).norms(*texts(10, 9, 8, 7, 6, 5, 4, 2))


def engine_sees(engine: GradientEngine, x: Tensor, y: Tensor, batches: int) -> None:
    for _ in range(batches):
        engine.norms(x, y)


class PresentTokens(nn.Module):
    """A linear layer sees only the tokens that are present, of all examples [b, t, 3] on one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        present = x[:, :, 0] != 0
        hidden = torch.tanh(self.first(x[present]))
        placed = hidden.new_zeros(*present.shape, 2).masked_scatter(present[:, :, None].expand(-1, -1, 2), hidden)
        out: Tensor = self.head(placed.sum(1))
        return out


def tokens(*counts: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(len(counts), 8, 3, generator=torch.Generator(DEVICE).manual_seed(2)) + 0.5
    for row, count in enumerate(counts):
        x[row, count:] = 0
    return x, torch.arange(len(counts)) % 3


def test_tokens_that_are_not_as_many_for_every_example_are_found_in_the_next_batch() -> None:
    """They are as many in the first batch, and in the next one the sum is the same."""
    torch.manual_seed(0)
    model = PresentTokens()
    engine = GradientEngine(model, per_example_loss)
    engine.norms(*tokens(4, 4, 4, 4))
    expected = norms_of(gradients_one_by_one(model, *tokens(1, 7)))
    torch.testing.assert_close(engine.norms(*tokens(1, 7)).norms, expected, rtol=1e-5, atol=0)


class Enlarged(nn.Module):
    """A head on what comes out of a frozen part. mixing: how much each row gets of all, less than rounding shows."""

    def __init__(self, mixing: float) -> None:
        super().__init__()
        self.first, self.head, self.mixing = nn.Linear(5, 4).requires_grad_(False), nn.Linear(4, 3), mixing

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.first(Enlarge.apply(x + self.mixing * x.sum(0))))
        return out


class Enlarge(torch.autograd.Function):
    """Has a derivative like that of pictures that a GPU enlarges: torch has no deterministic algorithm for it."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2.0 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        reason, mode = "enlarge does not have a deterministic implementation", torch.get_deterministic_debug_mode()
        if mode == 2:
            raise RuntimeError(reason)
        assert mode == 1  # elsewhere deterministic algorithms are kept
        warnings.warn(reason, stacklevel=1)
        return 2.0 * grad


@pytest.mark.parametrize("mixing", [0.0, 1e-30])
def test_only_comparisons_differentiate_by_the_input_of_a_frozen_part(mixing: float) -> None:
    """For that alone they do without a deterministic algorithm where torch has none."""
    torch.manual_seed(0)
    engine = GradientEngine(Enlarged(mixing), per_example_loss)
    x, y = torch.randn(6, 5), torch.arange(6) % 3
    with reproducible(ExecutionSpec(device=NAME), seed=0), warnings.catch_warnings():
        warnings.filterwarnings("error", "enlarge")
        with pytest.raises(InvalidInput, match=DISAGREE) if mixing else nullcontext():
            for _ in range(3):
                engine.norms(x, y)
        assert torch.get_deterministic_debug_mode() == 2


def test_a_batch_that_is_too_small_to_compare_leaves_the_comparison_to_the_next_one() -> None:
    later = LaterBatches()
    assert [later.is_to_be_compared(examples) for examples in (1, 0, 4, 4)] == [False, False, True, False]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.ReLU(), nn.Linear(7, 3)),
    "a layer at 0": lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), zeroed(nn.Linear(7, 3))),
    "group norm": lambda: nn.Sequential(nn.Linear(5, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, 3)),
}


def zeroed(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    return layer


@pytest.mark.long
@pytest.mark.thinned(8)
@pytest.mark.parametrize("name", MODELS)
def test_later_comparisons_change_nothing(name: str) -> None:
    """With K = 2 rows an example in micro-batches; the random numbers and the parameters are those of a plain run."""
    torch.manual_seed(0)
    model = MODELS[name]()
    engine = GradientEngine(model, per_example_loss, multiplicity=2, micro_batch_size=3)
    x = torch.randn(20, 5, generator=torch.Generator(DEVICE).manual_seed(3))
    y = torch.arange(10).repeat_interleave(2) % 3
    before = [parameter.clone() for parameter in model.parameters()]
    engine.norms(x, y)
    for batch in range(1, 18):
        torch.manual_seed(batch)
        norms, drawn = engine.norms(x, y).norms, torch.rand(3)
        again = GradientEngine(model, per_example_loss, multiplicity=2, micro_batch_size=3)
        engine_sees(again, x, y, batches=2)
        torch.manual_seed(batch)  # its third batch is not compared
        assert torch.equal(again.norms(x, y).norms, norms)
        assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
