"""Naive reweighting: small groups get larger weights, independent of their gradients (baseline of Xu et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpsweep.accounting.errors import require_finite
from dpsweep.workers.clipping.clipping_method import RISING, ClippingState, ClipRule, Examples, PublicFacts, clip_factor
from dpsweep.workers.clipping.group_counts import GroupCountClipping, counts_of


@dataclass(frozen=True)
class NaiveReweighting(GroupCountClipping):
    """Each gradient g of group k becomes theta_k clip(g, C0), theta_k = (b / K) / b_k. Sensitivity C0 max_k theta_k.

    The maximum is over all K groups. Side query per batch: the number b_k of examples of each group; one example
    changes one count by 1. b is the sum of the b_k. As post-processing, noisy counts are clamped to at least 1 and
    theta_k is capped at ``max_weight``.
    """

    max_weight: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite("max_weight", self.max_weight, above=0.0)

    def answer(self, state: ClippingState, batch: Examples, facts: PublicFacts) -> Tensor:
        return counts_of(batch.groups, facts.num_groups)

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        bound = state.bound
        members = self.averaged(state, noisy_answer).clamp(min=1.0)
        theta = (members.sum() / facts.num_groups / members).clamp(max=self.max_weight)
        return ClipRule(
            bound * float(theta.max()),
            lambda each: theta.to(each.norms).index_select(0, each.groups) * clip_factor(each.norms, bound),
            dict(zip(facts.group_names, (bound * theta).tolist(), strict=True)),
            RISING,
        )
