"""RNN, LSTM and GRU: outputs as torch's, gradients as of one example at a time, of padded examples too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.gradients.engine import GradientEngine
from tests.workers.brute_force import gradients_one_by_one, norms_of, per_example_loss
from tests.workers.devices import DEVICE

WIDTH, HIDDEN, LENGTH = 4, 5, 7
ATOL = 1e-6 if DEVICE.type == "cpu" else 2e-5
Read = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(outputs [b, t, H], last states [layers, b, H], inputs) -> features [b, n]."""


def length_of(x: Tensor) -> Tensor:
    """Positions before the padding, which is 0."""
    return (x.abs().sum(2) > 0).sum(1)


READS: dict[str, Read] = {
    "last output": lambda outputs, last, x: outputs[:, -1],
    "all outputs": lambda outputs, last, x: outputs.flatten(1),
    "first output": lambda outputs, last, x: outputs[:, 0],
    "last states": lambda outputs, last, x: last.transpose(0, 1).flatten(1),
    "output at its length": lambda outputs, last, x: outputs[torch.arange(len(x)), length_of(x) - 1],
    "mean before padding": lambda outputs, last, x: (
        (outputs * (x.abs().sum(2) > 0)[:, :, None]).sum(1) / length_of(x)[:, None]
    ),
}

KINDS: dict[str, Callable[[], nn.RNNBase]] = {
    "lstm": lambda: nn.LSTM(WIDTH, HIDDEN, batch_first=True),
    "gru": lambda: nn.GRU(WIDTH, HIDDEN, batch_first=True),
    "lstm of two layers and directions": lambda: nn.LSTM(WIDTH, HIDDEN, 2, bidirectional=True, batch_first=True),
    "gru of two layers and directions": lambda: nn.GRU(WIDTH, HIDDEN, 2, bidirectional=True, batch_first=True),
    "lstm without bias": lambda: nn.LSTM(WIDTH, HIDDEN, bias=False, batch_first=True),
    "rnn": lambda: nn.RNN(WIDTH, HIDDEN, batch_first=True),
    "relu rnn of two layers and directions": lambda: nn.RNN(
        WIDTH, HIDDEN, 2, "relu", bidirectional=True, batch_first=True
    ),
    "rnn without bias": lambda: nn.RNN(WIDTH, HIDDEN, bias=False, batch_first=True),
    "gru without bias": lambda: nn.GRU(WIDTH, HIDDEN, bias=False, batch_first=True),
}


class Sequences(nn.Module):
    """A recurrent layer that starts from zeros or from states of the example, behind a linear layer or not."""

    def __init__(self, cell: nn.RNNBase, read: Read, *, started: bool = False, embedded: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH) if embedded else nn.Identity()
        self.cell, self.read, self.started = cell, read, started
        self.start = nn.Linear(WIDTH, HIDDEN)
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        outputs, last = self.cell(self.embed(x), *([self.states(x)] if self.started else []))
        cells = last[1] if isinstance(last, tuple) else last
        out: Tensor = self.head(self.read(outputs, cells, x))
        return out

    def states(self, x: Tensor) -> Any:
        layers = self.cell.num_layers * (2 if self.cell.bidirectional else 1)
        state = torch.tanh(self.start(x.mean(1))).expand(layers, -1, -1).contiguous()
        return (state, state * 0.5) if isinstance(self.cell, nn.LSTM) else state


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(6, LENGTH, WIDTH, generator=torch.Generator(DEVICE).manual_seed(1))
    for row, length in enumerate([7, 1, 3, 7, 5, 2]):
        x[row, length:] = 0
    return x, torch.arange(6) % 3


def made(kind: str, read: str, **options: bool) -> Sequences:
    torch.manual_seed(0)
    model = Sequences(KINDS[kind](), READS[read], **options)
    model(batch()[0])
    return model


def assert_agrees(model: nn.Module, form: str = "rewrite", multiplicity: int = 1) -> None:
    x, y = batch()
    expected = gradients_one_by_one(model, x, y, multiplicity)
    engine = GradientEngine(model, per_example_loss, multiplicity=multiplicity)
    got = engine.weighted_sum(x, y, lambda norms: torch.ones_like(norms.norms))
    torch.testing.assert_close(got.norms.norms, norms_of(expected), rtol=1e-5, atol=0)
    torch.testing.assert_close(got.norms.losses, per_example_loss(model(x), y).view(-1, multiplicity).mean(1))
    for parameter, gradient in got.gradients.items():
        torch.testing.assert_close(gradient, expected[parameter].sum(0), rtol=1e-4, atol=ATOL)
    assert engine.forms["cell"] == form


@pytest.mark.thinned(4)
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_one_example_at_a_time(kind: str, read: str) -> None:
    assert_agrees(made(kind, read))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("multiplicity", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_from_states_of_the_example(kind: str, multiplicity: int) -> None:
    assert_agrees(made(kind, "last states", started=True, embedded=False), multiplicity=multiplicity)


@pytest.mark.parametrize("frozen", ["weight_ih_l0", "weight_hh_l0", "bias_hh_l0"])
@pytest.mark.parametrize("kind", ["rnn", "lstm", "gru"])
def test_a_frozen_weight_has_no_gradient(kind: str, frozen: str) -> None:
    model = made(kind, "all outputs", embedded=False)
    model.cell.get_parameter(frozen).requires_grad_(False)
    assert_agrees(model)


def test_dropout_between_layers_draws_as_in_the_second_pass() -> None:
    torch.manual_seed(0)
    cell = nn.LSTM(WIDTH, HIDDEN, 2, dropout=0.5, batch_first=True)
    model = Sequences(cell, READS["last output"])
    x, y = batch()
    model(x)
    engine = GradientEngine(model, per_example_loss, micro_batch_size=2)
    for row in range(6):
        got = engine.weighted_sum(x, y, lambda norms, row=row: (torch.arange(6) == row).float())  # type: ignore[misc]  # mypy infers no lambda with defaults
        total = torch.stack([gradient.norm() for gradient in got.gradients.values()]).norm()
        torch.testing.assert_close(total, got.norms.norms[row])


def test_a_projection_runs_per_example() -> None:
    torch.manual_seed(0)
    model = Sequences(nn.LSTM(WIDTH, HIDDEN, proj_size=2, batch_first=True), READS["last output"])
    model(batch()[0])
    assert_agrees(model, "per example")


class Packed(Sequences):
    """Packs its sequences, and reads the last states, or the outputs, padded again."""

    def __init__(self, cell: nn.RNNBase, reads_outputs: bool, *, started: bool = False) -> None:
        super().__init__(cell, READS["all outputs" if reads_outputs else "last states"], started=started)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(x), length_of(x).cpu(), batch_first=True, enforce_sorted=False)
        outputs, last = self.cell(packed, *([self.states(x)] if self.started else []))
        padded, _ = pad_packed_sequence(outputs, batch_first=True, total_length=LENGTH)
        out: Tensor = self.head(self.read(padded, torch.cat(last if isinstance(last, tuple) else (last,), 2), x))
        return out


@pytest.mark.thinned(2)
@pytest.mark.parametrize("started", [False, True], ids=["from zeros", "from states of the example"])
@pytest.mark.parametrize("reads_outputs", [False, True], ids=["last states", "outputs"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_agree_with_one_example_at_a_time(kind: str, reads_outputs: bool, started: bool) -> None:
    torch.manual_seed(0)
    model = Packed(KINDS[kind](), reads_outputs, started=started)
    model(batch()[0])
    assert_agrees(model)


def test_a_model_that_takes_sequences_in_the_order_of_their_lengths_only_is_refused_with_what_to_pass() -> None:
    """Random batches have no order; the proof that rows are independent replaces rows by shorter and longer ones."""
    torch.manual_seed(0)
    x = batch()[0][[0, 3, 4, 2, 5, 1]]

    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = KINDS["gru"](), nn.LazyLinear(3)

        def forward(self, x: Tensor) -> Tensor:
            outputs, _ = self.cell(pack_padded_sequence(x, length_of(x).cpu(), batch_first=True))
            out: Tensor = self.head(pad_packed_sequence(outputs, batch_first=True, total_length=LENGTH)[0].flatten(1))
            return out

    model = Ordered()
    model(x)
    with pytest.raises(RuntimeError, match="enforce_sorted=False"):
        GradientEngine(model, per_example_loss).norms(x, torch.arange(6) % 3)


def test_packed_sequences_of_an_lstm_with_projections_are_refused_with_what_to_do_instead() -> None:
    model = Packed(nn.LSTM(WIDTH, HIDDEN, proj_size=2, batch_first=True), reads_outputs=True)
    model(batch()[0])
    with pytest.raises(
        InvalidInput, match=r"PackedSequence.*padded tensor, and read the output of each example at its"
    ):
        GradientEngine(model, per_example_loss).norms(*batch())
