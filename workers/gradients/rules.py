"""Types of the rules that compute per-example gradients of a layer type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from workers.gradients.factors import ExampleGradients

Differentiate = Callable[..., Mapping[str, ExampleGradients]]
"""Gradient with respect to the layer's output -> per-example gradients by local parameter name."""

Rule = Callable[..., Differentiate]
"""(module, activation, output, examples) -> Differentiate, called during the forward pass.

Activation and output have K consecutive rows per example, whose gradients are summed. ``output`` is None if it is not
available; a rule that uses it must also work without it.
"""

LinearOf = Callable[[Tensor, str, str], Tensor]
"""(activation, name of a weight, name of a bias) -> output of this linear map; its gradients are captured."""

Rewrite = Callable[..., Any]
"""(module, linear_of, *args, **kwargs) -> the output of the module, or None if the rewrite does not cover the call."""
