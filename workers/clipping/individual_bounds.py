"""Individual clipping: every example is clipped at its own norm at the last refresh (Yu et al., Algorithm 3)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpsweep.workers.clipping.clipping_method import (
    ClippingMethod,
    ClippingState,
    ClipRule,
    Examples,
    PublicFacts,
    clipped_at_own,
)


@dataclass(frozen=True)
class IndividualClipping(ClippingMethod):
    """g_i * min(1, Z_i / ||g_i||) with Z_i = min(norm of g_i at the last refresh, C). Sensitivity C.

    Z_i depends only on example i and the released models. Conditioned on these, the recorded contribution Z_i / C
    bounds the true one at every step until the next refresh, so individual epsilons are output-specific for any refresh
    interval. They are not guarantees: thresholds depend on the iterates, and nothing limits their total cost below the
    worst case (`dpsweep.workers.clipping.filter` does). A norm that is not finite at a refresh gives Z_i = C.
    """

    @property
    def keeps_to_contributions(self) -> bool:
        return True

    def start(self, bound: float, facts: PublicFacts) -> ClippingState:
        return ClippingState(bound, thresholds=torch.full((facts.dataset_size,), bound))

    def refresh(self, state: ClippingState, everyone: Examples) -> ClippingState:
        thresholds = everyone.norms.nan_to_num(nan=state.bound, posinf=state.bound).clamp(max=state.bound)
        return replace(state, thresholds=thresholds)

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        assert state.thresholds is not None, "the state of individual clipping comes from its own start()"
        return clipped_at_own(state.bound, state.thresholds)
