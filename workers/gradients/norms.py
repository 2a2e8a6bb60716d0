"""Norms of per-example gradients, combined from the squared norms of each parameter's gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from dpsweep.workers.gradients.factors import ExampleGradients
from dpsweep.workers.gradients.pass_results import BatchNorms


class Sums:
    """Running sums by parameter name."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Add ``value``. The first value of a name is not copied, and is changed in place by later ones."""
        if name in self._sums:
            self._sums[name] += value
        else:
            self._sums[name] = value

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
        """Return `of_squares` after computing NaN squares again, and the mask [B] of finite norms; None if all are
        finite.
        """
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
        layer_norms = [part.layer_norms for part in parts if part.layer_norms is not None]
        return BatchNorms(
            torch.cat([part.norms for part in parts]),
            torch.cat(layer_norms) if self.layerwise else None,
            torch.cat([part.losses for part in parts]),
        )


def infinite_for_nan(norms: BatchNorms) -> None:
    """Replace NaN by infinity, in place."""
    for values in (norms.norms, norms.layer_norms):
        if values is not None:
            values.nan_to_num_(nan=math.inf, posinf=math.inf)
