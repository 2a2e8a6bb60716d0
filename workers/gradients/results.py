"""Results of a pass over a batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from accounting.errors import InvalidInput


@dataclass(frozen=True)
class BatchNorms:
    """L2 norms of the per-example gradients of one batch, before any clipping.

    norms: [B], over all trainable parameters. layer_norms: [B, L] in the order of `GradientEngine.layer_names`, or
    None if the engine is not layerwise. losses: [B]. The norm of a gradient that is not finite (or whose squared norm
    overflows) is +inf, so that ``min(1, C / norm)`` is 0.
    """

    norms: Tensor
    layer_norms: Tensor | None
    losses: Tensor

    def of_first(self, examples: int) -> BatchNorms:
        """Those of the first examples."""
        if examples == self.losses.shape[0]:
            return self
        layer_norms = None if self.layer_norms is None else self.layer_norms[:examples]
        return BatchNorms(self.norms[:examples], layer_norms, self.losses[:examples])


@dataclass(frozen=True)
class WeightedSum:
    """``gradients[name] = sum_i weights[i] * g_i[name]``, each in the shape of its parameter.

    non_finite: number of examples whose gradient is not finite; their weights are 0. weights: [B] or [B, L], as used.
    """

    norms: BatchNorms
    weights: Tensor
    gradients: dict[str, Tensor]
    non_finite: int


def require_same(differ: Tensor) -> None:
    """Refuse a second pass with other losses: the norms of the first would not be those of the summed gradients."""
    if bool(differ.any()):
        raise InvalidInput(
            "the model's losses on the same rows differ from one pass to the next: it draws random numbers from "
            "elsewhere than torch's own generators, or changes while it runs; use torch.rand and the like"
        )
