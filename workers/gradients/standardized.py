"""Weight-standardised convolution: the kernel's gradients, projected as the standardisation projects them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from workers.gradients.convolution import correlations
from workers.gradients.factors import (
    CANCELLATION,
    ExampleGradients,
    Instantiated,
    Method,
    Planned,
    Prepared,
    repaired,
    widen,
)
from workers.gradients.rules import Differentiate
from workers.models.layers import WeightStandardizedConv2d

SMALLEST_GAIN = 0.1
"""Below this share of the largest gain or bias, a gain is not divided by; the convolution is computed again instead."""


@dataclass(frozen=True)
class Projected(Planned):
    """g_i = kernel_i - sum_r coefficients[r, i, c] directions[r, c], where every row c of S has its own directions.

    directions [R, out, n] are orthonormal over r, or zero; coefficients [R, B, out] are the inner products of the
    rows of kernel_i with them. So |g_i|^2 = |kernel_i|^2 - |coefficients_i|^2.
    """

    kernel: ExampleGradients
    methods_of_kernel: Mapping[str, Method]
    key_of_kernel: tuple[Hashable, ...]
    coefficients: Tensor
    directions: Tensor
    shape: tuple[int, ...]

    def key(self) -> tuple[Hashable, ...]:
        return "projected", *self.key_of_kernel

    def methods(self) -> Mapping[str, Method]:
        return {
            name: replace(method, prepare=partial(self._after, method))
            for name, method in self.methods_of_kernel.items()
        }

    def _after(self, method: Method) -> Prepared:
        kernel_norm_sq, kernel = method.prepare()
        prepared = replace(self, kernel=kernel)
        norm_sq = kernel_norm_sq - self.coefficients.square().sum((0, 2))
        return repaired(norm_sq.clamp_min(0.0), norm_sq < CANCELLATION * kernel_norm_sq, prepared), prepared

    def weighted_sum(self, weights: Tensor) -> Tensor:
        removed = torch.einsum("b,rbc,rcn->cn", weights, self.coefficients, self.directions)
        return self.kernel.weighted_sum(weights) - removed.view(self.shape)

    def instantiate(self) -> Tensor:
        removed = torch.einsum("rbc,rcn->bcn", self.coefficients, self.directions)
        return self.kernel.instantiate() - removed.view(-1, *self.shape)

    def select(self, rows: Tensor) -> ExampleGradients:
        return replace(self, kernel=self.kernel.select(rows), coefficients=self.coefficients[:, rows])


def standardized_convolution(
    module: WeightStandardizedConv2d, activation: Tensor, output: Tensor | None, examples: int
) -> Differentiate:
    """kernel = gain * unit, unit = (weight - mean) / max(|weight - mean|, sqrt(eps)), by output channel.

    The gradient G of the kernel's channel gives <G, unit> for the gain, and for the weight scale * G less its mean
    and, unless the channel is clamped, less its component along unit; scale = gain / max(...).
    """
    response = None if output is None else output.detach()

    def differentiate(grad: Tensor) -> dict[str, ExampleGradients]:
        weight, gain = module.weight.detach(), module.gain.detach()
        fan_in = weight[0].numel()
        unit = module.standardized(weight, torch.ones_like(gain)).flatten(1)
        clamped = weight.flatten(1).var(1, correction=0) * fan_in <= module.eps
        scale = gain * torch.where(
            clamped, module.eps**-0.5, (weight.flatten(1).std(1, correction=0) * fan_in**0.5) ** -1
        )

        kernel = correlations(module, activation, grad, examples)
        shift = _over_positions(kernel.grads, None, examples)
        bias = torch.zeros_like(gain) if module.bias is None else module.bias.detach()
        if response is not None and bool(
            (gain.abs() > SMALLEST_GAIN * torch.maximum(gain.abs().max(), bias.abs().max())).all()
        ):
            along = (_over_positions(kernel.grads, widen(response), examples) - bias * shift) / gain
        else:
            unscaled = functional.conv2d(
                kernel.inputs, unit.view_as(weight), None, module.stride, kernel.geometry.padding, module.dilation
            )
            along = _over_positions(kernel.grads, unscaled, examples)
        ones = kernel.inputs.new_full((1, 1, *weight.shape[2:]), fan_in**-0.5)
        mean_response = functional.conv2d(
            kernel.inputs.sum(1, keepdim=True), ones, None, module.stride, kernel.geometry.padding, module.dilation
        )
        mean = _over_positions(kernel.grads, mean_response, examples)

        scaled = replace(kernel, grads=kernel.grads * scale.view(-1, *[1] * (grad.dim() - 2)))
        free = (~clamped).to(unit)
        directions = torch.stack([torch.full_like(unit, fan_in**-0.5), unit * free[:, None]])
        coefficients = torch.stack([mean * scale, along * scale * free])
        return {
            "weight": Projected(scaled, scaled.methods(), scaled.key(), coefficients, directions, tuple(weight.shape)),
            "gain": Instantiated(along),
            "bias": Instantiated(shift),
        }

    return differentiate


def _over_positions(grads: Tensor, response: Tensor | None, examples: int) -> Tensor:
    """[B K, out, *positions] (times a response, if any) summed over rows and positions of each example: [B, out]."""
    product = grads if response is None else grads * response
    return product.flatten(2).sum(2).view(examples, -1, grads.shape[1]).sum(1)
