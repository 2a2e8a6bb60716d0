"""No clipping: the non-private baseline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpsweep.workers.clipping.clipping_method import ClippingMethod, ClippingState, ClipRule, PublicFacts


@dataclass(frozen=True)
class NoClipping(ClippingMethod):
    """Weight 1 for every gradient. The sensitivity is infinite, so a trial with noise is refused."""

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        return ClipRule(float("inf"), lambda examples: torch.ones_like(examples.norms))
