"""Sums of gradients over micro-batches."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


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
