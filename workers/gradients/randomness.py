"""The state of torch's global random number generators, so that a second pass can repeat the draws of the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """States of the global generators of the CPU and, if ``device`` is a CUDA device, of that device."""

    device: torch.device
    cpu: Tensor
    cuda: Tensor | None

    @staticmethod
    def of(device: torch.device) -> RandomState:
        """Return the current states."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return RandomState(device, torch.get_rng_state(), cuda)

    def is_current(self) -> bool:
        """Return whether no number was drawn since."""
        now = RandomState.of(self.device)
        same_cuda = self.cuda is None or now.cuda is None or torch.equal(self.cuda, now.cuda)
        return same_cuda and torch.equal(self.cpu, now.cpu)

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and self.device.type == "cuda":  # a run may resume on a machine without a GPU
            torch.cuda.set_rng_state(self.cuda, self.device)

    @staticmethod
    @contextmanager
    def preserved(device: torch.device) -> Iterator[None]:
        """Restore the current states at the end of the context."""
        before = RandomState.of(device)
        try:
            yield
        finally:
            before.restore()
