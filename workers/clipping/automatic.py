"""Automatic clipping: gradients are normalised instead of clipped (Bu et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpsweep.accounting.errors import require_finite
from dpsweep.workers.clipping.clipping_method import (
    RISING,
    ClippingMethod,
    ClippingState,
    ClipRule,
    Examples,
    PublicFacts,
)

_SMALLEST = 1e-12
"""Smallest accurate norm; below it, underflow in the float32 squares of up to 1e9 entries may err by more than 1e-5."""


@dataclass(frozen=True)
class AutomaticClipping(ClippingMethod):
    """Each gradient g becomes C g / (||g|| + stability): AUTO-S; with stability 0, AUTO-V. Sensitivity C.

    A gradient with norm below 1e-12 gets weight 0: its norm is inaccurate, because squared entries underflow in
    float32, so AUTO-V would scale it to an unknown length.
    """

    stability: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite("stability of automatic clipping", self.stability, at_least=0.0)

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        bound, stability = state.bound, self.stability

        def weigh(examples: Examples) -> Tensor:
            factor = bound / (examples.norms + stability)
            return torch.where(examples.norms >= _SMALLEST, factor, torch.zeros_like(factor))

        return ClipRule(bound, weigh, {"all": bound}, RISING)
