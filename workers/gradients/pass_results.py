"""Results of a pass over a batch, and norms combined from the squared norms of each parameter's gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.gradients.factors import ExampleGradients
from dpsweep.workers.gradients.modes import RandomState


class Sums:
    """Running sums by parameter name."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._sums: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add values by name. The first value of a name is not copied, and is changed in place by later ones."""
        known = values.keys() & self._sums.keys()
        if known:  # one operation for all
            torch._foreach_add_([self._sums[name] for name in known], [values[name] for name in known])
        self._sums |= {name: value for name, value in values.items() if name not in known}

    def complete(self) -> dict[str, Tensor]:
        """Return the sums by name, in the order and dtypes of the parameters; zeros where nothing was added."""
        return {
            name: self._sums[name].to(parameter.dtype) if name in self._sums else torch.zeros_like(parameter)
            for name, parameter in self._parameters.items()
        }


@dataclass(frozen=True)
class Combination:
    """Combines squared norms by parameter into norms.

    layers: number of layers L. layer_of: index of each parameter's layer. layerwise: whether to keep norms per layer.
    """

    layers: int
    layer_of: Mapping[str, int]
    layerwise: bool

    def of_squares(self, squares: Mapping[str, Tensor], losses: Tensor) -> BatchNorms:
        """Return norms [B] from ``squares``, the squared norms [B] of the gradients of each parameter, by its name."""
        if not self.layerwise:  # one sum of all: a sum after the other would start as many kernels
            total = torch.stack(list(squares.values())).sum(0) if squares else torch.zeros_like(losses)
            return BatchNorms(total.sqrt_(), None, losses)
        by_layer: list[list[Tensor]] = [[] for _ in range(self.layers)]
        for name, norm_sq in squares.items():
            by_layer[self.layer_of[name]].append(norm_sq)
        sums = [reduce(torch.add, found) if found else torch.zeros_like(losses) for found in by_layer]
        norms = reduce(torch.add, sums).sqrt()
        return BatchNorms(norms, torch.stack(sums, 1).sqrt_(), losses)

    def precise(
        self, squares: Mapping[str, Tensor], gradients: Mapping[str, ExampleGradients], losses: Tensor
    ) -> tuple[BatchNorms, Tensor | None]:
        """Return `of_squares` with NaN computed again, and the mask [B] of finite norms; None if all are finite."""
        for name, norm_sq in squares.items():
            rows = norm_sq.isnan().nonzero().squeeze(1)
            if len(rows):
                norm_sq[rows] = gradients[name].precise_norm_sq(rows).to(norm_sq)
        norms = self.of_squares(squares, losses)
        finite = norms.norms.isfinite()
        if bool(finite.all()):
            return norms, None
        infinite_for_nan(norms)
        return norms, finite

    def joined(self, parts: Sequence[BatchNorms], device: torch.device) -> BatchNorms:
        """Return the norms of all micro-batches."""
        if not parts:
            empty = torch.zeros(0, device=device)
            return BatchNorms(empty, empty.new_zeros(0, self.layers) if self.layerwise else None, empty)
        if len(parts) == 1:
            return parts[0]
        return BatchNorms.joined(parts)


def infinite_for_nan(norms: BatchNorms) -> None:
    """Replace NaN by infinity, in place."""
    for values in (norms.norms, norms.layer_norms):
        if values is not None:
            values.nan_to_num_(nan=math.inf, posinf=math.inf)


@dataclass(frozen=True)
class BatchNorms:
    """L2 norms of the per-example gradients of one batch, before any clipping.

    `norms`: [B], over all trainable parameters. `layer_norms`: [B, L] in the order of `GradientEngine.layer_names`, or
    None if the engine is not layerwise. `losses`: [B]. The norm of a gradient that is not finite (or whose squared norm
    overflows) is +inf, so that ``min(1, C / norm)`` is 0.
    """

    norms: Tensor
    layer_norms: Tensor | None
    losses: Tensor

    @staticmethod
    def joined(parts: Sequence[BatchNorms]) -> BatchNorms:
        """Return the norms of all parts, at least one, in their order."""
        layer_norms = [part.layer_norms for part in parts if part.layer_norms is not None]
        return BatchNorms(
            torch.cat([part.norms for part in parts]),
            torch.cat(layer_norms) if layer_norms else None,
            torch.cat([part.losses for part in parts]),
        )

    def copied(self) -> BatchNorms:
        """Return copies."""
        layer_norms = None if self.layer_norms is None else self.layer_norms.clone()
        return BatchNorms(self.norms.clone(), layer_norms, self.losses.clone())

    def of_first(self, examples: int) -> BatchNorms:
        """Return norms and losses of the first examples."""
        if examples == self.losses.shape[0]:
            return self
        layer_norms = None if self.layer_norms is None else self.layer_norms[:examples]
        return BatchNorms(self.norms[:examples], layer_norms, self.losses[:examples])


class Forwarded(NamedTuple):
    """Result of a forward and a backward pass over examples and padding.

    `total`: sum of the norms, not finite if any must be computed again. `gradients`: prepared for a weighted sum if one
    follows. `squares`: their squared norms, by parameter.
    """

    norms: BatchNorms
    total: Tensor
    gradients: Mapping[str, ExampleGradients]
    squares: Mapping[str, Tensor]


@dataclass(frozen=True)
class Pass:
    """One micro-batch after its backward pass.

    `finite`: mask of finite norms, padding included, or None if all are. `gradients`: empty after a norm pass.
    `random_state`: the state from which the pass started, or None if it drew nothing.
    """

    norms: BatchNorms
    finite: Tensor | None
    gradients: Mapping[str, ExampleGradients]
    random_state: RandomState | None = None

    def without_infinite(self, weights: Tensor) -> Tensor:
        """Return weights [B] or [B, L], set to 0 for examples whose norm is not finite."""
        if self.finite is None:
            return weights
        finite = self.finite[: len(weights)]
        return weights.masked_fill(~(finite if weights.dim() == 1 else finite[:, None]), 0.0)

    def non_finite(self) -> int:
        """Return the number of examples whose norm is not finite."""
        return 0 if self.finite is None else int((~self.finite[: len(self.norms.losses)]).sum())


@dataclass(frozen=True)
class WeightedSum:
    """``gradients[name] = sum_i weights[i] * g_i[name]``, each in the shape of its parameter.

    `non_finite`: number of examples whose gradient is not finite; their weights are 0. `weights`: [B] or [B, L], as
    used.
    """

    norms: BatchNorms
    weights: Tensor
    gradients: Mapping[str, Tensor]
    non_finite: int


def require_same(differ: Tensor) -> None:
    """Raise InvalidInput if losses differ in the second pass: the norms then belong to other gradients."""
    if bool(differ.any()):
        raise InvalidInput(
            "the model's losses on the same rows differ from one pass to the next: it draws random numbers from "
            "elsewhere than torch's own generators, or changes while it runs; use torch.rand and the like"
        )
