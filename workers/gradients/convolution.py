"""Gradients of convolutions, transposed ones too, with any stride, padding, padding mode, dilation and groups.

Of weight-standardised ones, the kernel's gradient is projected by the Jacobian of the standardisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from dpsweep.workers.gradients.factors import (
    CANCELLATION,
    HALF_PRECISION,
    ExampleGradients,
    Instantiated,
    NormMethod,
    Planned,
    Prepared,
    as_multiplied,
    gram_norm_sq,
    in_bfloat16,
    in_matrix_units,
    keep,
    mark_inaccurate,
    product,
    scaled_parts,
    sum_of,
    sum_of_squares,
    summed_rows,
    wide,
    widen,
)
from dpsweep.workers.gradients.planners import device_rates
from dpsweep.workers.gradients.rules import Differentiate
from dpsweep.workers.models import WeightStandardizedConv2d

CACHED_NUMBERS = 600_000
"""Values of a chunk of examples on a CPU; about as many as fit in a core's cache."""

NUMBERS_AT_ONCE = 2**27
"""Values of a chunk on another device: enough to keep it busy, and a small part of its memory."""

CHANNEL_BLOCK = 8
"""Channels that oneDNN's grouped convolutions compute at once. For numbers of input or output channels per group that
are not a multiple of it, they multiply unfolded inputs group by group, which is slower than `unfold`."""


@dataclass(frozen=True)
class Geometry:
    """The settings of a convolution that determine its weight gradient from input and output gradient."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.shape[2:]

    @property
    def channels_per_group(self) -> tuple[int, int]:
        """Input and output channels per group."""
        return self.shape[1], self.shape[0] // self.groups

    @property
    def is_pointwise(self) -> bool:
        """Return whether patches and pixels are the same, so that no values are copied into patches."""
        return prod(self.kernel) == prod(self.stride) == 1 and not any(self.padding)

    def weight_gradient(self, inputs: Tensor, grads: Tensor, copies: int = 1) -> Tensor:
        """Return the gradient [copies * out, in / groups, *kernel] of ``copies`` stacked kernels of ``shape``."""
        weight = inputs.new_empty(1).expand(copies * self.shape[0], *self.shape[1:])
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
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
        return gradients[1]

    def patches(self, inputs: Tensor, positions: tuple[int, ...]) -> Tensor:
        """Return the patch of every output position: [rows, in, *kernel, *positions], a view of the (padded) inputs.

        Copying this view is about twice as fast as `torch.nn.functional.unfold`, and works for any number of axes.
        """
        if any(self.padding):
            inputs = functional.pad(inputs, [width for width in reversed(self.padding) for _ in range(2)])
        by_row, by_channel, *by_axis = inputs.stride()
        by_tap = [step * gap for step, gap in zip(by_axis, self.dilation, strict=True)]
        by_position = [step * stride for step, stride in zip(by_axis, self.stride, strict=True)]
        size = (*inputs.shape[:2], *self.kernel, *positions)
        return inputs.as_strided(size, (by_row, by_channel, *by_tap, *by_position))


@dataclass(frozen=True)
class Correlations(Planned):
    """g_i = weight gradient of a convolution, summed over the K rows of example i.

    inputs: [B K, in, *size]. grads: [B K, out, *positions].
    """

    inputs: Tensor
    grads: Tensor
    geometry: Geometry
    examples: int

    def key(self) -> tuple[Hashable, ...]:
        shapes = self.inputs.shape[1:], self.grads.shape[1:]
        return "correlations", self.grads.device.type, self.grads.dtype, *shapes, self.geometry, self._rows

    def methods(self) -> Mapping[str, NormMethod]:
        return self._instantiating() | self._by_gram()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the weight gradient of an ordinary convolution, at its ordinary cost."""
        per_row = weights if self._rows == 1 else weights.repeat_interleave(self._rows)
        parts = scaled_parts(self.grads, per_row, self.inputs)
        if in_matrix_units(self.inputs):
            return self._sum_by_unfolding(parts)
        (scaled,) = parts
        return self.geometry.weight_gradient(self.inputs, scaled)

    def _sum_by_unfolding(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the weight gradient for grads that are the sum of ``parts``, in float32.

        A convolution in half precision would round the sum, by more than the noise hides.
        """
        outputs, width = self.geometry.shape[0], prod(self.geometry.shape[1:])
        patches = self.geometry.patches(self.inputs, self.grads.shape[2:])
        by_tap = torch.movedim(patches, 0, 1 + len(self.geometry.kernel)).reshape(width, -1)
        by_output = (part.transpose(0, 1).reshape(outputs, -1) for part in parts)
        return sum_of(product(each, by_tap.mT) for each in by_output).view(self.geometry.shape)

    def response(self, kernel: Tensor) -> Tensor:
        """Return the 2d convolution [B K, out, *positions] of the inputs with ``kernel`` [out, n], in float32.

        In matrix units the kernel is split into three parts, which together have all its bits.
        """
        if not in_matrix_units(self.inputs):
            geometry = self.geometry
            shaped = kernel.view(geometry.shape)
            settings = geometry.stride, geometry.padding, geometry.dilation, geometry.groups
            return functional.conv2d(self.inputs, shaped, None, *settings)
        positions = self.grads.shape[2:]
        patches = self.geometry.patches(self.inputs, positions).reshape(len(self.inputs), kernel.shape[1], -1)
        parts = (part.expand(len(patches), *part.shape) for part in in_bfloat16(kernel, 3))
        return sum_of(product(part, patches) for part in parts).view(len(patches), -1, *positions)

    def _patches(self) -> int:
        """Return the number of values in the patches of an example."""
        return self._rows * prod(self.grads.shape[2:]) * self.geometry.groups * prod(self.geometry.shape[1:])

    def instantiate(self) -> Tensor:
        _, gradients = min(self._instantiating().values(), key=lambda method: method.norm_seconds).prepare()
        return gradients.instantiate()

    def select(self, rows: Tensor) -> Correlations:
        selected = (rows[:, None] * self._rows + torch.arange(self._rows, device=rows.device)).flatten()
        return Correlations(self.inputs[selected], self.grads[selected], self.geometry, len(rows))

    @property
    def _rows(self) -> int:
        """K: rows per example."""
        return len(self.grads) // self.examples

    def _in_chunks(self, numbers: int, compute: Callable[[Correlations], Tensor]) -> Tensor:
        """Return what ``compute`` returns of parts of the batch, by example. numbers: values it needs per example."""
        at_once = CACHED_NUMBERS if self.grads.device.type == "cpu" else NUMBERS_AT_ONCE
        size, joined = max(1, at_once // numbers), None
        for start in range(0, self.examples, size):
            rows = slice(start * self._rows, (start + size) * self._rows)
            part = self.grads[rows]
            chunk = compute(Correlations(self.inputs[rows], part, self.geometry, len(part) // self._rows))
            if len(chunk) == self.examples:
                return chunk
            joined = chunk.new_empty(self.examples, *chunk.shape[1:]) if joined is None else joined
            joined[start : start + len(chunk)] = chunk
        assert joined is not None, "a batch has examples"
        return joined

    # -- by instantiation ---------------------------------------------------------------------------------------------

    def _instantiating(self) -> dict[str, NormMethod]:
        rate, geometry, rows = device_rates(self.grads.device, self.grads.dtype), self.geometry, len(self.grads)
        length, size = prod(self.grads.shape[2:]), prod(geometry.shape)
        sweep = self.examples * size / rate.elementwise
        moved = sweep + (self.inputs.numel() + self.grads.numel()) / rate.elementwise
        operations = 2.0 * rows * length * size
        copied = 0.0 if geometry.is_pointwise else self.examples * self._patches() / rate.unfold
        unfold = operations / rate.gemm + copied
        grouped = operations / rate.grouped if self._reaches_grouped_rate() else unfold + copied
        kept = self.examples * size
        by_groups = partial(self._in_chunks, size * self._rows, Correlations._by_groups)
        by_unfolding = partial(self._in_chunks, self._patches(), Correlations._by_unfolding)
        return {
            "grouped": NormMethod(grouped + moved + sweep, sweep, lambda: keep(by_groups()), kept),
            "unfold": NormMethod(unfold + sweep, sweep, lambda: keep(by_unfolding()), kept),
        }

    def _reaches_grouped_rate(self) -> bool:
        """Return whether grouped convolutions of this shape are fast.

        They are for whole blocks of channels, and for depthwise convolutions with more than one output position.
        """
        channels = self.geometry.channels_per_group
        if channels == (1, 1):
            return prod(self.grads.shape[2:]) > 1
        return not any(number % CHANNEL_BLOCK for number in channels)

    def _by_groups(self) -> Tensor:
        """Return gradients by one convolution with a group per row, as does torch.func (Rochette et al. 2019).

        In half precision it would round its results.
        """
        rows = len(self.grads)
        stacked = self.geometry.weight_gradient(
            widen(self.inputs).reshape(1, -1, *self.inputs.shape[2:]),
            widen(self.grads).reshape(1, -1, *self.grads.shape[2:]),
            rows,
        )
        return summed_rows(stacked.view(rows, *self.geometry.shape), self.examples)

    def _by_unfolding(self) -> Tensor:
        geometry, rows = self.geometry, len(self.grads)
        patches = geometry.patches(self.inputs, self.grads.shape[2:])
        by_group = patches.reshape(rows * geometry.groups, prod(geometry.shape[1:]), -1)
        by_output = self.grads.view(rows * geometry.groups, geometry.shape[0] // geometry.groups, -1)
        per_row = product(by_output, by_group.mT)
        return summed_rows(per_row.view(-1, *geometry.shape), self.examples)

    # -- by Gram matrices ---------------------------------------------------------------------------------------------

    def _by_gram(self) -> dict[str, NormMethod]:
        geometry, rate = self.geometry, device_rates(self.grads.device, self.grads.dtype)
        if geometry.groups > 1:
            return {}
        pixels, length = self._rows * prod(self.inputs.shape[2:]), self._rows * prod(self.grads.shape[2:])
        products = 2.0 * (pixels**2 * geometry.shape[1] + length**2 * geometry.shape[0])
        sweeps = geometry.kernel[0] * pixels * length + sum(geometry.kernel[1:]) * length**2 + 2 * length**2
        seconds = self.examples * (products / rate.gemm + sweeps / rate.elementwise)
        again = 2.0 * self.examples * length * prod(geometry.shape) / rate.gemm
        of_pixels = partial(self._in_chunks, pixels**2, Correlations._norms_of_pixels)
        by_pixels = NormMethod(seconds, again, lambda: (of_pixels(), self))
        if self.grads.device.type == "cpu":
            return {"gram": by_pixels}
        width = prod(geometry.shape[1:])
        products = 2.0 * length**2 * (width + geometry.shape[0]) / rate.gemm
        copied = length * width / rate.unfold + 4 * length**2 / rate.elementwise
        of_patches = partial(self._in_chunks, length * width, Correlations._norms_of_patches)
        by_patches = NormMethod(self.examples * (products + copied), again, lambda: (of_patches(), self))
        return {"gram": by_pixels, "gram of patches": by_patches}

    def _norms_of_pixels(self) -> Tensor:
        """Return ghost norms without unfolding: inner products of patches are sums of inner products of pixels.

        <patch_t, patch_s> = sum_o <x[t + o], x[s + o]> over kernel offsets o. So the Gram matrix of patches is the
        Gram matrix of pixels summed along its diagonals, one axis after the other. This takes 1 / prod(kernel) of the
        operations of a product of unfolded patches.
        """
        grads = _by_example(self.grads, self.examples).flatten(2)
        grad_gram = product(grads.mT, grads)
        return gram_norm_sq(self._patch_gram().view(grad_gram.shape), grad_gram)

    def _norms_of_patches(self) -> Tensor:
        """Return ghost norms from unfolded patches: more products than from pixels, and fewer passes over memory."""
        patches = self.geometry.patches(self.inputs, self.grads.shape[2:])
        by_tap = patches.reshape(len(patches), prod(self.geometry.shape[1:]), -1)
        factors = (_by_example(each, self.examples).flatten(2) for each in (by_tap, self.grads))
        return gram_norm_sq(*(product(each.mT, each) for each in factors))

    def _patch_gram(self) -> Tensor:
        """[B, K, *positions, K, *positions]: inner products of the patches of two output positions."""
        pixels = _by_example(self.inputs, self.examples)
        sizes = pixels.shape[2:]  # K, *size
        flat = pixels.flatten(2)
        gram = product(flat.mT, flat).view(self.examples, *sizes, *sizes)
        for axis, outputs in enumerate(self.grads.shape[2:]):
            gram = self._summed_over_taps(gram, axis, outputs)
        return gram

    def _summed_over_taps(self, gram: Tensor, axis: int, outputs: int) -> Tensor:
        """Return ``gram`` summed over the kernel offsets of one axis: its input positions become output positions."""
        geometry, size = self.geometry, self.inputs.shape[2 + axis]
        row_axis, column_axis = 2 + axis, 2 + axis + self.grads.dim() - 1
        shape = list(gram.shape)
        shape[row_axis] = shape[column_axis] = outputs
        total = gram.new_zeros(shape)
        stride, padding = geometry.stride[axis], geometry.padding[axis]
        for offset in range(
            -padding, geometry.kernel[axis] * geometry.dilation[axis] - padding, geometry.dilation[axis]
        ):
            first = max(0, -(offset // stride))  # output positions whose tap reads the input, not the padding
            last = min(outputs, (size - 1 - offset) // stride + 1)
            if first < last:
                read = slice(first * stride + offset, (last - 1) * stride + offset + 1, stride)
                written = total.narrow(row_axis, first, last - first).narrow(column_axis, first, last - first)
                index = [slice(None)] * gram.dim()
                index[row_axis] = index[column_axis] = read
                written += gram[tuple(index)]
        return total


def _by_example(rows: Tensor, examples: int) -> Tensor:
    """[B K, channels, *size] -> [B, channels, K, *size]."""
    return rows.view(examples, -1, *rows.shape[1:]).transpose(1, 2)


def correlations(module: _ConvNd, activation: Tensor, grad: Tensor, examples: int) -> Correlations:
    """Return per-example gradients of the kernel of a convolution module."""
    inputs, grads = as_multiplied(activation, grad) if module.groups == 1 else (widen(activation), widen(grad))
    inputs, grads = inputs.contiguous(), grads.contiguous()
    if module.padding_mode == "zeros" and not isinstance(module.padding, str):
        padding = module.padding
    else:  # "same" may pad unevenly, and other modes copy values: pad first
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        inputs = functional.pad(inputs, module._reversed_padding_repeated_twice, mode)
        padding = (0,) * len(module.stride)
    geometry = Geometry(tuple(module.weight.shape), module.stride, padding, module.dilation, module.groups)
    return Correlations(inputs, grads, geometry, examples)


def convolution(module: _ConvNd, activation: Tensor, output: Tensor | None, examples: int) -> Differentiate:
    """Return the rule of nn.Conv1d, Conv2d and Conv3d."""

    def differentiate(grad: Tensor) -> dict[str, ExampleGradients]:
        weight = correlations(module, activation, grad, examples)
        if module.bias is None:
            return {"weight": weight}
        bias = summed_rows(weight.grads.flatten(2).sum(2, dtype=wide(weight.grads)), examples)
        return {"weight": weight, "bias": Instantiated(bias)}

    return differentiate


def transposed_correlations(module: _ConvTransposeNd, activation: Tensor, grad: Tensor, examples: int) -> Correlations:
    """Return per-example gradients of the kernel of a transposed convolution. They belong to the convolution whose
    transpose it is, from output to input, with the output gradient in the place of the input.
    """
    inputs, grads = widen(grad).contiguous(), widen(activation).contiguous()
    axes = list(zip(grads.shape[2:], module.stride, module.dilation, module.kernel_size, strict=True))
    read = [(positions - 1) * stride + dilation * (taps - 1) + 1 for positions, stride, dilation, taps in axes]
    padding = tuple(int(width) for width in module.padding)
    if read != [size + 2 * width for size, width in zip(inputs.shape[2:], padding, strict=True)]:
        ends = [(width, need - size - width) for size, width, need in zip(inputs.shape[2:], padding, read, strict=True)]
        inputs = functional.pad(inputs, [width for pair in reversed(ends) for width in pair])  # or cut, if negative
        padding = (0,) * len(padding)
    geometry = Geometry(tuple(module.weight.shape), module.stride, padding, module.dilation, module.groups)
    return Correlations(inputs.contiguous(), grads, geometry, examples)


def transposed_convolution(
    module: _ConvTransposeNd, activation: Tensor, output: Tensor | None, examples: int
) -> Differentiate:
    """Return the rule of nn.ConvTranspose1d, ConvTranspose2d and ConvTranspose3d."""

    def differentiate(grad: Tensor) -> dict[str, ExampleGradients]:
        weight = transposed_correlations(module, activation, grad, examples)
        if module.bias is None:
            return {"weight": weight}
        return {"weight": weight, "bias": Instantiated(summed_rows(widen(grad).flatten(2).sum(2), examples))}

    return differentiate


def _scaled_correlations(
    module: WeightStandardizedConv2d, activation: Tensor, grad: Tensor, scale: Tensor, examples: int
) -> tuple[Correlations, Correlations]:
    """Return per-example gradients of the kernel, and of the kernel before its channels are scaled.

    In matrix units the scaled gradients of the output are rounded to bfloat16, as all of a pass under autocast. Norms
    and sums are then computed from the rounded ones.
    """
    kernel = correlations(module, activation, grad, examples)
    grads = kernel.grads * scale.view(-1, *[1] * (grad.dim() - 2))
    return kernel, replace(kernel, grads=grads.to(kernel.grads.dtype))


SMALLEST_GAIN = 0.1
"""Smallest accurate divisor of outputs, relative to the largest gain or bias; below it, the convolution runs again."""


@dataclass(frozen=True)
class Projected(Planned):
    """g_i = kernel_i - mean_i ones / sqrt(n) - along_i unit, row by row, where kernel_i is viewed as [out, n].

    `unit`: [out, n]; each row sums to 0 and has norm 1, or is 0. `mean`, `along`: [B, out], inner products of the rows
    of kernel_i with ones / sqrt(n) and with unit. Hence |g_i|^2 = |kernel_i|^2 - |mean_i|^2 - |along_i|^2.
    """

    kernel: ExampleGradients
    mean: Tensor
    along: Tensor
    unit: Tensor
    shape: tuple[int, ...]

    def key(self) -> tuple[Hashable, ...]:
        return "projected", *self._planned.key()

    def methods(self) -> Mapping[str, NormMethod]:
        methods = self._planned.methods()
        return {name: method._replace(prepare=partial(self._after, method)) for name, method in methods.items()}

    @property
    def _planned(self) -> Planned:
        assert isinstance(self.kernel, Planned), "a kernel that was prepared is not planned again"
        return self.kernel

    def _after(self, method: NormMethod) -> Prepared:
        kernel_norm_sq, kernel = method.prepare()
        prepared = replace(self, kernel=kernel)
        norm_sq = kernel_norm_sq - sum_of_squares(self.mean) - sum_of_squares(self.along)
        return mark_inaccurate(norm_sq, norm_sq < CANCELLATION * kernel_norm_sq), prepared

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

        scale = gain / divisor
        kernel, scaled = _scaled_correlations(module, activation, grad, scale, examples)
        ones = gain.new_full((1, 1, *module.weight.shape[2:]), fan_in**-0.5)
        summed, padding = kernel.inputs.sum(1, keepdim=True, dtype=ones.dtype), kernel.geometry.padding
        of_ones = functional.conv2d(summed, ones, None, module.stride, padding, module.dilation)
        shift = _over_positions(kernel.grads, None, examples)
        bias = torch.zeros_like(gain) if module.bias is None else module.bias.detach()
        of_unit = None
        if response is None or response._version != version:
            of_unit = kernel.response(unit)
            along = _over_positions(kernel.grads, of_unit, examples)
        else:
            along = (_over_positions(kernel.grads, widen(response), examples) - bias * shift) / gain
        if of_unit is not None and in_matrix_units(kernel.grads):  # what is taken away must be that of the rounded ones
            mean, of_scaled = (_over_positions(scaled.grads, each, examples) for each in (of_ones, of_unit))
        else:
            mean, of_scaled = _over_positions(kernel.grads, of_ones, examples) * scale, along * scale
        free = divisor > module.eps**0.5
        weight = Projected(scaled, mean, of_scaled * free, unit * free[:, None], tuple(module.weight.shape))
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
    """Return [B, out]: grads [B K, out, *positions], times any response, summed over rows and positions."""
    product = grads if response is None else grads * response
    return summed_rows(product.flatten(2).sum(2, dtype=wide(product)), examples)
