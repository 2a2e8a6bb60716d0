"""A clipping method of a user's own whose rule follows a noisy answer, and which remembers nothing between steps."""

from __future__ import annotations

import torch
from torch import Tensor

from dpsweep.workers.clipping import BatchQuery, ClippingMethod, ClippingState, ClipRule, Examples, PublicFacts


class NoisyCount(ClippingMethod):
    """Clips at a bound that grows with the noisy number of larger gradients in the batch."""

    @property
    def query(self) -> BatchQuery:
        return BatchQuery("above", 1.0, 5.0)

    def answer(self, state: ClippingState, batch: Examples, facts: PublicFacts) -> Tensor:
        return (batch.norms > state.bound).double().sum().reshape(1)

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        bound = state.bound * (1.5 + float(torch.tanh(noisy_answer[0] / facts.batch_size)))
        return ClipRule(bound, lambda examples: (bound / examples.norms).clamp(max=1.0), {"all": bound})
