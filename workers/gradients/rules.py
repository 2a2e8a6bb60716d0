"""What a rule of a layer type is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from workers.gradients.factors import ExampleGradients

Differentiate = Callable[..., Mapping[str, ExampleGradients]]
"""Gradient with respect to the layer's output -> per-example gradients by local parameter name."""

Rule = Callable[..., Differentiate]
"""(module, activation, output, examples) -> Differentiate, called during the forward pass.

Activation and output have one row per example, or K consecutive rows of which an example is made: gradients of those
are summed. ``output`` is None where it is not at hand; a rule that uses it must also do without.
"""

LinearOf = Callable[[Tensor, str, str], Tensor]
"""(activation, name of a weight, name of a bias) -> output of that linear map, whose gradients are captured."""

Rewrite = Callable[..., Any]
"""(module, linear_of, *args, **kwargs) -> what the module returns, or None where the rewriting does not cover it."""
