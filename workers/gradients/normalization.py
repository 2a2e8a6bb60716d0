"""Normalisation layers within an example: the scale's gradient is g * x_hat summed over the other axes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional

from workers.gradients.factors import ExampleGradients, Instantiated, widen


def _channelwise(normalised: Tensor, grad: Tensor, examples: int) -> Mapping[str, ExampleGradients]:
    """[B K, C, *size] -> weight and bias gradients [B, C]."""
    scale = (grad * normalised).flatten(2).sum(2) if grad.dim() > 2 else grad * normalised
    shift = grad.flatten(2).sum(2) if grad.dim() > 2 else grad
    channels = grad.shape[1]
    return {
        "weight": Instantiated(scale.view(examples, -1, channels).sum(1)),
        "bias": Instantiated(shift.view(examples, -1, channels).sum(1)),
    }


def group_norm(module: nn.GroupNorm, activation: Tensor, grad: Tensor, examples: int) -> Mapping[str, ExampleGradients]:
    normalised = functional.group_norm(widen(activation), module.num_groups, eps=module.eps)
    return _channelwise(normalised, widen(grad), examples)


def instance_norm(
    module: nn.InstanceNorm2d, activation: Tensor, grad: Tensor, examples: int
) -> Mapping[str, ExampleGradients]:
    return _channelwise(functional.instance_norm(widen(activation), eps=module.eps), widen(grad), examples)


def layer_norm(module: nn.LayerNorm, activation: Tensor, grad: Tensor, examples: int) -> Mapping[str, ExampleGradients]:
    shape = module.normalized_shape
    grads = widen(grad)
    normalised = functional.layer_norm(widen(activation), shape, eps=module.eps)
    return {
        "weight": Instantiated((grads * normalised).reshape(examples, -1, *shape).sum(1)),
        "bias": Instantiated(grads.reshape(examples, -1, *shape).sum(1)),
    }


def rms_norm(module: nn.RMSNorm, activation: Tensor, grad: Tensor, examples: int) -> Mapping[str, ExampleGradients]:
    shape = module.normalized_shape
    normalised = functional.rms_norm(widen(activation), shape, eps=module.eps)
    return {"weight": Instantiated((widen(grad) * normalised).reshape(examples, -1, *shape).sum(1))}
