"""Per-example gradients of one parameter, kept as the factors they are products of.

A layer whose parameters see the activation ``a`` and whose output receives the gradient ``g`` has per-example
gradients that are cheap functions of the pair (a, g). Each class here is one such function, and answers the three
questions the engine asks. B is the number of examples; sums and norms are taken in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workers.gradients.planning import Planner


class ExampleGradients(Protocol):
    """The gradients g_1 .. g_B of one parameter of shape S."""

    def norm_sq(self, planner: Planner) -> Tensor:
        """[B]: squared L2 norm of every g_i."""
        ...

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """S: sum_i weights[i] g_i; weights [B] must be finite, and so must every g_i."""
        ...

    def instantiate(self) -> Tensor:
        """[B, *S]: every g_i."""
        ...

    def select(self, rows: Tensor) -> ExampleGradients:
        """Only the examples named by the index tensor ``rows``."""
        ...


def widen(tensor: Tensor) -> Tensor:
    """At least float32: norms of half-precision gradients are accumulated in single precision."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def sum_of_squares(gradients: Tensor) -> Tensor:
    """[B, ...] -> [B]."""
    flat = gradients.flatten(1)
    return torch.linalg.vecdot(flat, flat)


@dataclass(frozen=True)
class Instantiated:
    """Gradients already at hand as one tensor [B, *S]."""

    gradients: Tensor

    def norm_sq(self, planner: Planner) -> Tensor:
        return sum_of_squares(self.gradients)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return torch.tensordot(weights, self.gradients, 1)

    def instantiate(self) -> Tensor:
        return self.gradients

    def select(self, rows: Tensor) -> ExampleGradients:
        return Instantiated(self.gradients[rows])


@dataclass(frozen=True)
class Summed:
    """One parameter used several times (shared between modules, or a module called twice): the gradients add."""

    parts: Sequence[ExampleGradients]

    def norm_sq(self, planner: Planner) -> Tensor:
        return sum_of_squares(self.instantiate())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        first, *rest = (part.weighted_sum(weights) for part in self.parts)
        return sum(rest, first)

    def instantiate(self) -> Tensor:
        first, *rest = (part.instantiate() for part in self.parts)
        return sum(rest, first)

    def select(self, rows: Tensor) -> ExampleGradients:
        return Summed([part.select(rows) for part in self.parts])
