"""Flat clipping: the DP-SGD of Abadi et al. (2016)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpsweep.workers.clipping.clipping_method import (
    RISING,
    ClippingMethod,
    ClippingState,
    ClipRule,
    PublicFacts,
    clip_factor,
)


@dataclass(frozen=True)
class FlatClipping(ClippingMethod):
    """Each gradient g becomes g * min(1, C / ||g||). Sensitivity C."""

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        bound = state.bound
        return ClipRule(bound, lambda examples: clip_factor(examples.norms, bound), {"all": bound}, RISING)
