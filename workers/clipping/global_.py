"""Global clipping: all gradients with norm at most Z are scaled by the same factor, which keeps their ratios."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpsweep.accounting.errors import require_finite
from dpsweep.workers.clipping.clipping_method import (
    ANY_SHAPE,
    RISING,
    BatchQuery,
    ClippingMethod,
    ClippingState,
    ClipRule,
    Examples,
    PublicFacts,
    adapted,
    clip_factor,
)

_SMALLEST_RATIO = 1e-4
"""Smallest ratio of threshold to bound at which float32 norms are accurate."""


@dataclass(frozen=True)
class GlobalClipping(ClippingMethod):
    """(C / Z) g if ||g|| <= Z, else 0, with Z = threshold_ratio * C (Bu et al., 2021). Sensitivity C."""

    threshold_ratio: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite("threshold_ratio", self.threshold_ratio, at_least=_SMALLEST_RATIO)

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        threshold = self.threshold_ratio * state.bound
        scale = 1.0 / self.threshold_ratio
        return ClipRule(
            state.bound,
            lambda examples: scale * (examples.norms <= threshold).to(examples.norms),
            {"all": state.bound, "threshold": threshold},
        )


@dataclass(frozen=True)
class GlobalAdaptiveClipping(ClippingMethod):
    """(C / Z) g if ||g|| <= Z, else clipped at C; Z adapts (DPSGD-Global-Adapt, Esipova et al., 2023). Sensitivity C.

    Side query per batch: the number of norms above tolerance * Z, which one example changes by at most 1. Let b be the
    noisy count over the expected batch size, clamped to [0, 1]; then Z_{t+1} = Z_t exp(b - learning_rate). Z converges
    to the value for which a fraction ``learning_rate`` of the norms is above tolerance * Z. It starts at
    threshold_ratio * C; the state holds Z / C.
    """

    threshold_ratio: float = 10.0
    learning_rate: float = 0.1
    tolerance: float = 1.0
    count_noise_multiplier: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite("threshold_ratio", self.threshold_ratio, at_least=_SMALLEST_RATIO)
        require_finite("learning_rate", self.learning_rate, above=0.0)
        require_finite("tolerance", self.tolerance, above=0.0)
        require_finite("count_noise_multiplier", self.count_noise_multiplier, above=0.0)

    @property
    def query(self) -> BatchQuery:
        return BatchQuery("norms above the threshold", 1.0, self.count_noise_multiplier)

    def start(self, bound: float, facts: PublicFacts) -> ClippingState:
        return ClippingState(bound, ratio=self.threshold_ratio)

    def answer(self, state: ClippingState, batch: Examples, facts: PublicFacts) -> Tensor:
        return (batch.norms > self.tolerance * state.ratio * state.bound).double().sum().reshape(1)

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        bound, threshold = state.bound, state.ratio * state.bound

        def weigh(examples: Examples) -> Tensor:
            return torch.where(examples.norms <= threshold, bound / threshold, clip_factor(examples.norms, bound))

        shape = RISING if threshold >= bound else ANY_SHAPE  # else it falls from C to Z above Z
        return ClipRule(bound, weigh, {"all": bound, "threshold": threshold}, shape)

    def advance(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClippingState:
        fraction = min(max(float(noisy_answer[0]) / facts.batch_size, 0.0), 1.0)
        return replace(state, ratio=adapted(state.ratio, fraction - self.learning_rate, _SMALLEST_RATIO))
