"""Per-layer clipping: the gradient of every layer is clipped separately (McMahan et al., 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from dpsweep.workers.clipping.clipping_method import (
    RISING,
    ClippingMethod,
    ClippingState,
    ClipRule,
    PublicFacts,
    clip_factor,
    require_layer_norms,
)


@dataclass(frozen=True)
class PerLayerClipping(ClippingMethod):
    """The gradient of each of L layers is clipped at C / sqrt(L). Sensitivity C: the L squared bounds add up to C^2."""

    @property
    def layerwise(self) -> bool:
        return True

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        layers = len(facts.layer_names)
        bound = state.bound / math.sqrt(layers)
        return ClipRule(
            state.bound,
            lambda examples: clip_factor(require_layer_norms(examples), bound),
            dict.fromkeys(facts.layer_names, bound),
            RISING,
        )
