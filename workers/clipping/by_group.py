"""Clipping methods that query the number of examples of each group in a batch."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpsweep.accounting.errors import require_finite
from dpsweep.workers.clipping.clipping_method import (
    RISING,
    BatchQuery,
    ClippingMethod,
    ClippingState,
    ClipRule,
    Examples,
    PublicFacts,
    clip_factor,
)


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
        """Return the moving average of the noisy counts, weight 1 - count_memory on the latest. Post-processing."""
        if state.counts is None:
            return noisy_answer
        return self.count_memory * state.counts + (1.0 - self.count_memory) * noisy_answer

    def advance(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClippingState:
        return replace(state, counts=self.averaged(state, noisy_answer))


@dataclass(frozen=True)
class DPSGDFClipping(GroupCountClipping):
    """Gradients of group k are clipped at C_k = C0 (1 + (m_k / b_k) / (m / b)) (Xu et al., 2021).

    Sensitivity max_k C_k.

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


@dataclass(frozen=True)
class NaiveReweighting(GroupCountClipping):
    """Each gradient g of group k becomes theta_k clip(g, C0), theta_k = (b / K) / b_k (baseline of Xu et al.).

    Sensitivity C0 max_k theta_k, over all K groups. Side query per batch: the number b_k of examples of each group; one
    example changes one count by 1. b is the sum of the b_k. As post-processing, noisy counts are clamped to at least 1,
    and theta_k is capped at ``max_weight``.
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
