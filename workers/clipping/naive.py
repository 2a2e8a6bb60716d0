"""Naive reweighting: small groups weigh more, whatever their gradients (the baseline of Xu et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from accounting.errors import require_finite
from workers.clipping.protocol import (
    BatchQuery,
    ClippingMethod,
    ClippingState,
    ClipRule,
    Examples,
    Setting,
    averaged_counts,
    clip_factor,
)


@dataclass(frozen=True)
class NaiveReweighting(ClippingMethod):
    """theta_k clip(g, C0) with theta_k = (b / K) / b_k. Sensitivity C0 max_k theta_k over all K groups.

    Side query per batch: the members b_k of each group; one example moves one count by 1 (sensitivity 1). Noisy
    counts are clamped at 1, averaged over steps with ``count_memory``, and theta is capped at ``max_weight``: all
    post-processing.
    """

    count_noise_multiplier: float = 10.0
    max_weight: float = 10.0
    count_memory: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite("count_noise_multiplier", self.count_noise_multiplier, above=0.0)
        require_finite("max_weight", self.max_weight, above=0.0)
        require_finite("count_memory", self.count_memory, at_least=0.0, below=1.0)

    @property
    def query(self) -> BatchQuery:
        return BatchQuery("group counts", 1.0, self.count_noise_multiplier)

    def answer(self, state: ClippingState, batch: Examples, setting: Setting) -> Tensor:
        return torch.bincount(batch.groups, minlength=setting.num_groups).double()

    def decide(self, state: ClippingState, noisy_answer: Tensor, setting: Setting) -> ClipRule:
        bound = state.bound
        members = averaged_counts(state, noisy_answer, self.count_memory).clamp(min=1.0)
        theta = (members.sum() / setting.num_groups / members).clamp(max=self.max_weight)
        return ClipRule(
            bound * float(theta.max()),
            lambda examples: theta.to(examples.norms)[examples.groups] * clip_factor(examples.norms, bound),
            dict(zip(setting.group_names, (bound * theta).tolist(), strict=True)),
        )

    def advance(self, state: ClippingState, noisy_answer: Tensor, setting: Setting) -> ClippingState:
        return replace(state, counts=averaged_counts(state, noisy_answer, self.count_memory))
