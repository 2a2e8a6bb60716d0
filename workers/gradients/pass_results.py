"""Results of a pass over a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.gradients.factors import ExampleGradients
from dpsweep.workers.gradients.modes import RandomState


@dataclass(frozen=True)
class BatchNorms:
    """L2 norms of the per-example gradients of one batch, before any clipping.

    `norms`: [B], over all trainable parameters. `layer_norms`: [B, L] in the order of `GradientEngine.layer_names`, or
    None if the engine is not layerwise. `losses`: [B]. The norm of a gradient that is not finite (or whose squared norm
    overflows) is +inf, so that ``min(1, C / norm)`` is 0.
    """

    norms: Tensor
    layer_norms: Tensor | None
    losses: Tensor

    def of_first(self, examples: int) -> BatchNorms:
        """Return norms and losses of the first examples."""
        if examples == self.losses.shape[0]:
            return self
        layer_norms = None if self.layer_norms is None else self.layer_norms[:examples]
        return BatchNorms(self.norms[:examples], layer_norms, self.losses[:examples])


@dataclass(frozen=True)
class Pass:
    """One micro-batch after its backward pass.

    `finite`: mask of finite norms, padding included, or None if all are. `gradients`: empty after a norm pass.
    `random_state`: the state from which the pass started, or None if it drew nothing.
    """

    norms: BatchNorms
    finite: Tensor | None
    gradients: Mapping[str, ExampleGradients]
    random_state: RandomState | None = None

    def without_infinite(self, weights: Tensor) -> Tensor:
        """Return weights [B] or [B, L], set to 0 for examples whose norm is not finite."""
        if self.finite is None:
            return weights
        finite = self.finite[: len(weights)]
        return weights.masked_fill(~(finite if weights.dim() == 1 else finite[:, None]), 0.0)

    def non_finite(self) -> int:
        """Return the number of examples whose norm is not finite."""
        return 0 if self.finite is None else int((~self.finite[: len(self.norms.losses)]).sum())


@dataclass(frozen=True)
class WeightedSum:
    """``gradients[name] = sum_i weights[i] * g_i[name]``, each in the shape of its parameter.

    `non_finite`: number of examples whose gradient is not finite; their weights are 0. `weights`: [B] or [B, L], as
    used.
    """

    norms: BatchNorms
    weights: Tensor
    gradients: dict[str, Tensor]
    non_finite: int


def require_same(differ: Tensor) -> None:
    """Raise InvalidInput if losses differ in the second pass: the norms then belong to other gradients."""
    if bool(differ.any()):
        raise InvalidInput(
            "the model's losses on the same rows differ from one pass to the next: it draws random numbers from "
            "elsewhere than torch's own generators, or changes while it runs; use torch.rand and the like"
        )
