"""What a pass over a batch returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class BatchNorms:
    """L2 norms of the per-example gradients of one batch, before any clipping.

    norms: [B], over all trainable parameters. layer_norms: [B, L] in the order of `GradientEngine.layer_names`, or
    None where the engine is not layerwise. losses: [B]. A gradient that is not finite (or whose squared norm
    overflows) has norm +inf, so that ``min(1, C / norm)`` is 0.
    """

    norms: Tensor
    layer_norms: Tensor | None
    losses: Tensor


@dataclass(frozen=True)
class WeightedSum:
    """``gradients[name] = sum_i weights[i] * g_i[name]``, each in the shape of its parameter.

    weights: [B] or [B, L], after the weight of every example counted in ``non_finite`` was set to 0.
    """

    norms: BatchNorms
    weights: Tensor
    gradients: dict[str, Tensor]
    non_finite: int
