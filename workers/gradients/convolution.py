"""nn.Conv1d, Conv2d and Conv3d of any stride, padding, padding mode, dilation and number of groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from workers.gradients.factors import ExampleGradients, Instantiated, sum_of_squares, widen
from workers.gradients.planning import Planner


@dataclass(frozen=True)
class Geometry:
    """What a convolution's weight gradient depends on besides input and output gradient."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def weight_gradient(self, inputs: Tensor, grads: Tensor, copies: int = 1) -> Tensor:
        """Gradient of ``copies`` stacked kernels, each of shape ``shape``: [copies * out, in / groups, *kernel]."""
        weight = inputs.new_empty(1).expand(copies * self.shape[0], *self.shape[1:])
        gradients = torch.ops.aten.convolution_backward(
            grads,
            inputs,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            [0] * len(self.stride),
            copies * self.groups,
            [False, True, False],
        )
        gradient: Tensor = gradients[1]
        return gradient


@dataclass(frozen=True)
class Correlations:
    """g_i = weight gradient of a convolution; inputs [rows, in, *size], grads [rows, out, *size], rows = B K."""

    inputs: Tensor
    grads: Tensor
    geometry: Geometry
    examples: int

    def norm_sq(self, planner: Planner) -> Tensor:
        return sum_of_squares(self.instantiate())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        copies = len(self.grads) // self.examples
        per_row = weights.repeat_interleave(copies).view(-1, *[1] * (self.grads.dim() - 1))
        return self.geometry.weight_gradient(self.inputs, self.grads * per_row)

    def instantiate(self) -> Tensor:
        """One convolution with a group per row, as in the batching rule of torch.func (Rochette et al. 2019)."""
        rows = len(self.grads)
        stacked = self.geometry.weight_gradient(
            self.inputs.reshape(1, -1, *self.inputs.shape[2:]), self.grads.reshape(1, -1, *self.grads.shape[2:]), rows
        )
        return _sum_rows(stacked.view(rows, *self.geometry.shape), self.examples)

    def select(self, rows: Tensor) -> Correlations:
        copies = len(self.grads) // self.examples
        rows_of = (rows[:, None] * copies + torch.arange(copies, device=rows.device)).flatten()
        return Correlations(self.inputs[rows_of], self.grads[rows_of], self.geometry, len(rows))


def _sum_rows(per_row: Tensor, examples: int) -> Tensor:
    """[B K, ...] -> [B, ...]."""
    if len(per_row) == examples:
        return per_row
    return per_row.view(examples, -1, *per_row.shape[1:]).sum(1)


def convolution(module: _ConvNd, activation: Tensor, grad: Tensor, examples: int) -> Mapping[str, ExampleGradients]:
    inputs, grads = widen(activation), widen(grad)
    if module.padding_mode == "zeros" and not isinstance(module.padding, str):
        padding = module.padding
    else:  # "same" may pad unevenly, and other modes copy values: pad first
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        inputs = functional.pad(inputs, module._reversed_padding_repeated_twice, mode)
        padding = (0,) * len(module.stride)
    geometry = Geometry(tuple(module.weight.shape), module.stride, padding, module.dilation, module.groups)
    gradients: dict[str, ExampleGradients] = {"weight": Correlations(inputs, grads, geometry, examples)}
    if module.bias is not None:
        gradients["bias"] = Instantiated(
            grads.reshape(examples, -1, *grads.shape[1:]).transpose(1, 2).flatten(2).sum(2)
        )
    return gradients


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
