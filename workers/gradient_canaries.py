"""Gradient canaries: made-up contributions along their own directions, which batches take in as those of examples.

The canaries are no examples. Each has a direction, and all directions are orthogonal. A secret fair coin for each
decides whether it takes part; one that does joins batches by the sampling of the trial, drawn on its own, and then adds
its direction times the longest gradient that the clipping rule of the step lets through. That is a record of the
adjacency of the claim, so the claim covers every coin.

The guarantee of every real example is unchanged: what is added to the sum does not depend on the data, and its noise
stays as it was. The model does change, by what the canaries add. Right guesses from the transcript ``iterates`` read
the noise of the run, and no epsilon covers that: only the owner of the data may see them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import scipy.fft
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.clipping import ClipRule, Examples
from dpsweep.workers.noise import derive_seed
from dpsweep.workers.sampling import PoissonSampler, RowDraws, Sampler, ShuffledSampler, make_row_draws
from dpsweep.workers.spec import AuditSpec, TrialSpec

Array = NDArray[np.float64]

_STRETCHES: Final = (1.0 - 1e-6, 1.0, 1e3)
"""Norms of a canary before clipping, over each bound of the rule, among which the one that adds most is taken."""

_LARGEST: Final = (0, 2, 4, 8)
"""Numbers of singular parts of each matrix that a score leaves out."""


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
    """The gradient canaries of a trial, their coins and what the iterates have shown of these so far. Private."""

    def __init__(self, spec: TrialSpec, audit: AuditSpec, parameters: Mapping[str, Tensor], size: int) -> None:
        """size: number of training examples. Raises: InvalidInput for more canaries than parameters."""
        self._spec, count = audit, audit.canaries
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.directions = Directions(shapes, count, spec.seed)
        coins = make_row_draws(spec.noise_source, spec.seed, "coins of canaries")
        self.included: NDArray[np.bool_] = np.isin(np.arange(count), coins.each(2 * count, count))
        draws = make_row_draws(spec.noise_source, spec.seed, "batches of canaries")
        batch = spec.sampling.expected_size(size)
        self._rate: float | None = batch / size if spec.sampling.method == "poisson" else None
        self._sampler = _sampler(spec.sampling.method, count, size, batch, draws)
        self._joined = np.empty(0, np.int64)
        self._length = 0.0
        self.evidence: Array = np.zeros(count)
        """Log-likelihood ratio [m] of taking part, from the noisy sums so far and all else that is added to them."""

    def with_canaries(self, gradients: Mapping[str, Tensor], rule: ClipRule, groups: int) -> Mapping[str, Tensor]:
        """Return the clipped sum of the real examples, plus what the canaries in the next batch add."""
        rows = self._sampler.next_batch()
        self._joined = rows[rows < len(self.included)]
        self._length = longest(rule, groups)
        weights = np.zeros(len(self.included))
        weights[self._joined] = self._length
        added = self.directions.combined(weights * self.included, gradients)
        return {name: value + added[name] for name, value in gradients.items()}

    def see(self, gradients: Mapping[str, Tensor], noisy: Mapping[str, Tensor], std: float) -> None:
        """Take in the noisy sum of a step, for an adversary who knows all real examples and their batches.

        gradients: the clipped sum of the real examples. std: of the noise, as the trial states it.
        """
        if self._spec.transcript != "iterates" or self._length == 0.0:
            return
        seen = self.directions.along({name: noisy[name] - gradients[name] for name in gradients}) / self._length
        ratios = (seen - 0.5) * (self._length / max(std, 1e-9 * self._length)) ** 2
        if self._rate is None:  # the place of an example in an epoch is no secret of the claim
            self.evidence[self._joined] += ratios[self._joined]
        else:
            out = math.log1p(-self._rate) if self._rate < 1.0 else -math.inf
            self.evidence += np.logaddexp(out, math.log(self._rate) + ratios)

    def scores(self, start: nn.Module, released: nn.Module) -> tuple[Array, ...]:
        """Return ways to score the canaries, each [m]: higher if a canary is likely to have taken part.

        ``iterates``: `evidence`. ``last_model``: how far the parameters moved against its direction, from the first
        model to the released one; all of that, or without the largest singular parts of each matrix, in which what is
        learnt from the data gathers.
        """
        if self._spec.transcript == "iterates":
            return (self.evidence,)
        after = dict(released.named_parameters())
        moved = {name: each - after[name].to(each) for name, each in start.named_parameters() if each.requires_grad}
        return tuple(
            self.directions.along({name: _without_largest(each, parts) for name, each in moved.items()})
            for parts in _LARGEST
        )

    def state(self) -> dict[str, Any]:
        return {
            "included": self.included.tolist(),
            "sampler": self._sampler.state(),
            "evidence": torch.from_numpy(self.evidence.copy()),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.included = np.array(state["included"], np.bool_)
        self._sampler.restore(state["sampler"])
        self.evidence = state["evidence"].numpy().copy()


def _without_largest(moved: Tensor, parts: int) -> Tensor:
    """``moved`` without its largest singular parts, if it is a matrix of more than twice as many."""
    matrix = moved.detach().flatten(1) if moved.ndim > 1 else moved.detach()[None]
    if parts == 0 or min(matrix.shape) <= 2 * parts:
        return moved
    left, sizes, right = torch.linalg.svd(matrix.float(), full_matrices=False)
    rest: Tensor = matrix - (left[:, :parts] * sizes[:parts]) @ right[:parts]
    return rest.view(moved.shape)


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


def _sampler(method: str, canaries: int, size: int, batch: int, draws: RowDraws) -> Sampler:
    """Return batches of rows, where those below ``canaries`` are canaries that join as examples do.

    Poisson: with the same probability, as rows of enough copies of the data. Shuffled: each is in one batch of every
    epoch of as many steps.
    """
    match method:
        case "poisson":
            copies = -(-canaries // size)
            return PoissonSampler(copies * size, copies * batch, draws)
        case "shuffle":
            steps = -(-size // batch)
            each = -(-canaries // steps)
            return ShuffledSampler(steps * each, each, draws)
        case _:
            raise AssertionError(f"check_gradient_audit refuses the sampling {method!r}")


def check_gradient_audit(spec: TrialSpec, *, layerwise: bool, of_examples: bool) -> None:
    """Refuse gradient canaries where no proof says that the claim covers them, or nothing is claimed.

    layerwise, of_examples: whether clipping is by layer, or by thresholds of single examples.
    Raises: InvalidInput.
    """

    def refuse(what: str, why: str, instead: str) -> None:
        raise InvalidInput(f"audit.kind is gradient, but {what}: {why}; {instead}, or audit rows")

    sampling, clipping = spec.sampling, spec.clipping.name
    if sampling.method not in ("poisson", "shuffle"):
        refuse(
            f"sampling.method is {sampling.method!r}",
            "canaries are drawn beside the examples, which is a neighbouring data set with poisson or shuffle only",
            "choose one of them",
        )
    if sampling.max_batch_size is not None:
        refuse(
            f"sampling.max_batch_size is {sampling.max_batch_size}",
            "canaries would not displace examples from full batches",
            "leave it out",
        )
    if layerwise:
        refuse(f"clipping {clipping!r} is by layer", "clipped directions would no longer be orthogonal", "clip flat")
    if of_examples or ":" in clipping:
        refuse(f"clipping {clipping!r} may use what it knows of each example", "canaries are none", "clip flat")
    if clipping == "none" or not spec.is_private:
        refuse("the trial is not private", "there is no claim to test", "give it noise and clipping")
