"""Base class of clipping methods that query the number of examples of each group in a batch."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpsweep.accounting.errors import require_finite
from dpsweep.workers.clipping.clipping_method import BatchQuery, ClippingMethod, ClippingState, PublicFacts


def counts_of(values: Tensor, size: int) -> Tensor:
    """Return how often each of 0 to size - 1 is among the values. `torch.bincount` would wait for a GPU."""
    return (values[:, None] == torch.arange(size, device=values.device)).sum(0).double()


@dataclass(frozen=True)
class GroupCountClipping(ClippingMethod, ABC):
    """A clipping method whose side query counts examples by group. Each is in one count, so the sensitivity is 1.

    `count_noise_multiplier`: noise std of each count over the sensitivity. `count_memory`: weight of earlier counts in
    a moving average of the noisy counts, which costs no privacy. `0` uses only the latest counts, and values close to 1
    help when groups have few examples per batch.
    """

    count_noise_multiplier: float = 10.0
    count_memory: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite("count_noise_multiplier", self.count_noise_multiplier, above=0.0)
        require_finite("count_memory", self.count_memory, at_least=0.0, below=1.0)

    @property
    def query(self) -> BatchQuery:
        return BatchQuery("group counts", 1.0, self.count_noise_multiplier)

    def averaged(self, state: ClippingState, noisy_answer: Tensor) -> Tensor:
        """Return the moving average of the noisy counts, with weight 1 - count_memory on the latest.
        Post-processing.
        """
        if state.counts is None:
            return noisy_answer
        return self.count_memory * state.counts + (1.0 - self.count_memory) * noisy_answer

    def advance(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClippingState:
        return replace(state, counts=self.averaged(state, noisy_answer))
