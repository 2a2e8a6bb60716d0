"""What a clipping method is: pure functions with explicit state, and a bound on what one example adds.

A method sees a whole batch in one place only, `ClippingMethod.answer`, and the trainer perturbs that answer before
anything else sees it. `decide` and `advance` get the *noisy* answer, so what they compute from it is public by
post-processing. A `ClipRule` then treats each example by itself.

Guarantee of every rule, for add/remove and zero-out adjacency alike: given the noisy answers so far, adding one
example to the batch moves the weighted sum of gradients by at most ``sensitivity`` in L2 norm, because

    per-example norm        weight                         norm of what the example adds
    0                       finite                         0
    finite                  as the method says             at most ``sensitivity``
    inf, NaN                0                              0 (the engine drops and counts such gradients)

up to `NORM_ERROR`, by which the trainer raises the noise. Replacing one example moves the sum by at most twice as much.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor

from accounting.errors import InvalidInput
from accounting.mechanism import SideQuery
from workers.clipping.bounds import LARGEST_BOUND, Bound, initial_bound

NORM_ERROR = 1e-5
"""Relative error of gradient norms that `workers.gradients` states."""


@dataclass(frozen=True)
class Examples:
    """What a method may know of some training examples.

    norms [B]: gradient norms before clipping; layer_norms [B, L]: the same by layer, for layer-wise methods;
    groups [B] int64; rows [B] int64: positions in the training set.
    """

    norms: Tensor
    groups: Tensor
    rows: Tensor
    layer_norms: Tensor | None = None

    def scaled(self, factor: float) -> Examples:
        """The same examples with gradients ``factor`` times as long."""
        layer_norms = None if self.layer_norms is None else factor * self.layer_norms
        return replace(self, norms=factor * self.norms, layer_norms=layer_norms)


@dataclass(frozen=True)
class Setting:
    """What is public about a run: nothing here may be computed from the training data."""

    group_names: tuple[str, ...]
    layer_names: tuple[str, ...]
    dataset_size: int
    batch_size: int
    """The configured, expected batch size, never a realised one."""

    @property
    def num_groups(self) -> int:
        return len(self.group_names)


@dataclass(frozen=True)
class ClippingState:
    """State between steps: a bound known to everyone, and thresholds known only to the trainer.

    bound C, ratio Z / C (global clipping) and counts (the moving average of noisy answers) are public: configured,
    or computed from noisy answers. thresholds [n] belong to single examples and are private; only individual
    clipping has them.
    """

    bound: float
    ratio: float = 1.0
    counts: Tensor | None = None
    thresholds: Tensor | None = None


@dataclass(frozen=True)
class ClipRule:
    """How one step treats any example, and the L2 sensitivity that its noise is scaled to.

    bounds: what of the rule may be shown to everyone, by group or layer name.
    """

    sensitivity: float
    weigh: Callable[[Examples], Tensor]
    bounds: Mapping[str, float] = field(default_factory=dict)

    def weights(self, examples: Examples) -> Tensor:
        """[B] or, for layer-wise methods, [B, L]: the factor of each gradient; 0 where a norm is not finite."""
        weights = self.weigh(examples)
        finite = torch.isfinite(examples.norms)
        finite = finite if weights.ndim == 1 else finite[:, None]
        return torch.where(finite, weights, torch.zeros_like(weights))

    def contributions(self, examples: Examples) -> Tensor:
        """[B] float64 in [0, 1]: the norm of what each example would add over the sensitivity (c / S), or more.

        Norms of two passes over the same example may differ by `NORM_ERROR`, and next to a jump of the rule the pass
        that is summed may clip quite differently from the one that measures: the largest result of norms so close
        counts, rounded up by as much. An example whose norm is not finite counts as 1: it adds nothing at this step,
        but a contribution stands for all steps until the next snapshot, and too much is the safe side.
        """
        if self.sensitivity == float("inf"):
            return torch.ones_like(examples.norms, dtype=torch.float64)
        close = (examples.scaled(factor) for factor in (1.0 - NORM_ERROR, 1.0, 1.0 + NORM_ERROR))
        largest = reduce(torch.maximum, (self._added(near) for near in close))
        contributions = (largest * ((1.0 + NORM_ERROR) / self.sensitivity)).clamp(0.0, 1.0)
        finite = examples.norms.isfinite() & largest.isfinite()
        return torch.where(finite, contributions, torch.ones_like(contributions))

    def _added(self, examples: Examples) -> Tensor:
        """[B] float64: the norm of what each example adds; NaN (0 times infinity) where its norm is not finite."""
        weights = self.weights(examples).double()
        if weights.ndim == 1:
            return weights * examples.norms.double()
        added: Tensor = (weights * require_layer_norms(examples).double()).norm(dim=1)
        return added


@dataclass(frozen=True)
class BatchQuery:
    """A query that is answered on each batch with Gaussian noise: std = noise_multiplier * sensitivity."""

    name: str
    sensitivity: float
    noise_multiplier: float

    @property
    def noise_std(self) -> float:
        return self.noise_multiplier * self.sensitivity

    def as_side_query(self) -> SideQuery:
        return SideQuery(self.name, self.noise_multiplier)


@dataclass(frozen=True)
class ClippingMethod(ABC):
    """A way to bound what each example adds to the sum of gradients.

    bound C: a number, or the keys of `workers.clipping.bounds.PrivateMedian`.
    """

    bound: Bound = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", initial_bound(self.bound))

    @property
    def layerwise(self) -> bool:
        """Whether weights are by example and layer, which needs norms by layer."""
        return False

    @property
    def keeps_to_contributions(self) -> bool:
        """Whether contributions recorded at a refresh bound those of all later steps (individual clipping)."""
        return False

    @property
    def query(self) -> BatchQuery | None:
        """The query on each batch that this method needs, without data, for planners."""
        return None

    def start(self, bound: float, setting: Setting) -> ClippingState:
        """The state before the first step; ``bound`` is the number, released privately if it was a median."""
        return ClippingState(bound)

    def refresh(self, state: ClippingState, everyone: Examples) -> ClippingState:
        """Take note of the norms of all training examples, where the method uses them."""
        return state

    def answer(self, state: ClippingState, batch: Examples, setting: Setting) -> Tensor:
        """The exact answer to `query` on this batch; the trainer adds noise before it goes to `decide`."""
        return torch.zeros(0, dtype=torch.float64)

    @abstractmethod
    def decide(self, state: ClippingState, noisy_answer: Tensor, setting: Setting) -> ClipRule:
        """The rule of this step, from what is public (and, for individual clipping, each example's threshold)."""

    def advance(self, state: ClippingState, noisy_answer: Tensor, setting: Setting) -> ClippingState:
        """The state of the next step."""
        return state


def clip_factor(norms: Tensor, bound: float | Tensor) -> Tensor:
    """min(1, bound / norm) elementwise: the factor of flat clipping; 1 for norm 0, 0 for infinity."""
    return torch.clamp(bound / norms, max=1.0)


def adapted(value: float, exponent: float, smallest: float) -> float:
    """value * exp(exponent), from ``smallest`` to `LARGEST_BOUND`: adaptation neither vanishes nor overflows."""
    return min(max(value * math.exp(min(exponent, 100.0)), smallest), LARGEST_BOUND)


def require_layer_norms(examples: Examples) -> Tensor:
    if examples.layer_norms is None:
        raise InvalidInput("per-layer clipping needs norms by layer; build the gradient engine with layerwise=True")
    return examples.layer_norms
