"""Clipping methods whose weights follow from the norm of each gradient alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpsweep.accounting.errors import require_finite
from dpsweep.workers.clipping.clipping_method import (
    ANY_SHAPE,
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
    require_layer_norms,
)


@dataclass(frozen=True)
class NoClipping(ClippingMethod):
    """Weight 1 for every gradient. The sensitivity is infinite, so a trial with noise is refused."""

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        return ClipRule(float("inf"), lambda examples: torch.ones_like(examples.norms))


@dataclass(frozen=True)
class FlatClipping(ClippingMethod):
    """Each gradient g becomes g * min(1, C / ||g||): the DP-SGD of Abadi et al. (2016). Sensitivity C."""

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        bound = state.bound
        return ClipRule(bound, lambda examples: clip_factor(examples.norms, bound), {"all": bound}, RISING)


@dataclass(frozen=True)
class PerLayerClipping(ClippingMethod):
    """The gradient of each of L layers is clipped at C / sqrt(L) (McMahan et al., 2018).

    Sensitivity C: the L squared bounds add up to C^2.
    """

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


_SMALLEST_NORM = 1e-12
"""Smallest accurate norm; below it, underflow in the float32 squares of up to 1e9 entries may err by more than 1e-5."""


@dataclass(frozen=True)
class AutomaticClipping(ClippingMethod):
    """Each gradient g becomes C g / (||g|| + stability): AUTO-S; with stability 0, AUTO-V. Sensitivity C.

    Bu et al., 2023. A gradient with norm below 1e-12 gets weight 0: its norm is inaccurate, because squared entries
    underflow in float32, so AUTO-V would scale it to an unknown length.
    """

    stability: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite("stability of automatic clipping", self.stability, at_least=0.0)

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        bound, stability = state.bound, self.stability

        def weigh(examples: Examples) -> Tensor:
            factor = bound / (examples.norms + stability)
            return torch.where(examples.norms >= _SMALLEST_NORM, factor, torch.zeros_like(factor))

        return ClipRule(bound, weigh, {"all": bound}, RISING)


@dataclass(frozen=True)
class QuantileClipping(ClippingMethod):
    """Flat clipping whose bound moves towards the ``quantile`` (gamma) of the norms. Sensitivity C_t.

    Side query per batch: sum (1[norm <= C_t] - 1/2), which one example changes by 1/2. The noisy sum over the expected
    batch size, plus 1/2 and clamped to [0, 1], estimates the fraction b of norms within the bound. Then
    C_{t+1} = C_t exp(-learning_rate (b - quantile)) (Andrew et al., 2021, Algorithm 1).
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
