"""The protocol of clipping methods: pure functions with explicit state, and the sensitivity of each step's rule.

A method sees a whole batch only in `ClippingMethod.answer`, and the trainer adds noise to that answer. `decide` and
`advance` get the *noisy* answer, so everything they compute from it is public by post-processing. A `ClipRule` then
computes the weight of each example from this example alone.

Guarantee of every rule, for add/remove and zero-out adjacency alike: given the noisy answers so far, adding one
example to the batch changes the weighted sum of gradients by at most ``sensitivity`` in L2 norm, because

    per-example norm        weight                         norm of the weighted gradient
    0                       finite                         0
    finite                  chosen by the method           at most ``sensitivity``
    inf, NaN                0                              0 (the engine drops and counts such gradients)

up to a relative error of `NORM_ERROR`, by which the trainer increases the noise. Under replace-one adjacency the sum
changes by at most 2 ``sensitivity``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Final

import torch
from torch import Tensor

from dpsweep.accounting.errors import InvalidInput, keep_whole, require_finite
from dpsweep.accounting.mechanism.filters import StepPrices
from dpsweep.accounting.mechanism.trace import GaussianRelease, SideQuery
from dpsweep.accounting.registry import nearest

SMALLEST_BOUND, LARGEST_BOUND = 1e-8, 1e8
"""Accepted clipping bounds: float32 norms are accurate in this range (`dpsweep.workers.gradients`: from 1e-12 on)."""


@dataclass(frozen=True)
class PrivateMedian:
    """Clipping bound ``median_multiple`` times the median norm at initialisation (paper A, Sec. 4), released privately.

    The median is found by bisection on a logarithmic scale in ``rounds`` rounds. Each round releases
    sum (1[norm <= c] - 1/2) with Gaussian noise; one example changes this sum by at most 1/2, under add/remove and
    zero-out adjacency.

    Guarantee: under these adjacencies all rounds together are one Gaussian release with ``noise_multiplier`` (noise std
    over sensitivity). The precisions of adaptively composed Gaussians add up (Dong et al., Cor. 3.3), so each round has
    noise std noise_multiplier * sqrt(rounds) / 2. Norms that are not finite count as above every c.

    `smallest`, `largest`: ends of the interval that is searched.

    >>> norms, without_noise = torch.tensor([1.0, 2.0, 3.0]), lambda std: 0.0
    >>> round(PrivateMedian(median_multiple=1.0, rounds=40).find(norms, without_noise), 6)
    2.0
    """

    median_multiple: float
    noise_multiplier: float = 20.0
    smallest: float = 1e-4
    largest: float = 1e4
    rounds: int = 12

    def __post_init__(self) -> None:
        require_finite("median_multiple of a clipping bound", self.median_multiple, above=0.0)
        require_finite("noise_multiplier of a private median", self.noise_multiplier, above=0.0)
        require_finite("smallest bound", self.smallest, at_least=SMALLEST_BOUND)
        require_finite("largest bound", self.largest, above=self.smallest, at_most=LARGEST_BOUND)
        keep_whole(self, "rounds", "rounds of a private median", at_least=1)

    @property
    def release(self) -> GaussianRelease:
        """All rounds together as the one release that the accountant counts."""
        return GaussianRelease("median norm at initialisation", self.noise_multiplier)

    @property
    def round_noise_std(self) -> float:
        """Noise std of one round."""
        return 0.5 * self.noise_multiplier * math.sqrt(self.rounds)

    def find(self, norms: Tensor, draw: Callable[[float], float]) -> float:
        """Return the released bound from norms [n]; ``draw(std)`` returns one draw from N(0, std^2)."""
        low, high = math.log(self.smallest), math.log(self.largest)
        for _ in range(int(self.rounds)):
            middle = 0.5 * (low + high)
            below = (norms <= math.exp(middle)).double()
            surplus = float((below - 0.5).sum()) + draw(self.round_noise_std)
            low, high = (low, middle) if surplus > 0.0 else (middle, high)
        return min(max(self.median_multiple * math.exp(0.5 * (low + high)), SMALLEST_BOUND), LARGEST_BOUND)


NormBound = float | PrivateMedian | Mapping[str, Any]


def initial_bound(bound: NormBound) -> float | PrivateMedian:
    """Return the checked bound that the user gave, as a number or as the fields of a `PrivateMedian`.

    Raises: InvalidInput for unknown keys and numbers out of range.
    """
    if isinstance(bound, PrivateMedian):
        return bound
    if not isinstance(bound, Mapping):
        return require_finite("clipping bound", bound, at_least=SMALLEST_BOUND, at_most=LARGEST_BOUND)
    valid = PrivateMedian.__dataclass_fields__
    for key in bound:
        if key not in valid:
            raise InvalidInput(f"unknown key {key!r} of a clipping bound; {nearest(key, valid)}")
    if "median_multiple" not in bound:
        raise InvalidInput("a clipping bound is a number, or needs median_multiple (and may take noise_multiplier)")
    return PrivateMedian(**bound)


def released_bound(bound: NormBound, norms: Callable[[], Tensor], draw: Callable[[float], float]) -> float:
    """Return the initial bound as a number; a private median is released here.

    `norms`: returns gradient norms [n] on any device; called only for a median, and used only through noisy answers.
    `draw`: ``draw(std)`` returns one draw from N(0, std^2).
    """
    checked = initial_bound(bound)
    if isinstance(checked, PrivateMedian):
        return checked.find(torch.as_tensor(norms()), draw)
    return checked


NORM_ERROR = 1e-5
"""Bound on the relative error of gradient norms that `dpsweep.workers.gradients` guarantees."""


@dataclass(frozen=True)
class Examples:
    """The properties of some training examples that a clipping method may use.

    `norms`: [B], gradient norms before clipping.
    `layer_norms`: [B, L], norms per layer, for layer-wise methods.
    `groups`: [B] int64.
    `rows`: [B] int64, positions in the training set.
    """

    norms: Tensor
    groups: Tensor
    rows: Tensor
    layer_norms: Tensor | None = None

    def scaled(self, factor: float) -> Examples:
        """Return the same examples with all norms multiplied by ``factor``."""
        layer_norms = None if self.layer_norms is None else factor * self.layer_norms
        return replace(self, norms=factor * self.norms, layer_norms=layer_norms)


@dataclass(frozen=True)
class PublicFacts:
    """Public facts about a run. None of them may be computed from the training data."""

    group_names: tuple[str, ...]
    layer_names: tuple[str, ...]
    dataset_size: int
    batch_size: int
    """The configured, expected batch size, not the size of an actual batch."""

    @property
    def num_groups(self) -> int:
        return len(self.group_names)


@dataclass(frozen=True)
class ClippingState:
    """State of a clipping method between steps.

    Public, because configured or computed from noisy answers: bound (C), ratio (Z / C of global clipping), counts
    (moving average of noisy answers). Private, one value per example: thresholds [n] (individual clipping and filters
    only); granted [n] float32, bounds of this step, and spent [n] float64, cost of all steps so far (filters only).
    """

    bound: float
    ratio: float = 1.0
    counts: Tensor | None = None
    thresholds: Tensor | None = None
    granted: Tensor | None = None
    spent: Tensor | None = None


@dataclass(frozen=True)
class ExampleBudget:
    """Privacy budget of every example under a filter.

    `epsilon`: at the trial's delta; None if the sweep's target epsilon sets it. `noise_factor`: calibrated noise
    multiplier of the sweep, divided by the noise multiplier that meets the target without a filter.
    """

    epsilon: float | None
    noise_factor: float


RISING: Final = (1.0 + NORM_ERROR,)
"""Factor of an example's norm at which its contribution is largest, if that never falls when the norm rises."""
ANY_SHAPE: Final = (1.0 - NORM_ERROR, 1.0, 1.0 + NORM_ERROR)
"""Factors among which the largest contribution is taken where it may fall, as at the threshold of global clipping."""


@dataclass(frozen=True)
class ClipRule:
    """The weights of examples in one step, and the L2 sensitivity to which the noise of the step is scaled.

    `bounds`: the public clipping bounds of the rule, by group or layer name. `shape`: where a contribution is
    evaluated, `ANY_SHAPE` unless the norm of a clipped gradient is known never to fall when that of the gradient rises
    (`RISING`).

    >>> rule = ClipRule(1.0, lambda examples: clip_factor(examples.norms, 1.0))
    >>> rows = torch.arange(3)
    >>> rule.weights(Examples(torch.tensor([0.5, 2.0, float("nan")]), groups=rows, rows=rows))
    tensor([1.0000, 0.5000, 0.0000])
    """

    sensitivity: float
    weigh: Callable[[Examples], Tensor]
    bounds: Mapping[str, float] = field(default_factory=dict)
    shape: tuple[float, ...] = ANY_SHAPE

    def weights(self, examples: Examples) -> Tensor:
        """Return the factor of each gradient, [B] or layer by layer [B, L]; 0 where the norm is not finite."""
        weights = self.weigh(examples)
        finite = examples.norms < math.inf  # false for NaN; one operation, while torch.isfinite takes four
        return torch.where(finite if weights.ndim == 1 else finite[:, None], weights, 0.0)

    def contributions(self, examples: Examples) -> Tensor:
        """Return [B] float64 in [0, 1]: upper bound on c / S, the norm of each weighted gradient over the sensitivity.

        Norms of two passes over the same example may differ by a factor of 1 +- `NORM_ERROR`. At a discontinuity of the
        rule the summed pass may then clip quite differently from the measured one, so the largest result over norms in
        this range (the rule's ``shape``) is taken and rounded up by `NORM_ERROR`. An example whose norm is not finite
        counts as 1: it adds nothing at this step, but the contribution also covers later steps until the next snapshot.
        """
        if self.sensitivity == float("inf"):
            return torch.ones_like(examples.norms, dtype=torch.float64)
        largest = reduce(torch.maximum, (self._added(examples.scaled(factor)) for factor in self.shape))
        contributions = (largest * ((1.0 + NORM_ERROR) / self.sensitivity)).clamp_(0.0, 1.0)
        finite = (examples.norms < math.inf) & (largest < math.inf)  # false for NaN
        return torch.where(finite, contributions, 1.0)

    def removed(self, examples: Examples) -> Tensor:
        """Return [B] float64: norm of clipped minus unclipped gradient of each example; all must be finite."""
        return _norms_times(1.0 - self.weights(examples).double(), examples).abs_()

    def _added(self, examples: Examples) -> Tensor:
        """Return [B] float64: norm of each weighted gradient; NaN (0 times infinity) if the norm is infinite."""
        return _norms_times(self.weights(examples).double(), examples)


def _norms_times(factors: Tensor, examples: Examples) -> Tensor:
    """Return [B] float64: norms of gradients times ``factors``, [B] or layer by layer [B, L]; signed for [B]."""
    if factors.ndim == 1:
        return factors * examples.norms.double()
    norms: Tensor = (factors * require_layer_norms(examples).double()).norm(dim=1)
    return norms


@dataclass(frozen=True)
class BatchQuery:
    """A query on each batch, answered with Gaussian noise of std noise_multiplier * sensitivity (L2, one example)."""

    name: str
    sensitivity: float
    noise_multiplier: float

    @property
    def noise_std(self) -> float:
        return self.noise_multiplier * self.sensitivity


@dataclass(frozen=True)
class ClippingMethod(ABC):
    """A method that bounds the contribution of each example to the sum of gradients.

    bound: the initial clipping bound C, a number or the fields of a `PrivateMedian`.
    """

    bound: NormBound = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", initial_bound(self.bound))

    @property
    def layerwise(self) -> bool:
        """Return whether weights are per example and layer, which requires norms per layer."""
        return False

    @property
    def keeps_to_contributions(self) -> bool:
        """Return whether contributions recorded at a refresh bound the true ones until the next one."""
        return False

    @property
    def refreshes(self) -> bool:
        """Return whether `refresh` uses the norms of all training examples, which must then be refreshed regularly."""
        return type(self).refresh is not ClippingMethod.refresh

    @property
    def example_budget(self) -> ExampleBudget | None:
        """The budget of every example if the method is a filter, else None."""
        return None

    @property
    def query(self) -> BatchQuery | None:
        """The query that the method makes on each batch, or None; must not depend on data."""
        return None

    @property
    def side_queries(self) -> tuple[SideQuery, ...]:
        """The query on every batch as the accountant counts it; known without data."""
        return () if self.query is None else (SideQuery(self.query.name, self.query.noise_multiplier),)

    @property
    def releases(self) -> tuple[GaussianRelease, ...]:
        """Releases made once, before training: a private median bound, if any; known without data."""
        return (self.bound.release,) if isinstance(self.bound, PrivateMedian) else ()

    def start(self, bound: float, facts: PublicFacts) -> ClippingState:
        """Return the state before the first step. bound: a number; for a private median, its released value."""
        return ClippingState(bound)

    def refresh(self, state: ClippingState, everyone: Examples) -> ClippingState:
        """Return the state after norms of all training examples were computed; unchanged by default."""
        return state

    def pay(self, state: ClippingState, prices: StepPrices) -> ClippingState:
        """For a filter: fix the clipping bound of each example at this step, and charge its budget; else unchanged."""
        return state

    def used_up(self, state: ClippingState, prices: StepPrices) -> Tensor:
        """Return [n] bool: which examples have spent their budget and contribute no more; empty without a filter."""
        return torch.zeros(0, dtype=torch.bool)

    def answer(self, state: ClippingState, batch: Examples, facts: PublicFacts) -> Tensor:
        """Return the exact answer to `query` on this batch; the trainer adds noise before `decide` gets it."""
        return torch.zeros(0, dtype=torch.float64)

    @abstractmethod
    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        """Return the rule of this step, from public values and at most each example's own threshold."""

    def advance(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClippingState:
        """Return the state of the next step."""
        return state


def clip_factor(norms: Tensor, bound: float | Tensor) -> Tensor:
    """Return min(1, bound / norm) elementwise, the factor of flat clipping: 1 for norm 0, 0 for an infinite norm."""
    return torch.clamp(bound / norms, max=1.0)


def adapted(value: float, exponent: float, smallest: float) -> float:
    """Return value * exp(exponent), clamped to [smallest, LARGEST_BOUND]."""
    return min(max(value * math.exp(min(exponent, 100.0)), smallest), LARGEST_BOUND)


def require_layer_norms(examples: Examples) -> Tensor:
    """Return norms per layer, [B, L]. Raises: InvalidInput when the examples have none."""
    if examples.layer_norms is None:
        raise InvalidInput("per-layer clipping needs norms by layer; build the gradient engine with layerwise=True")
    return examples.layer_norms
