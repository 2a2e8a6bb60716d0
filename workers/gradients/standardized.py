"""Weight-standardised convolution: gradients of the kernel, projected by the Jacobian of the standardisation."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from dpsweep.workers.gradients.convolution import correlations
from dpsweep.workers.gradients.factors import (
    CANCELLATION,
    HALF_PRECISION,
    ExampleGradients,
    Instantiated,
    Method,
    Planned,
    Prepared,
    mark,
    sum_of_squares,
    summed_rows,
    widen,
)
from dpsweep.workers.gradients.rules import Differentiate
from dpsweep.workers.models import WeightStandardizedConv2d

SMALLEST_GAIN = 0.1
"""Smallest gain, relative to the largest gain or bias, by which outputs are divided; below it, the unscaled
convolution is computed again."""


@dataclass(frozen=True)
class Projected(Planned):
    """g_i = kernel_i - mean_i ones / sqrt(n) - along_i unit, row by row, where kernel_i is viewed as [out, n].

    `unit`: [out, n]; each row sums to 0 and has norm 1, or is 0. `mean`, `along`: [B, out], inner products of the rows
    of kernel_i with ones / sqrt(n) and with unit. Hence |g_i|^2 = |kernel_i|^2 - |mean_i|^2 - |along_i|^2.
    """

    kernel: ExampleGradients
    methods_of_kernel: Mapping[str, Method]
    key_of_kernel: tuple[Hashable, ...]
    mean: Tensor
    along: Tensor
    unit: Tensor
    shape: tuple[int, ...]

    def key(self) -> tuple[Hashable, ...]:
        return "projected", *self.key_of_kernel

    def methods(self) -> Mapping[str, Method]:
        return {
            name: method._replace(prepare=partial(self._after, method))
            for name, method in self.methods_of_kernel.items()
        }

    def _after(self, method: Method) -> Prepared:
        kernel_norm_sq, kernel = method.prepare()
        prepared = replace(self, kernel=kernel)
        norm_sq = kernel_norm_sq - sum_of_squares(self.mean) - sum_of_squares(self.along)
        return mark(norm_sq, norm_sq < CANCELLATION * kernel_norm_sq), prepared

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.kernel.weighted_sum(weights) - self._removed(weights @ self.mean, weights @ self.along)

    def instantiate(self) -> Tensor:
        return self.kernel.instantiate() - self._removed(self.mean, self.along)

    def _removed(self, mean: Tensor, along: Tensor) -> Tensor:
        """[..., out] coefficients -> [..., *S]."""
        removed = torch.addcmul(mean[..., None] * self.unit.shape[1] ** -0.5, along[..., None], self.unit)
        return removed.view(*removed.shape[:-1], *self.shape[1:])

    def select(self, rows: Tensor) -> ExampleGradients:
        return replace(self, kernel=self.kernel.select(rows), mean=self.mean[rows], along=self.along[rows])


def standardized_convolution(
    module: WeightStandardizedConv2d, activation: Tensor, output: Tensor | None, examples: int
) -> Differentiate:
    """Return the rule of WeightStandardizedConv2d: gradients of weight, gain and bias.

    Per output channel: kernel = gain * unit, unit = centred / divisor, divisor = max(|centred|, sqrt(eps)). Let G be
    the gradient of one channel's kernel. The gradient of the gain is <G, unit>. The gradient of the weight is
    gain / divisor * G minus its mean and, unless the divisor is sqrt(eps), minus its component along unit.

    `output`: divided by the gains; must be None unless `outputs_are_precise`.
    """
    response = None if output is None or output.dtype in HALF_PRECISION else output.detach()
    version = None if response is None else response._version  # later modules may change the output in place

    def differentiate(grad: Tensor) -> dict[str, ExampleGradients]:
        gain = module.gain.detach()
        centred, divisor = module.centred(module.weight.detach())
        unit = centred / divisor[:, None]
        fan_in = unit.shape[1]

        kernel = correlations(module, widen(activation), widen(grad), examples)
        convolve = partial(
            functional.conv2d, stride=module.stride, padding=kernel.geometry.padding, dilation=module.dilation
        )
        shift = _over_positions(kernel.grads, None, examples)
        bias = torch.zeros_like(gain) if module.bias is None else module.bias.detach()
        if response is None or response._version != version:
            along = _over_positions(kernel.grads, convolve(kernel.inputs, unit.view_as(module.weight)), examples)
        else:
            along = (_over_positions(kernel.grads, widen(response), examples) - bias * shift) / gain
        ones = kernel.inputs.new_full((1, 1, *module.weight.shape[2:]), fan_in**-0.5)
        mean = _over_positions(kernel.grads, convolve(kernel.inputs.sum(1, keepdim=True), ones), examples)

        scale = gain / divisor
        scaled = replace(kernel, grads=kernel.grads * scale.view(-1, *[1] * (grad.dim() - 2)))
        free = divisor > module.eps**0.5
        weight = Projected(
            scaled,
            scaled.methods(),
            scaled.key(),
            mean * scale,
            along * (scale * free),
            unit * free[:, None],
            tuple(module.weight.shape),
        )
        return {"weight": weight, "gain": Instantiated(along), "bias": Instantiated(shift)}

    return differentiate


def outputs_are_precise(modules: Sequence[WeightStandardizedConv2d]) -> Tensor:
    """Return the mask [len(modules)]: whether each module's gains are large enough to divide its output by them."""
    gains = list[Tensor](module.gain for module in modules)
    smallest = torch.stack(torch._foreach_norm(gains, -math.inf))
    largest = torch.stack(torch._foreach_norm(gains, math.inf))
    biases = [module.gain.new_zeros(1) if module.bias is None else module.bias for module in modules]
    most = torch.stack(torch._foreach_norm(biases, math.inf))
    return smallest > SMALLEST_GAIN * torch.maximum(largest, most)


def _over_positions(grads: Tensor, response: Tensor | None, examples: int) -> Tensor:
    """Return the sum of grads [B K, out, *positions] (times the response, if given) over rows and positions: [B,
    out].
    """
    product = grads if response is None else grads * response
    return summed_rows(product.flatten(2).sum(2), examples)
