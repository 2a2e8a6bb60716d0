"""nn.LSTM and nn.GRU, rewritten as linear maps around a recurrence that is differentiated by hand.

The gradients of the gates before their activations, at all positions at once, give the per-example gradients of every
weight: those of a linear map of the inputs, and of one of the states before each position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from workers.gradients.factors import ExampleGradients, widen
from workers.gradients.linear import affine
from workers.gradients.rules import Recorder

Run = tuple[Tensor, tuple[Tensor, ...]]
"""Of one layer and direction: outputs [b, t, H], and the last states [b, H]."""


def lstm(
    module: nn.LSTM, record: Recorder, input: Tensor | PackedSequence, hx: tuple[Tensor, Tensor] | None = None
) -> Any:
    """The output of ``module.forward`` for inputs [b, t, width], packed or not; None for a call that is not covered,
    which one with projections is."""
    if module.proj_size > 0 or not _covered(input):
        return None
    sequences = _Sequences.of(input)
    starts = _starts(module, sequences.values, 2) if hx is None else hx
    output, states = _stacked(module, record, sequences, tuple(starts), _lstm_layer)
    return _like(input, sequences, output), cast("tuple[Tensor, Tensor]", states)


def gru(module: nn.GRU, record: Recorder, input: Tensor | PackedSequence, hx: Tensor | None = None) -> Any:
    """The output of ``module.forward`` for inputs [b, t, width], packed or not; None for a call that is not covered."""
    if not _covered(input):
        return None
    sequences = _Sequences.of(input)
    starts = _starts(module, sequences.values, 1) if hx is None else (hx,)
    output, (state,) = _stacked(module, record, sequences, starts, _gru_layer)
    return _like(input, sequences, output), state


def _covered(input: Any) -> bool:
    if isinstance(input, PackedSequence):
        return True
    return isinstance(input, Tensor) and input.dim() == 3 and input.shape[1] > 0


@dataclass(frozen=True)
class _Sequences:
    """The examples of a batch, in its order: values [b, t, width], and their lengths [b], None if all are t.

    Beyond an example's length outputs have no meaning. No gradient comes from there, so that none goes to its inputs or
    to the weights.
    """

    values: Tensor
    lengths: Tensor | None = None

    @staticmethod
    def of(input: Tensor | PackedSequence) -> _Sequences:
        """Padded, if they are packed."""
        return _Sequences(input) if isinstance(input, Tensor) else _Sequences(*pad_packed_sequence(input, True))

    @cached_property
    def last(self) -> Tensor | None:
        """[b]: the position of the last value of each example; None if that is the last one for all."""
        return None if self.lengths is None else self.lengths.to(self.values.device) - 1

    def reversed(self, values: Tensor) -> Tensor:
        """Values [b, t, n] with the order of each example's positions reversed; what lies beyond its length stays."""
        if self.last is None:
            return values.flip(1)
        positions = torch.arange(values.shape[1], device=values.device)
        places = torch.where(positions <= self.last[:, None], self.last[:, None] - positions, positions)
        return values.gather(1, places[:, :, None].expand_as(values))

    def at_end(self, values: Tensor) -> Tensor:
        """[b, n]: of values [b, t, n], those at the last position of each example."""
        return values[:, -1] if self.last is None else values[torch.arange(len(values)), self.last]


def _like(input: Tensor | PackedSequence, sequences: _Sequences, output: Tensor) -> Tensor | PackedSequence:
    """The output [b, t, n], packed as the input was."""
    if isinstance(input, Tensor):
        return output
    lengths, order = cast("Tensor", sequences.lengths), input.sorted_indices
    if order is not None:
        output, lengths = output.index_select(0, order), lengths[order.cpu()]
    data = pack_padded_sequence(output, lengths, batch_first=True).data
    return PackedSequence(data, input.batch_sizes, order, input.unsorted_indices)


def _starts(module: nn.RNNBase, input: Tensor, states: int) -> tuple[Tensor, ...]:
    layers = module.num_layers * (2 if module.bidirectional else 1)
    dtype = next(module.parameters()).dtype
    return (torch.zeros(layers, len(input), module.hidden_size, dtype=dtype, device=input.device),) * states


def _stacked(
    module: nn.RNNBase, record: Recorder, sequences: _Sequences, starts: tuple[Tensor, ...], run: Callable[..., Run]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs [b, t, directions H] of the last layer, and the last states [layers directions, b, H]."""
    suffixes = ("", "_reverse") if module.bidirectional else ("",)
    lasts: list[tuple[Tensor, ...]] = []
    input = sequences.values
    for layer in range(module.num_layers):
        if layer > 0:
            input = functional.dropout(input, module.dropout, module.training)
        outputs = []
        for suffix in suffixes:
            inputs = sequences.reversed(input) if suffix else input
            start = tuple(widen(state[len(lasts)]) for state in starts)
            found, last = run(module, record, f"l{layer}{suffix}", inputs, start, sequences)
            outputs.append(sequences.reversed(found) if suffix else found)
            lasts.append(last)
        input = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    return input, tuple(torch.stack(states) for states in zip(*lasts, strict=True))


def _lstm_layer(
    module: nn.LSTM, record: Recorder, suffix: str, inputs: Tensor, start: tuple[Tensor, ...], sequences: _Sequences
) -> Run:
    weights = _weights(module, suffix)
    bias = weights[2] + weights[3] if module.bias else None
    gates = _requiring_grad(widen(functional.linear(inputs, weights[0], bias)))
    outputs, last = _Lstm.apply(gates, *start, widen(weights[1].detach()), sequences.last)
    before = _before(start[0], outputs)
    record.record([gates], partial(_of_weights, suffix, inputs, before, record.examples), inputs)
    return outputs, (sequences.at_end(outputs), last)


def _gru_layer(
    module: nn.GRU, record: Recorder, suffix: str, inputs: Tensor, start: tuple[Tensor, ...], sequences: _Sequences
) -> Run:
    weights = _weights(module, suffix)
    gates = _requiring_grad(widen(functional.linear(inputs, weights[0], weights[2] if module.bias else None)))
    shift = weights[3].detach() if module.bias else gates.new_zeros(gates.shape[2])
    shifts = widen(shift).expand(gates.shape).requires_grad_()
    outputs = _Gru.apply(gates, shifts, start[0], widen(weights[1].detach()))
    before = _before(start[0], outputs)
    record.record([gates, shifts], partial(_of_weights, suffix, inputs, before, record.examples), inputs)
    return outputs, (sequences.at_end(outputs),)


def _weights(module: nn.RNNBase, suffix: str) -> tuple[nn.Parameter, ...]:
    """weight_ih, weight_hh and, if there are any, bias_ih and bias_hh."""
    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if module.bias else 2]
    return tuple(module.get_parameter(f"{kind}_{suffix}") for kind in kinds)


def _requiring_grad(gates: Tensor) -> Tensor:
    return gates if gates.requires_grad else gates.requires_grad_()


def _before(start: Tensor, outputs: Tensor) -> Tensor:
    """The state before each position."""
    return torch.cat([start.detach()[:, None], outputs.detach()[:, :-1]], 1)


def _of_weights(
    suffix: str, inputs: Tensor, before: Tensor, examples: int, of_inputs: Tensor, of_states: Tensor | None = None
) -> dict[str, ExampleGradients]:
    """Per-example gradients from those of the two linear maps before each position, which are equal in an LSTM."""
    of_states = of_inputs if of_states is None else of_states
    return {
        **affine(inputs.detach(), examples, f"weight_ih_{suffix}", f"bias_ih_{suffix}")(of_inputs),
        **affine(before, examples, f"weight_hh_{suffix}", f"bias_hh_{suffix}")(of_states),
    }


class _Lstm(torch.autograd.Function):
    """(gates [b, t, 4H] without the part of the state, h_0 [b, H], c_0 [b, H], weight_hh, ends [b]) ->
    (h [b, t, H], c [b, H] at the end of each example, the last position if ends is None).

    With sigmoid gates i, f, o and the tanh gate g: c_t = f c_{t-1} + i g and h_t = o tanh(c_t).
    """

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, h: Tensor, c: Tensor, weight: Tensor, ends: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        width = h.shape[1]
        activated = gates.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        states, cells = (activated.new_empty(*activated.shape[:2], width) for _ in range(2))
        first, transposed = c, weight.mT
        for gate, state, cell in zip(activated, states, cells, strict=True):
            gate.addmm_(h, transposed)
            gate[:, : 2 * width].sigmoid_()
            gate[:, 2 * width : 3 * width].tanh_()
            gate[:, 3 * width :].sigmoid_()
            i, f, g, o = gate.split(width, 1)
            c = torch.mul(i, g, out=cell).addcmul_(f, c)
            h = torch.tanh(c, out=state).mul_(o)
        ctx.save_for_backward(activated, cells, first, weight, ends)
        return states.transpose(0, 1), c.clone() if ends is None else cells[ends, torch.arange(len(ends))]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_states: Tensor, of_last: Tensor) -> tuple[Tensor | None, ...]:
        activated, cells, first, weight, ends = ctx.saved_tensors
        i, f, g, o = activated.split(cells.shape[2], 2)
        tanh = cells.tanh()
        earlier = torch.cat([first[None], cells[:-1]])
        to_gates = torch.cat([g * i * (1 - i), earlier * f * (1 - f), i * (1 - g * g)], 2)
        to_output, to_cell = tanh * o * (1 - o), o * (1 - tanh * tanh)
        grads = torch.empty_like(activated)
        of_h, of_c = torch.zeros_like(first), of_last if ends is None else torch.zeros_like(of_last)
        remaining = of_states.transpose(0, 1)
        width = cells.shape[2]
        for t in range(len(cells) - 1, -1, -1):
            of_h = of_h + remaining[t]
            if ends is not None:
                of_c = torch.where((ends == t)[:, None], of_last, of_c)
            of_c = torch.addcmul(of_c, of_h, to_cell[t])
            torch.mul(of_c.repeat(1, 3), to_gates[t], out=grads[t][:, : 3 * width])
            torch.mul(of_h, to_output[t], out=grads[t][:, 3 * width :])
            of_h, of_c = grads[t] @ weight, of_c * f[t]
        return grads.transpose(0, 1), of_h, of_c, None, None


class _Gru(torch.autograd.Function):
    """(gates [b, t, 3H] of the inputs, shifts [b, t, 3H] of those of the state, h_0 [b, H], weight_hh) -> h [b, t, H].

    With sigmoid gates r, z, and u the part of the state in the tanh gate: n = tanh(. + r u), h_t = (1-z) n + z h_{t-1}.
    """

    @staticmethod
    def forward(ctx: Any, gates: Tensor, shifts: Tensor, h: Tensor, weight: Tensor) -> Tensor:
        width, first, transposed = h.shape[1], h, weight.mT
        activated = gates.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        states, inner = (activated.new_empty(*activated.shape[:2], width) for _ in range(2))
        for t, (gate, shift) in enumerate(zip(activated, shifts.transpose(0, 1), strict=True)):
            of_state = torch.addmm(shift, h, transposed)
            gate[:, : 2 * width].add_(of_state[:, : 2 * width]).sigmoid_()
            r, z, n = gate.split(width, 1)
            inner[t] = of_state[:, 2 * width :]
            n.addcmul_(r, inner[t]).tanh_()
            h = torch.lerp(n, h, z, out=states[t])
        ctx.save_for_backward(activated, states, inner, first, weight)
        return states.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_states: Tensor) -> tuple[Tensor | None, ...]:
        activated, states, inner, first, weight = ctx.saved_tensors
        width = states.shape[2]
        r, z, n = activated.split(width, 2)
        earlier = torch.cat([first[None], states[:-1]])
        to_n, to_z, to_r = (1 - z) * (1 - n * n), (earlier - n) * z * (1 - z), inner * r * (1 - r)
        of_gates, of_shifts = torch.empty_like(activated), torch.empty_like(activated)
        of_h, remaining = torch.zeros_like(first), of_states.transpose(0, 1)
        for t in range(len(states) - 1, -1, -1):
            of_h = of_h + remaining[t]
            before_r, before_z, before_n = of_gates[t].split(width, 1)
            torch.mul(of_h, to_n[t], out=before_n)
            torch.mul(of_h, to_z[t], out=before_z)
            torch.mul(before_n, to_r[t], out=before_r)
            of_shifts[t].copy_(of_gates[t])
            of_shifts[t][:, 2 * width :].mul_(r[t])
            of_h = torch.addmm(of_h * z[t], of_shifts[t], weight)
        return of_gates.transpose(0, 1), of_shifts.transpose(0, 1), of_h, None
