"""Automatic clipping: gradients are normalised instead of clipped (Bu et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accounting.errors import require_finite
from workers.clipping.protocol import ClippingMethod, ClippingState, ClipRule, Examples, Setting


@dataclass(frozen=True)
class AutomaticClipping(ClippingMethod):
    """C g / (||g|| + stability): AUTO-S; stability 0 is AUTO-V. Sensitivity C.

    A gradient of norm 0 adds 0, also for AUTO-V, whose quotient would be 0/0.
    """

    stability: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite("stability of automatic clipping", self.stability, at_least=0.0)

    def decide(self, state: ClippingState, noisy_answer: Tensor, setting: Setting) -> ClipRule:
        bound, stability = state.bound, self.stability

        def weigh(examples: Examples) -> Tensor:
            factor = bound / (examples.norms + stability)
            return torch.where(torch.isfinite(factor), factor, torch.zeros_like(factor))

        return ClipRule(bound, weigh, {"all": bound})
