"""Clipping methods with a bound for each example."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dpsweep.accounting.errors import require_finite
from dpsweep.accounting.mechanism.filters import StepPrices
from dpsweep.workers.clipping.clipping_method import (
    RISING,
    ClippingMethod,
    ClippingState,
    ClipRule,
    ExampleBudget,
    Examples,
    PublicFacts,
    clip_factor,
)


def _clipped_at_own(bound: float, own_bounds: Tensor) -> ClipRule:
    """Return the rule that clips each example at its own bound [n], none above ``bound``; 0 leaves nothing of it."""

    def weigh(examples: Examples) -> Tensor:
        own = own_bounds.to(examples.norms.device).index_select(0, examples.rows)
        return torch.where(own > 0.0, clip_factor(examples.norms, own), 0.0)

    return ClipRule(bound, weigh, {"all": bound}, RISING)


def _own_bounds(norms: Tensor, bound: float) -> Tensor:
    """Return min(norm, ``bound``) of each example; ``bound`` for norms that are not finite."""
    return norms.nan_to_num(nan=bound, posinf=bound).clamp(max=bound)


@dataclass(frozen=True)
class IndividualClipping(ClippingMethod):
    """g_i * min(1, Z_i / ||g_i||) with Z_i = min(norm of g_i at the last refresh, C). Sensitivity C.

    Algorithm 3 of paper A. Z_i depends only on example i and the released models. Conditioned on these, the recorded
    contribution Z_i / C bounds the true one at every step until the next refresh, so individual epsilons are
    output-specific for any refresh interval. They are not guarantees: thresholds depend on the iterates, and nothing
    limits their total cost below the worst case (`FilterClipping` does). A norm that is not finite at a refresh gives
    Z_i = C.
    """

    @property
    def keeps_to_contributions(self) -> bool:
        return True

    def start(self, bound: float, facts: PublicFacts) -> ClippingState:
        return ClippingState(bound, thresholds=torch.full((facts.dataset_size,), bound))

    def refresh(self, state: ClippingState, everyone: Examples) -> ClippingState:
        return replace(state, thresholds=_own_bounds(everyone.norms, state.bound))

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        assert state.thresholds is not None, "the state of individual clipping comes from its own start()"
        return _clipped_at_own(state.bound, state.thresholds)


@dataclass(frozen=True)
class FilterClipping(ClippingMethod):
    """g_i * min(1, Z_i / ||g_i||) with a bound Z_i <= C that is fixed and charged before each step. Sensitivity C.

    Z_i is the norm of g_i at the last refresh, at most C. If the remaining budget of example i does not cover a step
    with this bound, Z_i is the largest bound that it covers, and 0 in all later steps. Every example is charged at
    every step, because whether it is in the batch is secret. The order of the Renyi filter (Feldman and Zrnic, 2021)
    is fixed by the plan.

    Guarantee: the epsilon of every example is at most its budget, whatever the run does, under adding, removing or
    blanking it (docs/accounting.md, "Filters").

    epsilon: budget of each example at the trial's delta. A sweep with `privacy.target_epsilon` sets it to the target,
    and the noise multiplier to ``noise_factor`` times the one that meets the target without a filter.
    """

    epsilon: float | None = None
    noise_factor: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilon is not None:
            require_finite("epsilon of a filter", self.epsilon, above=0.0)
        require_finite("noise_factor", self.noise_factor, above=0.0)

    @property
    def example_budget(self) -> ExampleBudget:
        return ExampleBudget(self.epsilon, self.noise_factor)

    def start(self, bound: float, facts: PublicFacts) -> ClippingState:
        """Return the initial state: no example has been granted a bound or charged."""
        count = facts.dataset_size
        return ClippingState(
            bound,
            thresholds=torch.full((count,), bound),
            granted=torch.zeros(count),
            spent=torch.zeros(count, dtype=torch.float64),
        )

    def refresh(self, state: ClippingState, everyone: Examples) -> ClippingState:
        return replace(state, thresholds=_own_bounds(everyone.norms, state.bound).cpu())

    def pay(self, state: ClippingState, prices: StepPrices) -> ClippingState:
        assert state.thresholds is not None, "the state of a filter comes from its start()"
        assert state.spent is not None, "likewise"
        spent = state.spent.numpy()
        left = prices.budget - spent
        wanted = np.minimum(state.thresholds.double().numpy() / state.bound, 1.0)
        affords = prices.cost(wanted) <= left
        paid = np.where(affords, wanted, np.minimum(wanted, prices.affordable(left)))
        # rounded towards 0 to the float32 bound used for clipping, so that the charge covers the contribution
        granted = np.nextafter((paid * state.bound).astype(np.float32), np.float32(0.0))
        costs = prices.cost(granted.astype(np.float64) / state.bound)
        granted[costs > left] = 0.0
        total = np.where(affords, np.minimum(spent + costs, prices.budget), prices.budget)
        return replace(state, granted=torch.from_numpy(granted), spent=torch.from_numpy(total))

    def used_up(self, state: ClippingState, prices: StepPrices) -> Tensor:
        assert state.spent is not None, "the state of a filter comes from its start()"
        return state.spent >= prices.budget

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        assert state.granted is not None, "the state of a filter comes from its start()"
        return _clipped_at_own(state.bound, state.granted)
