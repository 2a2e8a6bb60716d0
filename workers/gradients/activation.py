"""Activations with parameters. The gradient of a slope is g * min(0, x), summed over the entries it multiplies."""

from __future__ import annotations

import math

from torch import Tensor, nn

from dpsweep.workers.gradients.factors import ExampleGradients, Instantiated, widen
from dpsweep.workers.gradients.rules import Differentiate


def prelu(module: nn.PReLU, activation: Tensor, output: Tensor | None, examples: int) -> Differentiate:
    """Return the rule of nn.PReLU, which has one slope for all entries or one for each index of the second axis."""
    slopes = module.num_parameters

    def differentiate(grad: Tensor) -> dict[str, ExampleGradients]:
        sloped = widen(grad) * widen(activation).clamp(max=0.0)
        by_slope = sloped.reshape(examples, -1, slopes, math.prod(grad.shape[1:]) // slopes)
        return {"weight": Instantiated(by_slope.sum((1, 3)))}

    return differentiate
