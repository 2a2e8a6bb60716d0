"""Layers that normalise within an example. The gradient of the scale is g * x_hat, summed over the other axes."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpsweep.workers.gradients.factors import ExampleGradients, Instantiated, summed_rows, widen
from dpsweep.workers.gradients.rules import Differentiate


def group_norm(module: nn.GroupNorm, activation: Tensor, output: Tensor | None, examples: int) -> Differentiate:
    """Return the rule of nn.GroupNorm."""
    return _channelwise(activation, module.num_groups, module.eps, examples, _kept_statistics(output))


def instance_norm(module: nn.InstanceNorm2d, activation: Tensor, output: Tensor | None, examples: int) -> Differentiate:
    """Return the rule of nn.InstanceNorm1d, 2d and 3d."""
    return _channelwise(activation, activation.shape[1], module.eps, examples)


Statistics = tuple[Tensor, Tensor]
"""Mean and 1 / std [B K, groups]."""


def _kept_statistics(output: Tensor | None) -> Statistics | None:
    """Statistics that autograd saved in the forward pass of a GroupNorm, if any; reuse saves 5 % of a ResNet20 pass."""
    node = None if output is None else output.grad_fn
    if node is None or not node.name().startswith("NativeGroupNormBackward"):
        return None
    mean, inverse_std = (getattr(node, f"_saved_result{index}", None) for index in (1, 2))
    return None if mean is None or inverse_std is None else (mean, inverse_std)


def _channelwise(
    activation: Tensor, groups: int, eps: float, examples: int, kept: Statistics | None = None
) -> Differentiate:
    """Gradients [B, C] for an activation [B K, C, *size]. kept: statistics of the groups, if available.

    The kernel of the ordinary backward pass sums over examples. Here it is given the channels of all rows as channels
    of a single example, so that it returns a sum for each row.
    """
    rows, channels = activation.shape[:2]
    length = prod(activation.shape[2:])

    def differentiate(grad: Tensor) -> dict[str, ExampleGradients]:
        inputs, grads = widen(activation).contiguous(), widen(grad).contiguous()
        mean, inverse_std = kept or torch.native_group_norm(inputs, None, None, rows, channels, length, groups, eps)[1:]
        _, scale, shift = torch.ops.aten.native_group_norm_backward(
            grads.view(1, -1, length),
            inputs.view(1, -1, length),
            mean.view(1, -1),
            inverse_std.view(1, -1),
            inputs.view(-1)[: rows * channels],  # not used; torch 2.11 fails without one
            1,
            rows * channels,
            length,
            rows * groups,
            [False, True, True],
        )
        return {
            "weight": Instantiated(summed_rows(scale.view(-1, channels), examples)),
            "bias": Instantiated(summed_rows(shift.view(-1, channels), examples)),
        }

    return differentiate


def batch_norm(module: nn.BatchNorm2d, activation: Tensor, output: Tensor | None, examples: int) -> Differentiate:
    """Return the rule of nn.BatchNorm1d, 2d and 3d in evaluation mode, where their statistics are constants."""
    assert module.running_mean is not None, "a module without running statistics is refused"
    assert module.running_var is not None, "likewise"
    channels, mean = module.num_features, module.running_mean
    scale = (module.running_var + module.eps).rsqrt()

    def differentiate(grad: Tensor) -> dict[str, ExampleGradients]:
        grads = widen(grad).reshape(examples, -1, channels, prod(grad.shape[2:]))
        inputs = widen(activation).reshape(grads.shape)
        normalised = (inputs - mean[:, None]) * scale[:, None]
        return {
            "weight": Instantiated((grads * normalised).sum((1, 3))),
            "bias": Instantiated(grads.sum((1, 3))),
        }

    return differentiate


def layer_norm(module: nn.LayerNorm, activation: Tensor, output: Tensor | None, examples: int) -> Differentiate:
    """Return the rule of nn.LayerNorm."""
    shape = module.normalized_shape

    def differentiate(grad: Tensor) -> dict[str, ExampleGradients]:
        grads = widen(grad)
        normalised = functional.layer_norm(widen(activation), shape, eps=module.eps)
        return {
            "weight": Instantiated((grads * normalised).reshape(examples, -1, *shape).sum(1)),
            "bias": Instantiated(grads.reshape(examples, -1, *shape).sum(1)),
        }

    return differentiate


def rms_norm(module: nn.RMSNorm, activation: Tensor, output: Tensor | None, examples: int) -> Differentiate:
    """Return the rule of nn.RMSNorm."""
    shape = module.normalized_shape

    def differentiate(grad: Tensor) -> dict[str, ExampleGradients]:
        normalised = functional.rms_norm(widen(activation), shape, eps=module.eps)
        return {"weight": Instantiated((widen(grad) * normalised).reshape(examples, -1, *shape).sum(1))}

    return differentiate
