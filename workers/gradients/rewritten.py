"""Modules of torch that are rewritten as linear layers around what is differentiated by hand.

Self-attention becomes two linear layers around scaled dot products. Recurrent layers become linear maps around a
recurrence that is differentiated by hand. The gates before their activations are a linear map of the inputs plus a
linear map of the previous states. Their gradients at all positions therefore give the per-example gradients of all
weights, as for two linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dpsweep.workers.gradients.factors import ExampleGradients, widen
from dpsweep.workers.gradients.linear import affine
from dpsweep.workers.gradients.rules import Recorder


def self_attention(
    module: nn.MultiheadAttention,
    record: Recorder,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None] | None:
    """Return the output of ``module.forward`` for query [b, t, width], or None if the call is not covered.

    Covered: self-attention without an extra key (bias_k, add_zero_attn). As in `module.forward`, ``is_causal`` needs an
    ``attn_mask``.
    """
    if not (query is key is value and query.dim() == 3 and module.bias_k is None and not module.add_zero_attn):
        return None
    rows, length, width = query.shape
    heads = (rows, length, 3, module.num_heads, module.head_dim)
    q, k, v = record.linear(query, "in_proj_weight", "in_proj_bias").view(heads).permute(2, 0, 3, 1, 4)
    bias = _bias(rows, module.num_heads, key_padding_mask, attn_mask, query.dtype)
    dropout = module.dropout if module.training else 0.0
    if need_weights:
        scores = q @ k.mT * module.head_dim**-0.5
        weights = (scores if bias is None else scores + bias).softmax(-1)
        attended = functional.dropout(weights, dropout) @ v
    else:
        attended = functional.scaled_dot_product_attention(q, k, v, bias, dropout)
    output = record.linear(attended.transpose(1, 2).reshape(rows, length, width), "out_proj.weight", "out_proj.bias")
    if not need_weights:
        return output, None
    return output, weights.mean(1) if average_attn_weights else weights


def _bias(
    rows: int, heads: int, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one bias to add to the scores, broadcastable to [b, heads, t, t]; True means "do not attend"."""
    bias: Tensor | None = None
    for mask, shape in ((key_padding_mask, (rows, 1, 1, -1)), (attn_mask, None)):
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
        if shape is not None:
            mask = mask.view(shape)
        elif mask.dim() == 3:
            mask = mask.view(rows, heads, *mask.shape[1:])
        bias = mask if bias is None else bias + mask
    return bias


SequenceRun = tuple[Tensor, tuple[Tensor, ...]]
"""Outputs [b, t, H] of one layer and direction, and its final states [b, H]."""


def lstm(
    module: nn.LSTM, record: Recorder, input: Tensor | PackedSequence, hx: tuple[Tensor, Tensor] | None = None
) -> Any:
    """Return the output of ``module.forward`` for inputs [b, t, width], packed or not; None if not covered.

    An LSTM with projections is not covered.
    """
    if module.proj_size > 0 or not _covered(input):
        return None
    sequences = _Sequences.of(input)
    starts = _zero_states(module, sequences.values, 2) if hx is None else hx
    output, states = _stacked(module, record, sequences, tuple(starts), _lstm_layer)
    return _packed_like(input, sequences, output), cast("tuple[Tensor, Tensor]", states)


def gru_or_rnn(
    module: nn.GRU | nn.RNN, record: Recorder, input: Tensor | PackedSequence, hx: Tensor | None = None
) -> Any:
    """Return the output of ``module.forward`` for inputs [b, t, width], packed or not; None if not covered."""
    if not _covered(input):
        return None
    sequences = _Sequences.of(input)
    starts = _zero_states(module, sequences.values, 1) if hx is None else (hx,)
    layer = _gru_layer if isinstance(module, nn.GRU) else _rnn_layer
    output, (state,) = _stacked(module, record, sequences, starts, layer)
    return _packed_like(input, sequences, output), state


def _covered(input: Any) -> bool:
    if isinstance(input, PackedSequence):
        return True
    return isinstance(input, Tensor) and input.dim() == 3 and input.shape[1] > 0


@dataclass(frozen=True)
class _Sequences:
    """The examples of a batch, in its order: values [b, t, width], and their lengths [b], or None if all are t.

    Outputs beyond the length of an example are never used. They receive no gradient, so no gradient flows from there to
    the inputs or the weights.
    """

    values: Tensor
    lengths: Tensor | None = None

    @staticmethod
    def of(input: Tensor | PackedSequence) -> _Sequences:
        """Return the sequences of a tensor or, after padding, of a packed sequence."""
        return _Sequences(input) if isinstance(input, Tensor) else _Sequences(*pad_packed_sequence(input, True))

    @cached_property
    def last(self) -> Tensor | None:
        """[b]: position of the last value of each example; None if it is the last position for all."""
        return None if self.lengths is None else self.lengths.to(self.values.device) - 1

    def reversed(self, values: Tensor) -> Tensor:
        """Return values [b, t, n] with each example's positions reversed; those beyond its length stay."""
        if self.last is None:
            return values.flip(1)
        positions = torch.arange(values.shape[1], device=values.device)
        places = torch.where(positions <= self.last[:, None], self.last[:, None] - positions, positions)
        return values.gather(1, places[:, :, None].expand_as(values))

    def at_end(self, values: Tensor) -> Tensor:
        """Return values [b, t, n] at the last position of each example; [b, n]."""
        return values[:, -1] if self.last is None else values[_every(self.last), self.last]


def _packed_like(input: Tensor | PackedSequence, sequences: _Sequences, output: Tensor) -> Tensor | PackedSequence:
    """Return the output [b, t, n], packed as the input was."""
    if isinstance(input, Tensor):
        return output
    lengths, order = cast("Tensor", sequences.lengths), input.sorted_indices
    if order is not None:
        output, lengths = output.index_select(0, order), lengths[order.cpu()]
    data = pack_padded_sequence(output, lengths, batch_first=True).data
    return PackedSequence(data, input.batch_sizes, order, input.unsorted_indices)


def _zero_states(module: nn.RNNBase, input: Tensor, states: int) -> tuple[Tensor, ...]:
    layers = module.num_layers * (2 if module.bidirectional else 1)
    dtype = next(module.parameters()).dtype
    return (torch.zeros(layers, len(input), module.hidden_size, dtype=dtype, device=input.device),) * states


def _stacked(
    module: nn.RNNBase,
    record: Recorder,
    sequences: _Sequences,
    starts: tuple[Tensor, ...],
    run: Callable[..., SequenceRun],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs [b, t, directions H] of the last layer, and the final states [layers directions, b, H]."""
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
) -> SequenceRun:
    weights = _weights(module, suffix)
    bias = weights[2] + weights[3] if module.bias else None
    gates = _requiring_grad(widen(functional.linear(inputs, weights[0], bias)))
    outputs, last = _Lstm.apply(gates, *start, widen(weights[1].detach()), sequences.last)
    _record(record, [gates], suffix, inputs, start[0], outputs)
    return outputs, (sequences.at_end(outputs), last)


def _gru_layer(
    module: nn.GRU, record: Recorder, suffix: str, inputs: Tensor, start: tuple[Tensor, ...], sequences: _Sequences
) -> SequenceRun:
    weights = _weights(module, suffix)
    gates = _requiring_grad(widen(functional.linear(inputs, weights[0], weights[2] if module.bias else None)))
    shift = weights[3].detach() if module.bias else gates.new_zeros(gates.shape[2])
    shifts = widen(shift).expand(gates.shape).requires_grad_()
    outputs = _Gru.apply(gates, shifts, start[0], widen(weights[1].detach()))
    _record(record, [gates, shifts], suffix, inputs, start[0], outputs)
    return outputs, (sequences.at_end(outputs),)


def _rnn_layer(
    module: nn.RNN, record: Recorder, suffix: str, inputs: Tensor, start: tuple[Tensor, ...], sequences: _Sequences
) -> SequenceRun:
    weights = _weights(module, suffix)
    bias = weights[2] + weights[3] if module.bias else None
    sums = _requiring_grad(widen(functional.linear(inputs, weights[0], bias)))
    activation = _ACTIVATIONS[module.nonlinearity]
    outputs = _Rnn.apply(sums, start[0], widen(weights[1].detach()), activation)
    _record(record, [sums], suffix, inputs, start[0], outputs)
    return outputs, (sequences.at_end(outputs),)


def _weights(module: nn.RNNBase, suffix: str) -> tuple[nn.Parameter, ...]:
    """weight_ih, weight_hh and, if there are any, bias_ih and bias_hh."""
    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if module.bias else 2]
    return tuple(module.get_parameter(f"{kind}_{suffix}") for kind in kinds)


def _requiring_grad(gates: Tensor) -> Tensor:
    return gates if gates.requires_grad else gates.requires_grad_()


def _record(record: Recorder, gates: list[Tensor], suffix: str, inputs: Tensor, start: Tensor, outputs: Tensor) -> None:
    """Compute the gradients of all weights from the gates' gradients."""
    before = torch.cat([start.detach()[:, None], outputs.detach()[:, :-1]], 1)  # the state before each position
    record.record(gates, partial(_weight_gradients, suffix, inputs, before, record.examples), inputs)


def _weight_gradients(
    suffix: str, inputs: Tensor, before: Tensor, examples: int, of_inputs: Tensor, of_states: Tensor | None = None
) -> dict[str, ExampleGradients]:
    """Per-example gradients of the weights, from the output gradients of the two linear maps at each position.

    of_states: None if both gradients are equal, as in an LSTM.
    """
    by_inputs = affine(inputs.detach(), examples, f"weight_ih_{suffix}", f"bias_ih_{suffix}")
    by_states = affine(before, examples, f"weight_hh_{suffix}", f"bias_hh_{suffix}")
    grads = of_inputs.contiguous()  # stored by position so far; products per example are faster contiguous
    return {**by_inputs(grads), **by_states(grads if of_states is None else of_states.contiguous())}


_of_sigmoid: Callable[[Tensor, Tensor], Tensor] = torch.ops.aten.sigmoid_backward
"""(gradient of the output, output) -> gradient of the input; so does _of_tanh."""
_of_tanh: Callable[[Tensor, Tensor], Tensor] = torch.ops.aten.tanh_backward


@dataclass(frozen=True)
class _Activation:
    """apply_: in place. backward: (gradient of the output, output) -> gradient of the input."""

    apply_: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


_ACTIVATIONS: Final = {
    "tanh": _Activation(torch.tanh_, _of_tanh),
    "relu": _Activation(torch.relu_, lambda grad, output: torch.ops.aten.threshold_backward(grad, output, 0.0)),
}


def _positions(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of tensors [t, ...] at each position, made by one call each, which is faster than indexing."""
    return zip(*(tensor.unbind() for tensor in tensors), strict=True)


def _shifted(first: Tensor, values: Tensor) -> Tensor:
    """Values [t, b, H] shifted by one position; the first is ``first`` [b, H]."""
    return torch.cat([first[None], values[:-1]])


def _every(of_examples: Tensor) -> Tensor:
    """Return the indices of all examples, on their device; a GPU would wait for indices of the host."""
    return torch.arange(len(of_examples), device=of_examples.device)


def _at_ends(values: Tensor, ends: Tensor | None, length: int) -> Tensor:
    """[t, b, H]: ``values`` [b, H] at the end of each example, the last position if ends is None; 0 elsewhere."""
    placed = values.new_zeros(length, *values.shape)
    if ends is None:
        placed[-1] = values
    else:
        placed[ends, _every(ends)] = values
    return placed


class _Lstm(torch.autograd.Function):
    """(gates [b, t, 4H] of the inputs, h_0 [b, H], c_0 [b, H], weight_hh, ends [b]) -> (h [b, t, H], c [b, H]).

    gates: the linear map of the inputs, without that of the states. ends: last position of each example, or None if it
    is the last one for all. The returned c is the cell state there.

    With sigmoid gates i, f, o and the tanh gate g: c_t = f c_{t-1} + i g and h_t = o tanh(c_t).
    """

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, h: Tensor, c: Tensor, weight: Tensor, ends: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        width = h.shape[1]
        activated = gates.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        cells, squashed, states = activated.new_empty(3, *activated.shape[:2], width)
        first, transposed = c, weight.mT
        parts = (activated, activated[:, :, : 2 * width], *activated.split(width, 2), cells, squashed, states)
        for gate, both, i, f, g, o, cell, tanh, state in _positions(*parts):
            gate.addmm_(h, transposed)
            both.sigmoid_()
            g.tanh_()
            o.sigmoid_()
            c = torch.mul(i, g, out=cell).addcmul_(f, c)
            h = torch.mul(torch.tanh(c, out=tanh), o, out=state)
        ctx.save_for_backward(activated, cells, squashed, first, weight, ends)
        return states.transpose(0, 1), c.clone() if ends is None else cells[ends, _every(ends)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_states: Tensor, of_last: Tensor) -> tuple[Tensor | None, ...]:
        activated, cells, squashed, first, weight, ends = ctx.saved_tensors
        width = cells.shape[2]
        i, f, g, o = activated.split(width, 2)
        earlier, nothing = _shifted(first, cells), torch.zeros_like(first)
        grads = torch.cat([_of_sigmoid(g, i), _of_sigmoid(earlier, f), _of_tanh(i, g), _of_sigmoid(squashed, o)], 2)
        by_cell, by_state = grads[:, :, : 3 * width].unflatten(2, (3, width)), grads[:, :, 3 * width :]
        remaining, arriving = of_states.transpose(0, 1), _at_ends(of_last, ends, len(cells))
        of_h, of_c = remaining[-1], arriving[-1]
        parts = (grads, by_cell, by_state, f, _of_tanh(o, squashed))
        before = _shifted(nothing, remaining), _shifted(nothing, arriving)
        for grad, by_c, by_h, f_t, to_cell, h_before, c_before in reversed(list(_positions(*parts, *before))):
            of_c = torch.addcmul(of_c, of_h, to_cell)
            by_c.mul_(of_c[:, None])
            by_h.mul_(of_h)
            of_h = torch.addmm(h_before, grad, weight)
            of_c = torch.addcmul(c_before, of_c, f_t)
        return grads.transpose(0, 1), of_h, of_c, None, None


class _Rnn(torch.autograd.Function):
    """(sums [b, t, H] of the inputs, h_0 [b, H], weight_hh, activation) -> h [b, t, H].

    sums: the linear map of the inputs, to which that of the states is added: h_t = activation(. + W h_{t-1}).
    """

    @staticmethod
    def forward(ctx: Any, sums: Tensor, h: Tensor, weight: Tensor, activation: _Activation) -> Tensor:
        states, transposed = sums.transpose(0, 1).clone(memory_format=torch.contiguous_format), weight.mT
        for (state,) in _positions(states):
            h = activation.apply_(state.addmm_(h, transposed))
        ctx.save_for_backward(states, weight)
        ctx.activation = activation
        return states.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_states: Tensor) -> tuple[Tensor | None, ...]:
        states, weight = ctx.saved_tensors
        remaining = of_states.transpose(0, 1)
        grads = ctx.activation.backward(torch.ones_like(states), states)
        of_h = remaining[-1]
        before = _shifted(torch.zeros_like(of_h), remaining)
        for grad, h_before in reversed(list(_positions(grads, before))):
            of_h = torch.addmm(h_before, grad.mul_(of_h), weight)
        return grads.transpose(0, 1), of_h, None, None


class _Gru(torch.autograd.Function):
    """(gates [b, t, 3H] of the inputs, shifts [b, t, 3H], h_0 [b, H], weight_hh) -> h [b, t, H].

    gates: the linear map of the inputs. shifts: the bias of the linear map of the states.

    With sigmoid gates r, z, and u the part of the state in the tanh gate: n = tanh(. + r u), h_t = (1-z) n + z h_{t-1}.
    """

    @staticmethod
    def forward(ctx: Any, gates: Tensor, shifts: Tensor, h: Tensor, weight: Tensor) -> Tensor:
        width, first, transposed = h.shape[1], h, weight.mT
        activated = gates.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        of_states = shifts.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        states = activated.new_empty(*activated.shape[:2], width)
        both, inner = activated[:, :, : 2 * width], of_states[:, :, 2 * width :]
        parts = (of_states, both, of_states[:, :, : 2 * width], inner, *activated.split(width, 2), states)
        for of_state, both_t, added, u, r, z, n, state in _positions(*parts):
            of_state.addmm_(h, transposed)
            both_t.add_(added).sigmoid_()
            n.addcmul_(r, u).tanh_()
            h = torch.lerp(n, h, z, out=state)
        ctx.save_for_backward(activated, states, inner.clone(), first, weight)
        return states.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_states: Tensor) -> tuple[Tensor | None, ...]:
        activated, states, inner, first, weight = ctx.saved_tensors
        width = states.shape[2]
        r, z, n = activated.split(width, 2)
        to_n, to_z = _of_tanh(1 - z, n), _of_sigmoid(_shifted(first, states) - n, z)
        of_gates = torch.cat([_of_sigmoid(to_n * inner, r), to_z, to_n], 2)
        of_shifts = torch.cat([of_gates[:, :, : 2 * width], to_n * r], 2)
        remaining = of_states.transpose(0, 1)
        of_h = remaining[-1]
        scales = of_shifts.unflatten(2, (3, width))
        parts = (scales, of_shifts, z, _shifted(torch.zeros_like(first), remaining))
        followed = []
        for scale, of_shift, z_t, h_before in reversed(list(_positions(*parts))):
            followed.append(of_h)
            scale.mul_(of_h[:, None])
            of_h = torch.addmm(h_before, of_shift, weight).addcmul_(of_h, z_t)
        of_gates.unflatten(2, (3, width)).mul_(torch.stack(followed[::-1])[:, :, None])
        return of_gates.transpose(0, 1), of_shifts.transpose(0, 1), of_h, None
