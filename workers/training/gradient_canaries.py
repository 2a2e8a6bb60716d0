"""Gradient canaries: made-up contributions along their own directions, which batches take in like examples.

The canaries are no examples. Each has a direction, and all directions are orthogonal. A secret fair coin for each
decides whether it takes part. One that does joins batches by the sampling of the trial, drawn independently. In each of
them it adds its direction times the longest gradient that the clipping rule of the step lets through. A canary that
stands for a user with several rows adds it once for each row that joins. Where an example that joins displaces another,
as in fixed batches, or is replaced by another, a canary stands for both, whose contributions may be opposite: it adds
twice that. So each coin is the pair of distributions that the claim is computed from, and the claim covers it. Under a
filter a canary has gradients so long that its budget pays for all steps: one that is used up early is lost in the noise
of the last model.

The guarantee of every real example is unchanged: what is added to the sum does not depend on the data, and its noise
stays as it was. The canaries do change the model. With the transcript ``last_model`` they have separate parameters
(`OwnParameters`) instead, in directions that the model then lacks. Right guesses from the transcript ``iterates`` read
the noise of the run, and no epsilon covers that: only the owner of the data may see them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Final

import numpy as np
import scipy.fft
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsweep.accounting.audits import StatedRun
from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.filters import StepPrices
from dpsweep.accounting.mechanism.samplings import RANDOM_ALLOCATION
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.numerics.roots import beginning
from dpsweep.workers.clipping import ClippingMethod, ClippingState, ClipRule, Examples, PublicFacts
from dpsweep.workers.noise.gaussian_sources import derive_seed
from dpsweep.workers.sampling.samplers import make_row_draws
from dpsweep.workers.spec import AuditSpec, TrialSpec
from dpsweep.workers.training.batch_gradients import NO_ANSWER
from dpsweep.workers.training.canary_evidence import CanaryBatches, CanaryEvidence, OwnParameters, make_evidence

Array = NDArray[np.float64]

_STRETCHES: Final = (1.0 - 1e-6, 1.0, 1e3)
"""Norms of a canary before clipping, over each bound of the rule, among which the one that adds most is taken."""

_HALVINGS: Final = 30
_REFERENCES: Final = 4
"""Maximum number of references for each canary; the model may have fewer free parameters."""
_WITNESSES: Final = 64
"""Directions from which the noise of a step is measured, if the model has as many besides."""


class Directions:
    """Orthonormal directions in the space of all parameters: rows of a cosine transform with random signs.

    Projections on all of them take one fast transform.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], count: int, seed: int) -> None:
        """Raises: InvalidInput for more directions than parameters."""
        self._shapes = dict(shapes)
        self._sizes = [math.prod(shape) for shape in shapes.values()]
        size = sum(self._sizes)
        require_directions(count, size)
        generator = np.random.default_rng(derive_seed(seed, "directions of canaries"))
        self._signs = generator.choice(np.array([-1.0, 1.0]), size)
        self._places = generator.choice(size, count, replace=False)

    @property
    def count(self) -> int:
        """Number of directions."""
        return len(self._places)

    def along(self, values: Mapping[str, Tensor]) -> Array:
        """Return the projections [m] of ``values``, by parameter, on all directions."""
        joined = torch.cat([values[name].detach().flatten().double().cpu() for name in self._shapes])
        found: Array = scipy.fft.dct(self._signs * joined.numpy(), norm="ortho")[self._places]
        return found

    def combined(self, weights: Array, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sum of ``weights`` [m] times the directions, by parameter, with types and devices of ``like``."""
        coefficients = np.zeros(len(self._signs))
        coefficients[self._places] = weights
        joined = torch.from_numpy(self._signs * scipy.fft.idct(coefficients, norm="ortho"))
        parts = joined.split(self._sizes)
        return {
            name: part.view(like[name].shape).to(like[name]) for name, part in zip(self._shapes, parts, strict=True)
        }


class GradientCanaries:
    """The gradient canaries of a trial, their coins and what the iterates have shown of these so far. Private.

    Directions that no canary has serve besides: references, which are treated as canaries that do not take part, and
    witnesses, from which the adversary measures the noise of each step.
    """

    def __init__(
        self,
        spec: TrialSpec,
        audit: AuditSpec,
        parameters: Mapping[str, Tensor],
        method: ClippingMethod,
        facts: PublicFacts,
        trace: Trace,
    ) -> None:
        """`trace`: planned.

        Raises: InvalidInput for more canaries than parameters.
        """
        self.audit, self._method, self._facts = audit, method, replace(facts, dataset_size=1)
        size_of_model = sum(parameter.numel() for parameter in parameters.values())
        references, witnesses = other_directions(audit, size_of_model)
        count = audit.canaries + references
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.directions = Directions(shapes, max(count + witnesses, audit.canaries), spec.seed)
        self._count = count
        coins = make_row_draws(spec.known_seed, "coins of canaries")
        self.included: NDArray[np.bool_] = np.isin(np.arange(count), coins.each(2 * audit.canaries, audit.canaries))
        self.included[audit.canaries :] = False
        draws = make_row_draws(spec.known_seed, "batches of canaries")
        self._batches = CanaryBatches(spec, count, facts.dataset_size, draws)
        self._clipping: ClippingState | None = None
        self._drawn = np.zeros(count)
        self._length, self._times, self._share = 0.0, times_of(trace), canary_share(trace)
        self._known: CanaryEvidence | OwnParameters = (
            OwnParameters(spec, count) if audit.own_parameters else make_evidence(self._batches, trace.strategy)
        )
        """Scores: likelihood ratios by the iterates, or how far own parameters moved in directions the model lacks."""
        self.steps = self.full_steps = 0
        """Steps so far to which canaries could contribute at all, and in full."""

    @property
    def scores(self) -> Array:
        """Scores [count] of canaries and references so far: higher if one is likely to take part."""
        return self._known.total

    def begin(self, bound: float) -> None:
        """Start the state of a canary under a clipping method that remembers examples. `bound`: the first one."""
        if self._method.refreshes or self._method.example_budget is not None:
            self._clipping = self._method.start(bound, self._facts)
        if self._clipping is not None and self._share < 1.0:
            nobody = torch.zeros(1, dtype=torch.int64)
            self._clipping = self._method.refresh(
                self._clipping, Examples(torch.tensor([self._share * bound]), nobody, nobody)
            )

    def pay(self, prices: StepPrices) -> None:
        """Charge the budget of a canary, which a filter limits as it does an example."""
        if self._clipping is not None:
            self._clipping = self._method.pay(self._clipping, prices)

    def with_canaries(self, gradients: Mapping[str, Tensor], rule: ClipRule, groups: int) -> Mapping[str, Tensor]:
        """Return the clipped sum of the real examples, plus what the canaries in the next batch add."""
        if self._clipping is not None:
            rule = self._method.decide(self._clipping, NO_ANSWER, self._facts)
        self._drawn = self._batches.next()
        length = longest(rule, groups)
        self._length = self._times * length
        self.steps += length > 0.0
        self.full_steps += length > 0.99 * self._share * rule.sensitivity
        weights = np.zeros(self.directions.count)
        weights[: self._count] = self._drawn * self._length * self.included
        if isinstance(self._known, OwnParameters):
            weights -= self.directions.along(gradients)
        added = self.directions.combined(weights, gradients)
        return {name: value + added[name] for name, value in gradients.items()}

    def see(self, gradients: Mapping[str, Tensor], noisy: Mapping[str, Tensor], std: float) -> None:
        """Take in the noisy sum of a step, for an adversary who knows all real examples and their batches.

        `gradients`: the clipped sum of the real examples. `std`: of the noise, as the trial states it.
        """
        if not isinstance(self._known, OwnParameters):
            seen = self.directions.along({name: noisy[name] - gradients[name] for name in gradients})
            self._known.see(seen, self._drawn, self._length, std)

    def left_of(self, mean: Mapping[str, Tensor], factor: float, noise_std: float) -> Mapping[str, Tensor]:
        """Return the part of a noisy mean that trains the model. Others as in `Optimizer.step`."""
        if not isinstance(self._known, OwnParameters):
            return mean
        along = self.directions.along(mean)
        self._known.step(along, factor, noise_std)
        part = self.directions.combined(along, mean)
        return {name: value - part[name] for name, value in mean.items()}

    def stated(self, trace: Trace, delta: float) -> StatedRun:
        """Return the run as the canaries have seen it. `trace`: of all its steps."""
        if self._method.example_budget is None:
            whole = seen_run(trace, self._share)
            return StatedRun(whole, whole, delta)
        most, least = (seen_run(trace.until(steps), self._share) for steps in (self.steps, self.full_steps))
        return StatedRun(most, least, delta)

    def state(self) -> dict[str, Any]:
        clipping = None if self._clipping is None else asdict(self._clipping)
        return {
            "included": self.included.tolist(),
            "batches": self._batches.state(),
            "evidence": self._known.state(),
            "clipping": clipping,
            "steps": [self.steps, self.full_steps],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.included = np.array(state["included"], np.bool_)
        self._batches.restore(state["batches"])
        self._known.restore(state["evidence"])
        self._clipping = None if state["clipping"] is None else ClippingState(**state["clipping"])
        self.steps, self.full_steps = state["steps"]


def other_directions(audit: AuditSpec, parameters: int) -> tuple[int, int]:
    """Return how many references and witnesses an audit has in a model of so many ``parameters``, beside its canaries.

    From the last model it has none: they would take further directions away from the model.
    """
    if audit.own_parameters:
        return 0, 0
    free = parameters - audit.canaries
    witnesses = _WITNESSES if free >= 2 * _WITNESSES else 0
    return max(0, min(_REFERENCES * audit.canaries, free - witnesses)), witnesses


def times_of(trace: Trace) -> int:
    """Return how often a canary adds a contribution: once, and once more for each other that changes when it joins.

    Of users with several rows, whose joint law in fixed batches is not that of independent rows, no others count.
    """
    if trace.adjacency == "replace_one":
        return 2
    return 1 + (trace.segments[0].sampling.displaced if trace.unit.rows == 1 else 0)


def canary_share(trace: Trace) -> float:
    """Return the contribution of a canary over the sensitivity: at most 1, and what its budget under a filter pays."""
    limit = trace.filter
    if limit is None:
        return 1.0
    prices = [limit.prices(each.sampling.sample_rate, each.noise_multiplier) for each in trace.segments]

    def is_paid(share: float) -> bool:
        costs = (each.steps * float(price.cost(share)) for each, price in zip(trace.segments, prices, strict=True))
        return math.fsum(costs) <= limit.budget

    if is_paid(1.0):
        return 1.0
    return beginning(lambda share: not is_paid(share), 0.0, 1.0, _HALVINGS)[0]  # the budget must pay for it


def seen_run(trace: Trace, share: float) -> Trace:
    """Return the steps of a run as seen by canaries that add ``share`` of the sensitivity: with larger noise alone."""
    segments = (replace(each, noise_multiplier=each.noise_multiplier / share) for each in trace.segments)
    return replace(trace, segments=tuple(segments), filter=None, releases=())


def longest(rule: ClipRule, groups: int) -> float:
    """Return the largest norm of a clipped gradient under the rule that is found: at most its sensitivity, if it clips.

    Of each group, norms at each bound of the rule and far above are tried.
    """
    bounds = {rule.sensitivity, *rule.bounds.values()}
    norms = torch.tensor([stretch * bound for bound in sorted(bounds) for stretch in _STRETCHES])
    of_groups = torch.arange(groups).repeat_interleave(len(norms))
    tried = Examples(norms.repeat(groups), of_groups, torch.zeros_like(of_groups))
    added = rule.weights(tried).double() * tried.norms.double()
    return float(added.max())


def require_directions(canaries: int, parameters: int) -> None:
    """Raise InvalidInput for more gradient canaries than the model has parameters to train."""
    if canaries > parameters:
        raise InvalidInput(
            f"audit.canaries is {canaries}, but the model has {parameters} trainable parameters, and each gradient "
            f"canary needs a direction of its own; choose at most {parameters}"
        )


def check_gradient_audit(spec: TrialSpec, *, layerwise: bool) -> None:
    """Refuse gradient canaries where no proof says that the claim covers them, or nothing is claimed.

    `layerwise`: whether clipping is by layer. Raises: InvalidInput.
    """

    def refuse(what: str, why: str, instead: str) -> None:
        raise InvalidInput(f"audit.kind is gradient, but {what}: {why}; {instead}, or audit rows")

    sampling, clipping = spec.sampling, spec.clipping.name
    if sampling.max_batch_size is not None:
        refuse(
            f"sampling.max_batch_size is {sampling.max_batch_size}",
            "canaries would not displace examples from full batches",
            "leave it out",
        )
    if sampling.method == RANDOM_ALLOCATION and spec.unit.rows > 1:
        refuse(
            f"rows of users are allocated at random, {spec.unit.rows} of each",
            "canaries of several rows have no evidence there",
            "take user_sampling uls or poisson batches",
        )
    if layerwise:
        refuse(f"clipping {clipping!r} is by layer", "clipped directions would no longer be orthogonal", "clip flat")
    if ":" in clipping:
        refuse(f"clipping {clipping!r} may use what it knows of each example", "canaries are none", "clip flat")
    if clipping == "none" or not spec.is_private:
        refuse("the trial is not private", "there is no claim to test", "give it noise and clipping")
