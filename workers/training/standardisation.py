"""Private centres and a common scale of features in [0, 1].

Guarantee: `private_moments` is one Gaussian mechanism under add/remove and zero-out adjacency. With x - 1/2 in
[-1/2, 1/2]^d, the vectors (x - 1/2) / (sqrt(d) / 2) and the numbers |x - 1/2|^2 / (d / 4) have norms of at most 1, so
that both together, divided by sqrt(2), have L2 sensitivity 1. The number of rows n is public.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from dpsweep.workers.noise.gaussian_sources import NoiseSource

_LEAST_DEVIATION: Final = 0.02


def moments(blocks: Callable[[], Iterator[Tensor]], width: int) -> Tensor:
    """Return [width + 1] float64: sums over all rows that have L2 sensitivity 1. A row that is not finite adds
    nothing.
    """
    total = torch.zeros(width + 1, dtype=torch.float64)
    for block in blocks():
        rows = block.double()
        centred = rows[rows.isfinite().all(1)].clamp(0.0, 1.0) - 0.5
        total[:-1] += centred.sum(0) / (0.5 * width**0.5)
        total[-1] += (centred**2).sum() / (0.25 * width)
    return total / math.sqrt(2.0)


def private_moments(
    blocks: Callable[[], Iterator[Tensor]], width: int, rows: int, noise: NoiseSource, noise_multiplier: float
) -> dict[str, Tensor]:
    """Return the mean of each column [width] and one deviation [1] of all columns about their means, float32.

    rows: their public number.
    """
    released = noise.added(moments(blocks, width), noise_multiplier) * 2.0**0.5 / rows
    error = 2.0**0.5 * noise_multiplier / rows * 0.5 * width**0.5
    offsets = (released[:-1] * 0.5 * width**0.5).clamp(-0.5, 0.5)
    squares = float(released[-1]) * 0.25
    variance = squares - float((offsets**2).mean()) + error**2  # the noise of the means adds to their squares
    deviation = math.sqrt(min(max(variance, _LEAST_DEVIATION**2), 0.25))
    return {"mean": (0.5 + offsets).float(), "deviation": torch.tensor([deviation])}


def standardised_by(state: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Return the rows [b, ...] with the leading columns centred and scaled, changed in place."""
    width = len(state["mean"])
    rows[:, :width] = (rows[:, :width] - state["mean"]) / state["deviation"]
    return rows
