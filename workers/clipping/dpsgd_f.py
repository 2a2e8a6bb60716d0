"""DPSGD-F: groups whose gradients are clipped more get a larger bound (Xu et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpsweep.accounting.errors import require_finite
from dpsweep.workers.clipping.clipping_method import RISING, ClippingState, ClipRule, Examples, PublicFacts, clip_factor
from dpsweep.workers.clipping.group_counts import GroupCountClipping, counts_of


@dataclass(frozen=True)
class DPSGDFClipping(GroupCountClipping):
    """Gradients of group k are clipped at C_k = C0 (1 + (m_k / b_k) / (m / b)). Sensitivity max_k C_k.

    Side query per batch: for each group, the number m_k of norms above C0 and the number o_k of other norms. One
    example changes one of the 2K counts by 1; ``count_noise_multiplier`` is the paper's sigma1. b_k = m_k + o_k; m and
    b are the sums over groups.

    The maximum is over all K groups, which are public configuration, and uses noisy counts only. A maximum over the
    groups present in the batch would make the noise scale depend on private data. As post-processing, noisy counts are
    clamped (m_k and o_k to at least 0, b_k to at least 1) and the ratio is capped at ``max_ratio``. If no norm is above
    C0, every C_k is C0. The published method has no ``count_memory``.
    """

    max_ratio: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite("max_ratio", self.max_ratio, above=0.0)

    def answer(self, state: ClippingState, batch: Examples, facts: PublicFacts) -> Tensor:
        """Return [2K]: numbers of norms above C0 by group, then of other norms by group; NaN counts as other."""
        cells = batch.groups + torch.where(batch.norms > state.bound, 0, facts.num_groups)
        return counts_of(cells, 2 * facts.num_groups)

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        above, within = self.averaged(state, noisy_answer).reshape(2, -1).clamp(min=0.0)
        members = (above + within).clamp(min=1.0)
        overall = above.sum() / members.sum()
        ratio = torch.where(overall > 0.0, above / members / overall, 0.0).clamp(max=self.max_ratio)
        bounds = state.bound * (1.0 + ratio)
        return ClipRule(
            float(bounds.max()),
            lambda examples: clip_factor(examples.norms, bounds.to(examples.norms).index_select(0, examples.groups)),
            dict(zip(facts.group_names, bounds.tolist(), strict=True)),
            RISING,
        )
