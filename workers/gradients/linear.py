"""nn.Linear: per-example gradients are sums of outer products over the positions of an example."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpsweep.workers.gradients.factors import (
    LARGE_SQUARE,
    ExampleGradients,
    Instantiated,
    NormMethod,
    Planned,
    as_multiplied,
    gram_norm_sq,
    in_matrix_units,
    keep,
    mark_inaccurate,
    product,
    scaled_parts,
    sum_of,
    sum_of_squares,
    wide,
    widen,
)
from dpsweep.workers.gradients.planners import Planner, device_rates
from dpsweep.workers.gradients.rules import Differentiate

_ALIGNMENT: Final = 8
"""Gram matrices in matrix units have a multiple of it as rows, without which cuBLAS takes a slower kernel."""
_FEW_POSITIONS: Final = 8
"""Maximum number of positions of a gradient that counts as short."""
_FEW_VALUES: Final = 1024
"""Maximum number of values at which a short gradient is instantiated, in fewer operations than ghost norms."""
_SQUARES: Final = "ghost squares"
"""Name of squared norms that `gram_together` leaves with gradients for their next use."""


@dataclass(frozen=True)
class OuterProducts(Planned):
    """g_i = sum_t grads[i, t] (x) activations[i, t]; activations [B, T, d], grads [B, T, p], S = (p, d)."""

    activations: Tensor
    grads: Tensor

    def key(self) -> tuple[Hashable, ...]:
        return "outer products", self.activations.device.type, *self.activations.shape[1:], self.grads.shape[2]

    def methods(self) -> Mapping[str, NormMethod]:
        (examples, length, width), height = self.activations.shape, self.grads.shape[2]
        rate = device_rates(self.activations.device, self.activations.dtype)
        gram = 2.5 * length**2 * (width + height) / rate.gemm + 7 * length**2 / rate.elementwise  # as measured
        outer = 2 * length * width * height / rate.gemm
        sweep = width * height / rate.elementwise
        seconds = examples * (outer + sweep), examples * sweep
        instantiate = NormMethod(*seconds, lambda: keep(self.instantiate()), examples * width * height)
        if length == 0 or self.is_small:  # 0 in a batch without any text, trimmed to its longest one
            return {"instantiate": instantiate}
        return {
            "gram": NormMethod(examples * gram, examples * outer, lambda: (self._gram_norm_sq(), self)),
            "instantiate": instantiate,
        }

    @property
    def is_small(self) -> bool:
        """Return whether a gradient has few positions and few values."""
        return self.has_few_positions and self.activations.shape[2] * self.grads.shape[2] <= _FEW_VALUES

    @property
    def has_few_positions(self) -> bool:
        """Return whether ghost norms take longer to start than to compute."""
        return 0 < self.activations.shape[1] <= _FEW_POSITIONS

    @property
    def grams(self) -> tuple[Tensor, Tensor]:
        """Return the Gram matrices [B, T, T] of activations and of grads, T rounded up as in `_aligned`."""
        activations, grads = _aligned(self.activations), _aligned(self.grads)
        return product(activations, activations.mT), product(grads, grads.mT)

    def _gram_norm_sq(self) -> Tensor:
        known: Tensor | None = vars(self).pop(_SQUARES, None)
        return gram_norm_sq(*self.grams) if known is None else known

    def weighted_sum(self, weights: Tensor) -> Tensor:
        activations, grads = self.activations, self.grads
        if activations.shape[2] < grads.shape[2]:  # scale the smaller factor
            parts, transposed = scaled_parts(activations, weights, grads), grads.flatten(0, 1).mT
            return sum_of(product(transposed, part.flatten(0, 1)) for part in parts)
        parts, flat = scaled_parts(grads, weights, activations), activations.flatten(0, 1)
        return sum_of(product(part.flatten(0, 1).mT, flat) for part in parts)

    def instantiate(self) -> Tensor:
        return product(self.grads.mT, self.activations)

    def select(self, rows: Tensor) -> OuterProducts:
        return OuterProducts(self.activations[rows], self.grads[rows])


def _aligned(factor: Tensor) -> Tensor:
    """Return [B, T, d] with zeros up to a T for which matrix units have fast kernels; zeros add nothing to norms."""
    missing = -factor.shape[1] % _ALIGNMENT
    return functional.pad(factor, (0, 0, 0, missing)) if missing and in_matrix_units(factor) else factor


def gram_together(gradients: Iterable[ExampleGradients]) -> None:
    """Compute small ghost norms of several layers together, and leave them with the gradients for their next use."""
    by_form = dict[Hashable, list[OuterProducts]]()
    for each in gradients:
        if isinstance(each, OuterProducts) and each.has_few_positions and not each.is_small:
            by_form.setdefault((each.grads.shape[:2], each.grads.dtype), []).append(each)
    for alike in by_form.values():
        if len(alike) > 1:
            stacks = (torch.cat(grams) for grams in zip(*(each.grams for each in alike), strict=True))
            for each, squares in zip(alike, gram_norm_sq(*stacks).split(len(alike[0].grads)), strict=True):
                vars(each)[_SQUARES] = squares


@dataclass(frozen=True)
class OuterProduct(ExampleGradients):
    """g_i = grads[i] (x) activations[i]; activations [B, d], grads [B, p] (the gradients of a bias), S = (p, d)."""

    activations: Tensor
    grads: Instantiated

    def norm_sq(self, planner: Planner) -> Tensor:
        """Return |g (x) a| = |g| |a| (Goodfellow 2015).

        NaN where one factor is so large that underflow in the square of the other is not negligible.
        """
        of_activations, of_grads = sum_of_squares(self.activations), self.grads.squared_norms
        large = torch.maximum(of_activations, of_grads) > LARGE_SQUARE
        return mark_inaccurate(of_activations.mul_(of_grads), large)

    def precise_norm_sq(self, rows: Tensor) -> Tensor:
        """Square both factors in float64."""
        factors = (self.activations, self.grads.gradients)
        of_activations, of_grads = (sum_of_squares(factor[rows].double()) for factor in factors)
        return of_activations * of_grads

    def weighted_sum(self, weights: Tensor) -> Tensor:
        grads, weights = self.grads.gradients, weights[:, None]
        if self.activations.shape[1] < grads.shape[1]:  # scale the smaller factor
            return grads.mT @ (self.activations * weights)
        return (grads * weights).mT @ self.activations

    def instantiate(self) -> Tensor:
        return self.grads.gradients[:, :, None] * self.activations[:, None, :]

    def select(self, rows: Tensor) -> ExampleGradients:
        return OuterProduct(self.activations[rows], self.grads.select(rows))


def _by_position(activation: Tensor, grad: Tensor, examples: int) -> tuple[Tensor, Tensor]:
    """[rows, ..., d] and [rows, ..., p] -> [examples, positions, d] and [examples, positions, p]."""
    activations, grads = as_multiplied(activation, grad)
    return activations.reshape(examples, -1, activation.shape[-1]), grads.reshape(examples, -1, grad.shape[-1])


def affine(activation: Tensor, examples: int, weight: str = "weight", bias: str = "bias") -> Differentiate:
    """Return the rule of x -> x W' + b for an activation [rows, ..., d]; rows of an example become positions."""

    def differentiate(grad: Tensor) -> dict[str, ExampleGradients]:
        if activation.dim() == 2 and activation.shape[0] == examples:
            of_bias = Instantiated(widen(grad))
            return {weight: OuterProduct(widen(activation), of_bias), bias: of_bias}
        activations, grads = _by_position(activation, grad, examples)
        return {weight: OuterProducts(activations, grads), bias: Instantiated(grads.sum(1, dtype=wide(grads)))}

    return differentiate


def linear(module: nn.Linear, activation: Tensor, output: Tensor | None, examples: int) -> Differentiate:
    """Return the rule of nn.Linear."""
    return affine(activation, examples)


def transposed_linear(module: nn.Module, activation: Tensor, output: Tensor | None, examples: int) -> Differentiate:
    """Return the rule of transformers.pytorch_utils.Conv1D, which is nn.Linear with its weight stored as [in, out]."""

    def differentiate(grad: Tensor) -> dict[str, ExampleGradients]:
        activations, grads = _by_position(activation, grad, examples)
        return {"weight": OuterProducts(grads, activations), "bias": Instantiated(grads.sum(1, dtype=wide(grads)))}

    return differentiate
