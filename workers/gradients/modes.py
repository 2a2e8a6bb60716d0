"""Save and restore what a second pass must repeat: the mode of each module, and the state of torch's generators."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def modes_of(model: nn.Module) -> dict[str, bool]:
    """Return whether each module is in training mode, by its name in the model."""
    return {name: module.training for name, module in model.named_modules()}


Structure = tuple[tuple[Hashable, ...], ...]
"""`structure_of` a model."""


def structure_of(model: nn.Module) -> Structure:
    """Return, of each module, what decides how it treats rows and may be changed between two batches.

    It is its name and mode, itself, hooks, and a forward of this module alone.
    """
    return tuple(
        (name, module.training, module, id(vars(module).get("forward")), *_hooks_of(module))
        for name, module in model.named_modules()
    )


def _hooks_of(module: nn.Module) -> Iterator[int]:
    """Yield a number for each hook, which torch gives to no other."""
    yield from module._forward_pre_hooks
    yield from module._forward_hooks
    yield from module._backward_pre_hooks
    yield from module._backward_hooks


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


def cuda_state(device: torch.device) -> Tensor | None:
    """Return the state of the global generator of a CUDA device; None of other devices."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_cuda_state(device: torch.device, state: Tensor | None) -> None:
    """Restore a `cuda_state`, if both are of CUDA: a run may resume on the other kind of device."""
    if state is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state, device)


@dataclass(frozen=True)
class RandomState:
    """States of the global generators of the CPU and, if ``device`` is a CUDA device, of that device."""

    device: torch.device
    cpu: Tensor
    cuda: Tensor | None

    @staticmethod
    def of(device: torch.device) -> RandomState:
        """Return the current states."""
        return RandomState(device, torch.get_rng_state(), cuda_state(device))

    def is_current(self) -> bool:
        """Return whether no number was drawn since."""
        now = RandomState.of(self.device)
        same_cuda = self.cuda is None or now.cuda is None or torch.equal(self.cuda, now.cuda)
        return same_cuda and torch.equal(self.cpu, now.cpu)

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        set_cuda_state(self.device, self.cuda)

    @staticmethod
    @contextmanager
    def preserved(device: torch.device) -> Iterator[None]:
        """Restore the current states at the end of the context."""
        before = RandomState.of(device)
        try:
            yield
        finally:
            before.restore()
