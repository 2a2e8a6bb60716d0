"""Saves and restores the mode, training or evaluation, of each module; `nn.Module.train` sets one mode for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn


def modes_of(model: nn.Module) -> dict[str, bool]:
    """Return whether each module is in training mode, by its name in the model."""
    return {name: module.training for name, module in model.named_modules()}


def set_modes(model: nn.Module, modes: Mapping[str, bool]) -> None:
    """Restore the modes that `modes_of` returned; modules without an entry stay as they are."""
    for name, module in model.named_modules():
        module.training = modes.get(name, module.training)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the current modes at the end of the context."""
    before = modes_of(model)
    try:
        yield
    finally:
        set_modes(model, before)
