"""Which modules of a model train and which evaluate, to be brought back: `nn.Module.train` would set all alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn


def modes_of(model: nn.Module) -> dict[str, bool]:
    """Whether each module is in training mode, by its name in the model."""
    return {name: module.training for name, module in model.named_modules()}


def set_modes(model: nn.Module, modes: Mapping[str, bool]) -> None:
    """Bring `modes_of` back; modules it does not name stay as they are."""
    for name, module in model.named_modules():
        module.training = modes.get(name, module.training)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards every module is in the mode it is in now."""
    before = modes_of(model)
    try:
        yield
    finally:
        set_modes(model, before)
