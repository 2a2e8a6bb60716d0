"""Quantile clipping: the bound follows a quantile of the norms (Andrew et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from dpsweep.accounting.errors import require_finite
from dpsweep.workers.clipping.clipping_method import (
    RISING,
    SMALLEST_BOUND,
    BatchQuery,
    ClippingMethod,
    ClippingState,
    ClipRule,
    Examples,
    PublicFacts,
    adapted,
    clip_factor,
)


@dataclass(frozen=True)
class QuantileClipping(ClippingMethod):
    """Flat clipping whose bound moves towards the ``quantile`` (gamma) of the norms. Sensitivity C_t.

    Side query per batch: sum (1[norm <= C_t] - 1/2), which one example changes by 1/2. The noisy sum over the expected
    batch size, plus 1/2 and clamped to [0, 1], estimates the fraction b of norms within the bound. Then
    C_{t+1} = C_t exp(-learning_rate (b - quantile)) (Andrew et al., Algorithm 1).
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise_multiplier: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite("quantile", self.quantile, at_least=0.0, at_most=1.0)
        require_finite("learning_rate", self.learning_rate, above=0.0)
        require_finite("count_noise_multiplier", self.count_noise_multiplier, above=0.0)

    @property
    def query(self) -> BatchQuery:
        return BatchQuery("norms within the bound", 0.5, self.count_noise_multiplier)

    def answer(self, state: ClippingState, batch: Examples, facts: PublicFacts) -> Tensor:
        return ((batch.norms <= state.bound).double() - 0.5).sum().reshape(1)

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        bound = state.bound
        return ClipRule(bound, lambda examples: clip_factor(examples.norms, bound), {"all": bound}, RISING)

    def advance(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClippingState:
        fraction = min(max(float(noisy_answer[0]) / facts.batch_size + 0.5, 0.0), 1.0)
        exponent = -self.learning_rate * (fraction - self.quantile)
        return replace(state, bound=adapted(state.bound, exponent, SMALLEST_BOUND))
