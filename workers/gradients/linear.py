"""nn.Linear: per-example gradients are sums of outer products over the positions of an example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.gradients.factors import ExampleGradients, Instantiated, sum_of_squares, widen
from workers.gradients.planning import Alternative, Planner

CANCELLATION = 1e-3
"""Below this share of its upper bound, a squared norm from Gram matrices has lost too many digits."""


@dataclass(frozen=True)
class OuterProducts:
    """g_i = sum_t grads[i, t] (x) activations[i, t]; activations [B, T, d], grads [B, T, p], S = (p, d)."""

    activations: Tensor
    grads: Tensor

    def norm_sq(self, planner: Planner) -> Tensor:
        positions, width = self.activations.shape[1:]
        height = self.grads.shape[2]
        if positions == 1:  # |g (x) a| = |g| |a|
            return sum_of_squares(self.activations) * sum_of_squares(self.grads)
        return planner.choose(
            ("outer", *self.activations.shape, height, self.activations.device.type),
            {
                "ghost": Alternative(positions * positions * (width + height + 4.0), self._ghost_norm_sq),
                "instantiate": Alternative((positions + 4.0) * width * height, self._instantiated_norm_sq),
            },
        )

    def _instantiated_norm_sq(self) -> Tensor:
        return sum_of_squares(self.instantiate())

    def _ghost_norm_sq(self) -> Tensor:
        """sum_{t,s} <a_t, a_s> <g_t, g_s> (Goodfellow 2015; Li et al. 2022, Sec. 4.1).

        Where the terms cancel (the result is far below its bound (sum_t |a_t| |g_t|)^2), digits are lost; those
        examples, if any, are recomputed by instantiation.
        """
        activation_gram = self.activations @ self.activations.mT
        grad_gram = self.grads @ self.grads.mT
        norm_sq = torch.linalg.vecdot(activation_gram.flatten(1), grad_gram.flatten(1))
        diagonals = activation_gram.diagonal(dim1=1, dim2=2) * grad_gram.diagonal(dim1=1, dim2=2)
        bound = diagonals.clamp_min(0).sqrt().sum(1).square()
        cancelled = (norm_sq < CANCELLATION * bound).nonzero().squeeze(1)
        if len(cancelled):
            norm_sq[cancelled] = sum_of_squares(self.select(cancelled).instantiate())
        return norm_sq

    def weighted_sum(self, weights: Tensor) -> Tensor:
        weighted = self.grads * weights[:, None, None]
        return weighted.flatten(0, 1).mT @ self.activations.flatten(0, 1)

    def instantiate(self) -> Tensor:
        return self.grads.mT @ self.activations

    def select(self, rows: Tensor) -> OuterProducts:
        return OuterProducts(self.activations[rows], self.grads[rows])


def positions(tensor: Tensor, examples: int, features: int) -> Tensor:
    """[rows, ..., features] -> [B, T, features]: rows of the same example become positions."""
    return widen(tensor).reshape(examples, -1, features)


def linear(module: nn.Linear, activation: Tensor, grad: Tensor, examples: int) -> Mapping[str, ExampleGradients]:
    grads = positions(grad, examples, module.out_features)
    gradients: dict[str, ExampleGradients] = {}
    gradients["weight"] = OuterProducts(positions(activation, examples, module.in_features), grads)
    if module.bias is not None:
        gradients["bias"] = Instantiated(grads.sum(1))
    return gradients
