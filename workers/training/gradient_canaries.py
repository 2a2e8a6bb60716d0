"""Gradient canaries: made-up contributions along their own directions, which batches take in like examples.

The canaries are no examples. Each has a direction, and all directions are orthogonal. A secret fair coin for each
decides whether it takes part. One that does joins batches by the sampling of the trial, drawn on its own, and then adds
its direction times the longest gradient that the clipping rule of the step lets through, as often as rows of it join if
it is a user with several. Where an example that joins displaces another, as in fixed batches, or is replaced by
another, a canary stands for both, whose contributions may be opposite: it adds twice that. So each coin is the pair of
distributions that the claim is computed from, and the claim covers it.

The guarantee of every real example is unchanged: what is added to the sum does not depend on the data, and its noise
stays as it was. The canaries do change the model. Right guesses from the transcript ``iterates`` read the noise of the
run, and no epsilon covers that: only the owner of the data may see them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import numpy as np
import scipy.fft
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.filters import StepPrices
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.workers.clipping import ClippingMethod, ClippingState, ClipRule, Examples, PublicFacts
from dpsweep.workers.noise.gaussian_sources import derive_seed
from dpsweep.workers.sampling.samplers import make_row_draws
from dpsweep.workers.spec import AuditSpec, TrialSpec
from dpsweep.workers.training.batch_gradients import NO_ANSWER
from dpsweep.workers.training.canary_evidence import CanaryBatches, make_evidence

Array = NDArray[np.float64]

_STRETCHES: Final = (1.0 - 1e-6, 1.0, 1e3)
"""Norms of a canary before clipping, over each bound of the rule, among which the one that adds most is taken."""

_LARGEST: Final = 4
"""Number of singular parts of each matrix that a score leaves out."""
_REFERENCES: Final = 4
"""References for each canary, where the model has so many parameters."""
_WITNESSES: Final = 64
"""Directions from which the noise of a step is measured, if the model has as many besides."""


class Directions:
    """Orthonormal directions in the space of all parameters: rows of a cosine transform, with a random sign for each
    parameter. Projections on all of them take one fast transform.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], count: int, seed: int) -> None:
        """Raises: InvalidInput for more directions than parameters."""
        self._shapes = dict(shapes)
        self._sizes = [math.prod(shape) for shape in shapes.values()]
        size = sum(self._sizes)
        if count > size:
            raise InvalidInput(
                f"audit.canaries is {count}, but the model has {size} trainable parameters, and each gradient canary "
                "needs a direction of its own; choose fewer"
            )
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
        size: int,
        method: ClippingMethod,
        facts: PublicFacts,
        trace: Trace,
    ) -> None:
        """`size`: of the population that is sampled. `trace`: planned.

        Raises: InvalidInput for more canaries than parameters.
        """
        self._spec, self._method, self._facts = audit, method, replace(facts, dataset_size=1)
        size_of_model = sum(parameter.numel() for parameter in parameters.values())
        references, witnesses = other_directions(audit.canaries, size_of_model)
        count = audit.canaries + references
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.directions = Directions(shapes, max(count + witnesses, audit.canaries), spec.seed)
        self._count = count
        coins = make_row_draws(spec.known_seed, "coins of canaries")
        self.included: NDArray[np.bool_] = np.isin(np.arange(count), coins.each(2 * audit.canaries, audit.canaries))
        self.included[audit.canaries :] = False
        draws = make_row_draws(spec.known_seed, "batches of canaries")
        self._batches = CanaryBatches(spec, count, size, draws)
        self._clipping: ClippingState | None = None
        self._drawn = np.zeros(count)
        self._length, self._times = 0.0, times_of(trace)
        self._evidence = make_evidence(self._batches, trace.strategy)
        self.steps = self.full_steps = 0
        """Steps so far to which canaries could contribute at all, and in full."""

    @property
    def evidence(self) -> Array:
        """Log-likelihood ratio [count] of taking part, from the noisy sums so far and all else that is added."""
        return self._evidence.total

    def begin(self, bound: float) -> None:
        """Start the state of a canary under a clipping method that remembers examples. `bound`: the first one."""
        if self._method.refreshes or self._method.example_budget is not None:
            self._clipping = self._method.start(bound, self._facts)

    def pay(self, prices: StepPrices) -> None:
        """Charge the budget of a canary, which a filter limits as it does an example with the longest gradients."""
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
        self.full_steps += length > 0.99 * rule.sensitivity
        weights = np.zeros(self.directions.count)
        weights[: self._count] = self._drawn * self._length * self.included
        added = self.directions.combined(weights, gradients)
        return {name: value + added[name] for name, value in gradients.items()}

    def see(self, gradients: Mapping[str, Tensor], noisy: Mapping[str, Tensor], std: float) -> None:
        """Take in the noisy sum of a step, for an adversary who knows all real examples and their batches.

        `gradients`: the clipped sum of the real examples. `std`: of the noise, as the trial states it.
        """
        if self._spec.transcript == "iterates":
            seen = self.directions.along({name: noisy[name] - gradients[name] for name in gradients})
            self._evidence.see(seen, self._drawn, self._length, std)

    def scores(self, start: nn.Module, released: nn.Module, drift: Sequence[Mapping[str, Tensor]]) -> tuple[Array, ...]:
        """Return ways to score canaries and references, each [count]: higher if one is likely to have taken part.

        ``iterates``: `evidence`. ``last_model``: how far the parameters moved against its direction, from the first
        model to the released one, for an adversary who knows all real examples: all of that, without the largest
        singular parts of each matrix, and without what ``drift`` spans, the clipped gradients of real examples between
        the two models.
        """
        if self._spec.transcript == "iterates":
            return (self.evidence,)
        after = dict(released.named_parameters())
        moved = {name: each - after[name].to(each) for name, each in start.named_parameters() if each.requires_grad}
        parts = {name: _without_largest(each) for name, each in moved.items()}
        ways = (moved, parts, _without(moved, drift))
        return tuple(self.directions.along(way)[: self._count] for way in ways)

    def state(self) -> dict[str, Any]:
        clipping = None if self._clipping is None else asdict(self._clipping)
        return {
            "included": self.included.tolist(),
            "batches": self._batches.state(),
            "evidence": self._evidence.state(),
            "clipping": clipping,
            "steps": [self.steps, self.full_steps],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.included = np.array(state["included"], np.bool_)
        self._batches.restore(state["batches"])
        self._evidence.restore(state["evidence"])
        self._clipping = None if state["clipping"] is None else ClippingState(**state["clipping"])
        self.steps, self.full_steps = state["steps"]


def _without_largest(moved: Tensor) -> Tensor:
    """``moved`` without its `_LARGEST` largest singular parts, if it is a matrix of more than twice as many."""
    matrix = moved.detach().flatten(1) if moved.ndim > 1 else moved.detach()[None]
    if min(matrix.shape) <= 2 * _LARGEST:
        return moved
    left, sizes, right = torch.linalg.svd(matrix.float(), full_matrices=False)
    rest: Tensor = matrix - (left[:, :_LARGEST] * sizes[:_LARGEST]) @ right[:_LARGEST]
    return rest.view(moved.shape)


def _without(moved: Mapping[str, Tensor], spanned: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """``moved`` without its projection on what ``spanned`` span."""
    if not spanned:
        return dict(moved)
    columns = torch.stack([_joined(each, moved) for each in spanned], dim=1)
    basis, sizes, _ = torch.linalg.svd(columns, full_matrices=False)
    basis = basis[:, sizes > 1e-6 * sizes.max()]
    whole = _joined(moved, moved)
    parts = (whole - basis @ (basis.T @ whole)).split([each.numel() for each in moved.values()])
    return {name: part.view(moved[name].shape) for name, part in zip(moved, parts, strict=True)}


def _joined(values: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    return torch.cat([values[name].detach().flatten().double().cpu() for name in names])


def other_directions(canaries: int, parameters: int) -> tuple[int, int]:
    """Return how many references and witnesses a model of so many ``parameters`` has room for, beside the canaries."""
    free = parameters - canaries
    witnesses = _WITNESSES if free >= 2 * _WITNESSES else 0
    return max(0, min(_REFERENCES * canaries, free - witnesses)), witnesses


def times_of(trace: Trace) -> int:
    """Return how often a canary adds a contribution: once, and once more for each other that changes when it joins.

    Of users with several rows, whose joint law in fixed batches is not that of independent rows, no others count.
    """
    if trace.adjacency == "replace_one":
        return 2
    return 1 + (trace.segments[0].sampling.displaced if trace.unit.rows == 1 else 0)


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
    if layerwise:
        refuse(f"clipping {clipping!r} is by layer", "clipped directions would no longer be orthogonal", "clip flat")
    if ":" in clipping:
        refuse(f"clipping {clipping!r} may use what it knows of each example", "canaries are none", "clip flat")
    if clipping == "none" or not spec.is_private:
        refuse("the trial is not private", "there is no claim to test", "give it noise and clipping")
