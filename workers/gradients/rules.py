"""Types of the functions that compute per-example gradients of a layer type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from dpsweep.workers.gradients.factors import ExampleGradients

Differentiate = Callable[..., Mapping[str, ExampleGradients]]
"""Gradient with respect to the layer's output -> per-example gradients by local parameter name."""

Rule = Callable[..., Differentiate]
"""(module, activation, output, examples) -> Differentiate, called during the forward pass.

Activation and output have K consecutive rows per example, whose gradients are summed. ``output`` is None if it is not
available; a rule that uses it must also work without it.
"""


class Recorder(Protocol):
    """Interface by which a rewrite reports its linear maps; the batch is on the first axis of tensors."""

    @property
    def examples(self) -> int:
        """Number of examples, each of K consecutive rows."""
        ...

    def linear(self, activation: Tensor, weight: str, bias: str) -> Tensor:
        """Return the output of the linear map with the parameters of these names; their gradients are captured."""
        ...

    def record(self, outputs: Sequence[Tensor], differentiate: Differentiate, activation: Tensor) -> None:
        """Capture gradients: ``differentiate`` gets the gradients of ``outputs``, and may read ``activation``.

        All ``outputs`` must require gradients.
        """
        ...


Rewrite = Callable[..., Any]
"""(module, recorder, *args, **kwargs) -> the output of the module, or None if the rewrite does not cover the call."""
